"""Replays a trace: the share of its blocks that a cache of some capacity would have served, by eviction policy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np

from kvoffload import native
from kvoffload.cache.benefit import PrefillCost
from kvoffload.cache.trace import BLOCK_TOKENS, TraceRequest
from kvoffload.errors import ConfigError

OPTIMUM = "optimum"
"""Stands in a policy's place for Belady's choice, which sees the whole trace: the most hits, not the most time."""

_BATCH_REQUESTS = 1024


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """One policy at one capacity."""

    policy: str
    capacity_percent: float
    """Capacity in percent of all distinct records of the trace."""
    capacity_units: int
    """Capacity in blocks of a plain model; in a hybrid one a prefix block has 4 units, a window block 2, a state 16."""
    hits: int
    references: int
    hit_squares: int
    """The sum over all requests of how many blocks were hit, squared."""
    reference_squares: int
    """The sum over all requests of how many blocks were asked for, squared."""
    useless_share: float | None = None
    """Mean share of the bytes that no acquire could have made use of; None: never sampled, memory did not fill."""

    @property
    def hit_rate(self) -> float:
        """Blocks below the usable boundaries, of all full blocks asked for."""
        return self.hits / self.references

    def saved_s(self, cost: PrefillCost, block_tokens: int) -> float:
        """Returns the time that computing what was hit would have taken."""
        return cost.total_s(blocks=self.hits, squares=self.hit_squares, block_tokens=block_tokens)

    def saved_share(self, cost: PrefillCost, block_tokens: int) -> float:
        """Returns the same as a share of what computing all full blocks would have taken."""
        total_s = cost.total_s(blocks=self.references, squares=self.reference_squares, block_tokens=block_tokens)
        return self.saved_s(cost, block_tokens) / total_s


def pack_trace(requests: Iterable[TraceRequest], *, block_tokens: int = BLOCK_TOKENS) -> native.ReplayTrace:
    """The full blocks of all requests; takes 4 bytes a reference and about 60 a distinct block."""
    trace = native.ReplayTrace()
    remaining = iter(requests)
    while batch := [request.full_blocks(block_tokens) for request in islice(remaining, _BATCH_REQUESTS)]:
        ids = np.fromiter((block for blocks in batch for block in blocks), dtype=np.uint64)
        trace.add(ids, np.fromiter(accumulate(map(len, batch)), dtype=np.uint64))
    if trace.reference_count == 0:
        raise ConfigError("the trace has no request with a full block", remedy=f"a block has {block_tokens} tokens")
    return trace


def replay(
    trace: native.ReplayTrace, *, policies: Sequence[str], capacity_percents: Sequence[float], is_hybrid: bool = False
) -> Iterator[ReplayResult]:
    """Capacity by capacity, each policy in turn, then the optimum; a hybrid model has no known one."""
    total = trace.total_bytes(is_hybrid)
    for percent in capacity_percents:
        capacity = int(total * percent / 100)
        for policy in policies:
            outcome = native.replay_policy(trace, policy, capacity, is_hybrid)
            yield ReplayResult(
                policy=policy,
                capacity_percent=percent,
                capacity_units=capacity,
                hits=outcome["hits"],
                references=trace.reference_count,
                hit_squares=outcome["hit_squares"],
                reference_squares=trace.reference_squares,
                useless_share=outcome["useless_share"] if outcome["samples"] else None,
            )
        if not is_hybrid:
            optimal = native.count_optimal_hits(trace, capacity)
            yield ReplayResult(
                policy=OPTIMUM,
                capacity_percent=percent,
                capacity_units=capacity,
                hits=optimal["hits"],
                references=trace.reference_count,
                hit_squares=optimal["hit_squares"],
                reference_squares=trace.reference_squares,
            )


def count_own_hits(trace: native.ReplayTrace, blocks: int) -> int:
    """Returns how many blocks engines' own caches, of so many blocks together, would have served. They evict by LRU."""
    return int(native.replay_policy(trace, "lru", blocks, False)["hits"]) if blocks else 0


def parse_policies(text: str) -> tuple[str, ...]:
    """`all`, or names between commas, each once."""
    known = native.policy_names()
    if text == "all":
        return known
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)} and all"
            raise ConfigError(f"no eviction policy is called {name!r}", remedy=hint)
    return names


def parse_capacities(text: str) -> tuple[float, ...]:
    """Reads percentages between commas."""
    percents = []
    for part in text.split(","):
        try:
            percent = float(part)
        except ValueError:
            percent = 0.0
        if not 0 < percent <= 100:
            raise ConfigError(
                f"capacity {part.strip()!r} is no percentage", remedy="allowed are numbers above 0 and up to 100"
            )
        percents.append(percent)
    return tuple(percents)
