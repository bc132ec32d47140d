"""Copies of records between an engine's blocks and the cache, their digests, and what the cache is told at their end.

Every engine uses `RecordDigests`. An engine whose process both copies and asks the cache uses `RecordMover`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.cache import Publication, ReservedSlots, SegmentMap
from kvoffload.client import Client
from kvoffload.hash_rows import choose_rows
from kvoffload.native import finish_digests
from kvoffload.transfer.copy_engine import CopyDirection, CopyEngine, CopyItems, CopyTicket, RunDigests

JobT = TypeVar("JobT")
Digests = npt.NDArray[np.uint64]
"""One digest for each record. 0 means that no digest of the record was made yet."""


class RecordDigests(NamedTuple):
    """Makes and compares digests. `record_bytes`: size of one shard of a record, by group."""

    fingerprint: bytes
    record_bytes: Sequence[int]

    def finish(self, sums: RunDigests, names: bytes, *, group: int, shard: int = 0) -> Digests:
        """Returns the digests of one shard of records with these names, from the sums of a copy."""
        made = finish_digests(
            sums.tobytes(),
            self.record_bytes[group],
            fingerprint=self.fingerprint,
            block_hashes=names,
            group=group,
            shard=shard,
        )
        return np.frombuffer(made, np.uint64)

    def find_wrong(
        self, sums: RunDigests, names: bytes, wanted: Digests, *, group: int, shard: int = 0
    ) -> npt.NDArray[np.intp]:
        """Returns the places of records whose bytes are not those that were saved with the `wanted` digests."""
        found = self.finish(sums, names, group=group, shard=shard)
        return np.flatnonzero((found != wanted) & (wanted != 0))


class Records(NamedTuple):
    """Records of one group in one memory of the cache, and the engine's blocks that they are copied from or to."""

    names: bytes
    blocks: npt.NDArray[np.int64]
    group: int
    memory_id: int
    addresses: npt.NDArray[np.uint64]
    wanted: Digests | None = None
    """The digests with which loaded records are compared; None: they are not compared."""


@dataclass(eq=False)
class Move(Generic[JobT]):
    """A save or a load. Its last three fields are set when it has ended."""

    job: JobT
    parts: Sequence[Records]
    slots: Sequence[ReservedSlots]
    """The slots of each part; empty: this is a load."""
    memories: Sequence[SegmentMap]
    """The memories of the parts, which stay mapped as long as the copy may touch them."""
    fault: str | None = None
    """One line about the fault of the copy; empty if all bytes were copied; None: the copy has not ended."""
    is_published: bool = False
    """Whether all records of a save were published."""
    wrong: Sequence[npt.NDArray[np.intp]] = ()
    """For each part of a load that was compared, the places of records that differ from the saved bytes."""


class RecordMover(Generic[JobT]):
    """Called by one thread at a time. Each save or load carries a job of the caller. The caller owns the cache and the
    copy engine, and closes them."""

    def __init__(self, cache: Client, engine: CopyEngine, digests: RecordDigests) -> None:
        self._cache = cache
        self.engine = engine
        self._digests = digests
        self.moves: dict[CopyTicket, Move[JobT]] = {}
        """The saves and loads that have not ended."""

    def begin(self, job: JobT, parts: Sequence[Records], slots: Sequence[ReservedSlots] = ()) -> Move[JobT]:
        """Begins to save parts to these slots, and later publishes them in their order; without slots, to load parts,
        whose lease the caller holds until the load has ended.

        If this raises (ValueError, KVOffloadError), nothing is copied, and the slots are still the caller's.
        """
        memories = [self._cache.memory(part.memory_id) for part in parts]
        items = CopyItems(
            group=np.repeat([part.group for part in parts], [len(part.blocks) for part in parts]),
            block=np.concatenate([part.blocks for part in parts]),
            slot=np.concatenate(
                [
                    memory.pointers(part.addresses, self._digests.record_bytes[part.group])
                    for part, memory in zip(parts, memories, strict=True)
                ]
            ),
        )
        direction = CopyDirection.SAVE if slots else CopyDirection.LOAD
        has_digests = bool(slots) or any(part.wanted is not None for part in parts)
        ticket = self.engine.submit(direction, items, has_digests=has_digests)
        self.moves[ticket] = move = Move(job, parts, slots, memories)
        return move

    def poll(self, is_wanted: Callable[[JobT], bool] = lambda _job: True) -> Iterator[Move[JobT]]:
        """Yields the saves and loads that have ended since the last call. A save that failed or is not wanted any more
        gives its slots back. Loaded records that differ from the saved bytes are invalidated."""
        for finished in self.engine.poll():
            move = self.moves.pop(finished.ticket)
            move.fault = finished.fault
            sums: Sequence[RunDigests] = ()
            if finished.digests is not None and not finished.fault:
                sums = np.split(finished.digests, np.cumsum([len(part.blocks) for part in move.parts])[:-1])
            if not move.slots:
                move.wrong = [self._compare(part, some) for part, some in zip(move.parts, sums, strict=False)]
            elif sums and is_wanted(move.job):
                told = [self._publish(*one) for one in zip(move.parts, sums, move.slots, strict=True)]
                move.is_published = all(told)
            else:
                for slots in move.slots:
                    self._cache.abort(slots)
            yield move

    def _publish(self, part: Records, sums: RunDigests, slots: ReservedSlots) -> bool:
        digests = self._digests.finish(sums, part.names, group=part.group)
        return self._cache.publish(Publication(slots, hashes=part.names, digests=digests))

    def _compare(self, part: Records, sums: RunDigests) -> npt.NDArray[np.intp]:
        assert part.wanted is not None
        wrong = self._digests.find_wrong(sums, part.names, part.wanted, group=part.group)
        if len(wrong):
            self._cache.invalidate(part.group, choose_rows(part.names, wrong))
        return wrong
