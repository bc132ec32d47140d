"""Answers of a server to questions about itself become plain values here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvoffload.cache import CacheStats, CurvePoint, MemoryCurve, PlaceUsage, TenantUsage
from kvoffload.errors import ServerError
from kvoffload.protocol import Counts, Error, Insight, LedgerRow, ModelUse, NamedCount, ServerMessage, Timing
from kvoffload.protocol.message import Reply, Request
from kvoffload.protocol.shape import name_of
from kvoffload.units import KIB

_Kind = TypeVar("_Kind", bound=ServerMessage)
_IS_IT_THERE = "see whether the cache server runs"
AS_OPERATOR = "ask as the server's user, or with its operator's token"


@dataclass(frozen=True, kw_only=True)
class TimedCalls:
    """A histogram of the durations of one call: counts by bucket, the last for those beyond all bounds, and the sum."""

    name: str
    label: str
    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def bound(self, share: float, bounds_s: Sequence[float]) -> float | None:
        """Returns the bound that this share of the calls took at most. None: there were none, or they took longer than
        any bound."""
        wanted, seen = share * self.count, 0
        for count, bound_s in zip(self.counts, bounds_s, strict=False):
            seen += count
            if self.count and seen >= wanted:
                return bound_s
        return None


@dataclass(frozen=True, kw_only=True)
class HitWindow:
    """Hits of the last day, or since the server began to follow its sample of blocks, and those that pools of other
    sizes would have had meanwhile."""

    span_s: float = 0.0
    """Length of the window in seconds; 0: the server does not tell it."""
    saved_s: float = 0.0
    """Computing time that hits have spared the engines, in seconds."""
    hit_memory: int = 0
    """Tokens that memory had."""
    hit_lower: int = 0
    """Tokens that slower tiers had."""
    evicted: int = 0
    """Tokens that were computed because blocks had been evicted."""
    asked_blocks: int = 0
    """Blocks that engines loaded, or computed and saved."""
    hit_blocks: Mapping[float, int] = field(default_factory=dict)
    """Hits among these blocks by memory, as a multiple of the pool's."""
    has_other_groups: bool = False
    """Whether a model has windows or states. Blocks that memory has, and that cannot be loaded because it lacks these,
    are not asked for, so a pool that has them hits more than the curve tells."""


@dataclass(frozen=True, kw_only=True)
class ServerInsight:
    """The outcomes of prompts and the timings of calls, since the server began."""

    outcomes: Mapping[str, int]
    """Tokens of prompts by outcome: `hit_memory`, `hit_lower`, or the reason why they were computed."""
    errors: Mapping[str, int]
    """Number of errors that were answered, by code."""
    timings: tuple[TimedCalls, ...]
    asked_blocks: int
    distinct_blocks: int
    """Number of different blocks among those asked for, estimated."""
    saved_s: float
    """Computing time that hits have spared the engines, in seconds."""
    models: tuple[ModelUse, ...] = ()
    """The models that use most of the memory."""
    speeds: Mapping[str, int] = field(default_factory=dict)
    """Latest measured speed of reading from each slower tier, in bytes a second."""
    hints: Mapping[str, int] = field(default_factory=dict)
    """Number of hints by action and outcome, as in `retain.done`."""
    hint_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the hints' prefixes, by what came of them."""
    retained: int = 0
    retained_bytes: int = 0
    retained_limit_bytes: int = 0
    curve: MemoryCurve = field(default_factory=MemoryCurve)
    """The shares of hits to expect with less and with more memory."""
    window: HitWindow = field(default_factory=HitWindow)
    ledger: tuple[LedgerRow, ...] = ()
    """Rows of tenants and models."""
    occupied_byte_s: Mapping[str, int] = field(default_factory=dict)
    """Bytes, times the seconds for which they were occupied, of memory and of each slower tier, by name."""

    @property
    def ceiling(self) -> float | None:
        """Returns the share of the blocks asked for that an endless cache would have had; None: there were none."""
        if not self.asked_blocks:
            return None
        return max(0.0, 1 - self.distinct_blocks / self.asked_blocks)

    @property
    def told_ceiling(self) -> float | None:
        """Returns the same share, or None where more was hit than that. Then blocks are there from before the counts
        began, as after an adoption, and the share says nothing yet."""
        is_met = self.ceiling is not None and self.ceiling >= (self.hit_rate or 0.0)
        return self.ceiling if is_met else None

    @property
    def hit_rate(self) -> float | None:
        """Returns the share of hits of the tokens asked for; None: there were none."""
        asked = sum(self.outcomes.values())
        hits = self.outcomes.get("hit_memory", 0) + self.outcomes.get("hit_lower", 0)
        return hits / asked if asked else None


def expect(answer: ServerMessage | None, kind: type[_Kind], call: str, *, is_refusable: bool = True) -> _Kind:
    """Returns the answer if it is of the kind that the call brings. ServerError: it is not."""
    if not isinstance(answer, kind):
        remedy = AS_OPERATOR if is_refusable and isinstance(answer, Error) else _IS_IT_THERE
        raise ServerError(f"{call}: {_describe_fault(answer)}", remedy=remedy)
    return answer


def read_found(message: Request, answer: ServerMessage | None) -> Reply:
    """Returns the answer. ServerError: there is none, or the server refuses the request."""
    if not isinstance(answer, Reply) or isinstance(answer, Error):
        # A refusal begins with the call's name on the wire, which means nothing to a user who typed a command.
        line = _describe_fault(answer).removeprefix(f"{name_of(type(message))}: ")
        raise ServerError(line, remedy=AS_OPERATOR if isinstance(answer, Error) else _IS_IT_THERE)
    return answer


def read_stats(answer: ServerMessage | None) -> CacheStats:
    found = expect(answer, Counts, "counts", is_refusable=False)
    counts: dict[str, Any] = {name: value for name, value in vars(found).items() if isinstance(value, int)}
    tenants = tuple(
        TenantUsage(name=tenant.name, quota_bytes=tenant.quota_bytes, used_bytes=tenant.used_bytes)
        for tenant in found.tenants
    )
    places = tuple(PlaceUsage(**vars(place)) for place in found.places)
    traffic = {one.tier: {k: v for k, v in vars(one).items() if isinstance(v, int)} for one in found.traffic}
    return CacheStats(tenants=tenants, places=places, traffic=traffic, memory_reason=found.memory_reason, **counts)


def read_insight(answer: ServerMessage | None) -> ServerInsight:
    message = expect(answer, Insight, "insight", is_refusable=False)
    return ServerInsight(
        outcomes=_read_counts(message.outcomes),
        errors=_read_counts(message.errors),
        timings=tuple(map(_read_timing, message.timings)),
        asked_blocks=message.asked_blocks,
        distinct_blocks=message.distinct_blocks,
        saved_s=message.saved_us / 1e6,
        models=message.models,
        speeds=_read_counts(message.speeds),
        hints=_read_counts(message.hints),
        hint_tokens=_read_counts(message.hint_tokens),
        retained=message.retained,
        retained_bytes=message.retained_bytes,
        retained_limit_bytes=message.retained_limit_bytes,
        curve=_read_curve(message),
        window=_read_window(message),
        ledger=message.ledger,
        occupied_byte_s={
            "memory": message.memory_kib_s * KIB,
            **{tier.name: tier.count * KIB for tier in message.tier_kib_s},
        },
    )


def _read_curve(message: Insight) -> MemoryCurve:
    points = tuple(
        CurvePoint(memory=one.quarters / 4, hit_blocks=one.hit_blocks, hit_bytes=one.hit_bytes) for one in message.curve
    )
    return MemoryCurve(
        asked_blocks=message.curve_blocks,
        asked_bytes=message.curve_bytes,
        one_in=message.curve_one_in,
        points=points,
    )


def _read_window(message: Insight) -> HitWindow:
    return HitWindow(
        span_s=float(message.window_s),
        saved_s=message.window_saved_us / 1e6,
        hit_memory=message.window_hit_memory,
        hit_lower=message.window_hit_lower,
        evicted=message.window_evicted,
        asked_blocks=message.window_blocks,
        has_other_groups=message.window_has_other_groups,
        hit_blocks={one.quarters / 4: hits for one, hits in zip(message.curve, message.window_hits, strict=False)},
    )


def _read_counts(rows: tuple[NamedCount, ...]) -> dict[str, int]:
    return {row.name: row.count for row in rows}


def _read_timing(timing: Timing) -> TimedCalls:
    counts = tuple(int(count) for count in np.frombuffer(timing.counts, "<u8"))
    return TimedCalls(name=timing.name, label=timing.label, counts=counts, sum_s=timing.sum_ns / 1e9)


def _describe_fault(answer: ServerMessage | None) -> str:
    return answer.message if isinstance(answer, Error) else "the cache server did not answer in time"
