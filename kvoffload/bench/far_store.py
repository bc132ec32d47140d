"""The common part of the benchmarks of remote tiers: a tier and the store's own client move the same bytes in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvoffload.bench.base import Goal, Progress, Result
from kvoffload.bench.measure import measure_timed_pair
from kvoffload.bench.tier_load import TIMEOUT_S, Records, as_a_server, get_all, put_all
from kvoffload.errors import BenchmarkError
from kvoffload.tiers.base import TierState
from kvoffload.tiers.remote import RemoteTier

_VERBS = ("put", "get")


class OwnClient(Protocol):
    """The client of a store that is started for a benchmark."""

    def time_limit(self, verb: str, value_bytes: int, clients: int) -> float:
        """Seconds in which so many clients move all data. A put leaves what a get finds."""
        ...

    def flush(self) -> None:
        """Removes all that is there."""
        ...


@dataclass(frozen=True, kw_only=True)
class Load:
    """Records of one size, and the size of the values that the store's own client moves for comparison."""

    record_bytes: int
    value_bytes: int
    goal: Goal | None


@dataclass(frozen=True, kw_only=True)
class FarStore:
    """A benchmark of one kind. `clients`: of the store's own; the best number of them is the limit."""

    name: str
    data_bytes: int
    clients: Sequence[int]
    rounds_before_puts: int = 0
    """Rounds of puts that fill the store before puts are measured; it is not emptied then. 0: each put goes to an empty
    store."""

    def measure(self, tier: RemoteTier, own: OwnClient, loads: Sequence[Load], progress: Progress) -> Iterator[Result]:
        """Rates in bytes per second. Closes the tier."""
        try:
            tier.wait_open(TIMEOUT_S)
            if tier.health()[0].state is not TierState.READY:
                raise BenchmarkError(f"there is no tier: {tier.health()[0].reason}")
            memory = np.random.default_rng(3).integers(0, 256, self.data_bytes, np.uint8)
            for load in loads:
                count = self.data_bytes // load.record_bytes
                records = as_a_server(load.record_bytes, count, memory)
                for verb in _VERBS:
                    progress(f"{verb} of {load.record_bytes >> 10} KiB")
                    yield self._row(tier, own, records, verb, load)
        finally:
            tier.close()

    def _row(self, tier: RemoteTier, own: OwnClient, records: Records, verb: str, load: Load) -> Result:
        own.flush()
        for _ in range(1 if verb == "get" else max(self.rounds_before_puts, 1)):
            put_all(tier, records)
        own.time_limit("put", load.value_bytes, 1)  # which leaves what is got
        best = min(self.clients, key=lambda clients: own.time_limit(verb, load.value_bytes, clients))
        order = np.arange(records.count)

        def move() -> float:
            if verb == "get":
                return get_all(tier, records, order)
            if not self.rounds_before_puts:
                own.flush()
            return put_all(tier, records)

        pair = measure_timed_pair(move, lambda: own.time_limit(verb, load.value_bytes, best))
        return Result(
            name=self.name,
            value=self.data_bytes / pair.value_s,
            unit="B/s",
            limit=self.data_bytes / pair.limit_s,
            spread=pair.spread,
            goal=load.goal,
            params={"what": verb, "record_bytes": records.record_bytes, "limit_clients": best},
        )
