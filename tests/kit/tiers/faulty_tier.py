"""Any tier, worn by one that goes wrong as a test wants it to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import (
    CLOSE_TIMEOUT_S,
    Addresses,
    FinishedBatch,
    RecordBatch,
    RecordNames,
    RecordOutcome,
    ScanPage,
    Ticket,
    Tier,
    TierHealth,
)

Decide = Callable[[str, int], RecordOutcome | None]
"""Decides, by verb and place in a batch, how a record ends instead of being asked for. None: it is asked for."""


class FaultyTier:
    """Any tier, of which some records end as `decide` says; those are never asked for.

    `is_held`: what has ended is told later. `takes`: so many batches, then none.
    """

    def __init__(self, tier: Tier, decide: Decide = lambda verb, place: None) -> None:
        self.inner = tier
        self.is_held = False
        self.takes: int | None = None
        self.asked: list[tuple[str, int]] = []
        """Verbs, and how many records."""
        self._decide = decide
        self._faults: dict[Ticket, dict[int, RecordOutcome]] = {}

    @property
    def capacity_bytes(self) -> int:
        return self.inner.capacity_bytes

    @property
    def knows_all(self) -> bool:
        return self.inner.knows_all

    def contains(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        return self.inner.contains(names)

    def scan(self, cursor: int = 0, *, timeout_s: float) -> ScanPage:
        return self.inner.scan(cursor, timeout_s=timeout_s)

    def health(self) -> list[TierHealth]:
        return self.inner.health()

    def fileno(self) -> int:
        return self.inner.fileno()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self.inner.close(timeout_s)

    def put(self, batch: RecordBatch, **rest: Any) -> Ticket | None:
        def ask(asked: list[int]) -> Ticket | None:
            kept = b"".join(batch.parents[32 * i : 32 * i + 32] for i in asked)
            names, slots, digests = _only(batch.names, asked), batch.slots[asked], batch.digests[asked]
            return self.inner.put(replace(batch, names=names, slots=slots, digests=digests, parents=kept), **rest)

        return self._take("put", len(batch.names), ask)

    def get(self, names: RecordNames, slots: Addresses, **rest: Any) -> Ticket | None:
        return self._take("get", len(names), lambda asked: self.inner.get(_only(names, asked), slots[asked], **rest))

    def look(self, names: RecordNames, **rest: Any) -> Ticket | None:
        return self._take("look", len(names), lambda asked: self.inner.look(_only(names, asked), **rest))

    def remove(self, names: RecordNames, **rest: Any) -> Ticket | None:
        return self._take("remove", len(names), lambda asked: self.inner.remove(_only(names, asked), **rest))

    def poll(self) -> list[FinishedBatch]:
        return [] if self.is_held else [self._mend(batch) for batch in self.inner.poll()]

    def _take(self, verb: str, count: int, ask: Callable[[list[int]], Ticket | None]) -> Ticket | None:
        if self.takes == 0:
            return None
        self.takes = None if self.takes is None else self.takes - 1
        self.asked.append((verb, count))
        chosen = {i: self._decide(verb, i) for i in range(count)}
        faults = {i: outcome for i, outcome in chosen.items() if outcome is not None}
        ticket = ask([i for i in range(count) if i not in faults])
        if ticket is not None and faults:
            self._faults[ticket] = faults
        return ticket

    def _mend(self, batch: FinishedBatch) -> FinishedBatch:
        faults = self._faults.pop(batch.ticket, {})
        outcomes, digests = list(batch.outcomes), list(batch.digests)
        parents = [batch.parents[at : at + 32] for at in range(0, len(batch.parents), 32)]
        for place in sorted(faults):
            outcomes.insert(place, np.uint8(faults[place]))
            digests.insert(place, np.uint64(0))
            parents.insert(place, bytes(32))
        return FinishedBatch(
            ticket=batch.ticket,
            outcomes=np.array(outcomes, np.uint8),
            digests=np.array(digests, np.uint64),
            parents=b"".join(parents),
        )


def _only(names: RecordNames, asked: list[int]) -> RecordNames:
    hashes = b"".join(names.hashes[32 * i : 32 * i + 32] for i in asked)
    return RecordNames(fingerprint=names.fingerprint, hashes=hashes, group=names.group, shard=names.shard)
