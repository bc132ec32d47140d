"""The worth of a trace's hits: computing that is spared, as time, as accelerators, and as money."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvoffload.cache.trace import TraceRequest
from kvoffload.errors import ConfigError


class TraceSpan:
    """The time from a trace's first request to its last, and its tokens; counts requests as they pass."""

    def __init__(self) -> None:
        self._first_ms: float | None = None
        self._last_ms = 0.0
        self.tokens = 0
        """Number of tokens of all prompts."""

    def watch(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        for request in requests:
            if self._first_ms is None:
                self._first_ms = request.timestamp_ms
            self._last_ms = request.timestamp_ms
            self.tokens += request.input_length
            yield request

    @property
    def seconds(self) -> float:
        return (self._last_ms - (self._first_ms or 0.0)) / 1000


@dataclass(frozen=True, kw_only=True)
class PrefillCost:
    """The time to compute one token of a prompt. It grows with the position: a token attends to all before it."""

    token_us: float = 21.6
    growth_us: float = 0.9
    """Additional microseconds for each 1,000 tokens before it."""

    def total_s(self, *, blocks: int, squares: int, block_tokens: int) -> float:
        """Returns the seconds that the first blocks of some prompts take.

        `blocks` is how many these are in all, `squares` the sum of the squares of how many each prompt has of them.
        """
        later_us = self.growth_us / 1000 * squares * block_tokens**2 / 2
        return (self.token_us * blocks * block_tokens + later_us) / 1e6


def parse_prefill_cost(text: str) -> PrefillCost:
    """Reads `TOKEN,GROWTH`, both in microseconds; one number alone stands for a cost that does not grow."""
    parts = text.split(",")
    try:
        costs = [float(part) for part in parts]
    except ValueError:
        costs = []
    if len(costs) not in (1, 2) or not all(0 <= cost < 1e6 for cost in costs) or costs[0] == 0:
        raise ConfigError(
            f"prefill cost {text!r} is not one or two numbers",
            remedy="allowed are microseconds below 1,000,000 of a token, above 0, and more for each 1,000 before it",
        )
    return PrefillCost(token_us=costs[0], growth_us=costs[1] if len(costs) == 2 else 0.0)


@dataclass(frozen=True, kw_only=True)
class BenefitSettings:
    """The user's figures about the engines, which are taken as given."""

    token_bytes: int
    """Bytes of KV per token, as printed by `kvoffload plan`."""
    block_tokens: int
    prefill: float
    """Prompt tokens that one accelerator computes a second, when it does nothing else."""
    hour_price: float = 0.0
    """Price of one accelerator per hour; 0: unknown."""

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    def share_of(self, memory_bytes: int, distinct_blocks: int) -> float:
        """That memory in percent of all distinct blocks, 100 at most. ConfigError: it holds no block."""
        if memory_bytes < self.block_bytes:
            raise ConfigError(
                f"{memory_bytes} bytes hold no block: one of {self.block_tokens} tokens takes {self.block_bytes}",
                remedy="give more memory, or fewer --token-bytes",
            )
        return min(memory_bytes / self.block_bytes / distinct_blocks, 1.0) * 100


@dataclass(frozen=True, kw_only=True)
class Benefit:
    """The benefit of one pool. Hits of engines' own caches are not counted: they need no pool."""

    pool_bytes: int
    spared_tokens: int
    spared_share: float
    """Spared tokens as a share of all prompt tokens."""
    spared_s: float
    """Spared computing time of one accelerator, in seconds."""
    accelerators: float
    """Number of accelerators that the spared work would have kept busy all the time."""
    hour_price: float
    """Price of these accelerators per hour."""


def reckon_benefit(
    settings: BenefitSettings, span: TraceSpan, *, pool_blocks: int, hits: int, own_hits: int
) -> Benefit:
    """`hits`, `own_hits`: blocks that the pool, and engines' own caches alone, would have served.

    ConfigError: the trace lasts no time, so that nothing is so much an hour.
    """
    if span.seconds <= 0:
        raise ConfigError(
            "all requests of the trace came at one time", remedy="leave --prefill out, or give a trace with timestamps"
        )
    tokens = max(hits - own_hits, 0) * settings.block_tokens
    spared_s = tokens / settings.prefill
    accelerators = spared_s / span.seconds
    return Benefit(
        pool_bytes=pool_blocks * settings.block_bytes,
        spared_tokens=tokens,
        spared_share=tokens / span.tokens,
        spared_s=spared_s,
        accelerators=accelerators,
        hour_price=accelerators * settings.hour_price,
    )
