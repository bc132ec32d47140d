"""A tier below the simulated memory: what it was told is written survives its servers; all else may go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvoffload.server.tiering.settings import TierSettings, WriteRule
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.tiers import FinishedBatch, RecordNames, RecordOutcome, ScanPage, TierHealth, TierState
from kvoffload.tiers.base import RecordBatch
from kvoffload.types import HASH_BYTES
from tests.simulation.model_entries import PIECES, SLOT_BYTES, Tag, split
from tests.simulation.model_memory import ModelMemory
from tests.simulation.timeline import MILLISECOND_NS, SECOND_NS

if TYPE_CHECKING:
    from tests.simulation.server_machine import Server

RECORD_FAULTS = (
    RecordOutcome.MISSING,
    RecordOutcome.DAMAGED,
    RecordOutcome.UNAVAILABLE,
    RecordOutcome.FAILED,
)
FAULT_RATE = 0.05
ALONE_RATE = 0.5
HANG_RATE = 0.02
REFUSAL_RATE = 0.05

Key = tuple[bytes, int, int, bytes]
Numbers = npt.NDArray[np.uint64]


@dataclass(eq=False)
class Disk:
    """The contents of a disk, whichever server uses it: a record's pieces by its name."""

    records: dict[Key, list[Tag | None]] = field(default_factory=dict)


class ModelTier:
    """One server's use of it. Bytes are moved at the moment in which a batch ends, if the server lives then. In some
    worlds others write to it, too, and it has to be asked what it has."""

    def __init__(self, server: Server, disk: Disk) -> None:
        self.knows_all = server.timeline.random.random() < ALONE_RATE
        self._server = server
        self._disk = disk
        self._ended: list[FinishedBatch] = []
        self._last_ticket = 0

    @property
    def capacity_bytes(self) -> int:
        return 1 << 40

    def put(self, batch: RecordBatch, *, timeout_s: float) -> int | None:
        return self._begin("put", batch.names, batch.slots.tolist(), timeout_s)

    def get(self, names: RecordNames, slots: Numbers, *, record_bytes: int, timeout_s: float) -> int | None:
        return self._begin("get", names, slots.tolist(), timeout_s)

    def remove(self, names: RecordNames, *, timeout_s: float) -> int | None:
        return self._begin("remove", names, [0] * len(names), timeout_s)

    def look(self, names: RecordNames, *, timeout_s: float) -> int | None:
        return self._begin("look", names, [0] * len(names), timeout_s)

    def contains(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        return np.array([key in self._disk.records for key in keys_of(names)], np.bool_)

    def poll(self) -> list[FinishedBatch]:
        ended, self._ended = self._ended, []
        return ended

    def scan(self, cursor: int = 0, *, timeout_s: float) -> ScanPage:
        raise AssertionError("nobody lists it")

    def health(self) -> list[TierHealth]:
        return [TierHealth(name="disk", state=TierState.READY)]

    def fileno(self) -> int:
        raise AssertionError("there is no file")

    def close(self, timeout_s: float = 0.0) -> None:
        raise AssertionError("it ends with its server")

    # ---- inside ----

    def _begin(self, verb: str, names: RecordNames, pointers: list[int], timeout_s: float) -> int | None:
        world, timeline = self._server.world, self._server.timeline
        if world.is_busy and timeline.chance(REFUSAL_RATE):
            return None
        self._last_ticket += 1
        is_late = world.is_busy and timeline.chance(HANG_RATE)
        wait_ns = int(timeout_s * SECOND_NS) if is_late else timeline.between_ms(0.05, 30)
        arguments = (verb, names, pointers, self._last_ticket, is_late)
        timeline.after(wait_ns, self._server.end_io, self._end, *arguments)
        return self._last_ticket

    def _end(self, verb: str, names: RecordNames, pointers: list[int], ticket: int, is_late: bool) -> None:
        memory = self._server.memory
        assert isinstance(memory, ModelMemory)
        outcomes = []
        for key, pointer in zip(keys_of(names), pointers, strict=True):
            act = {"put": self._put, "get": self._get, "look": self._look, "remove": self._remove}[verb]
            outcomes.append(RecordOutcome.LATE if is_late else act(memory, key, pointer // SLOT_BYTES))
        count = len(outcomes)
        batch = FinishedBatch(
            ticket=ticket,
            outcomes=np.array(outcomes, np.uint8),
            digests=np.ones(count, np.uint64),
            parents=bytes(HASH_BYTES * count),
        )
        self._ended.append(batch)

    def _fault(self) -> RecordOutcome | None:
        timeline = self._server.timeline
        is_faulty = self._server.world.is_busy and timeline.chance(FAULT_RATE)
        return timeline.random.choice(RECORD_FAULTS) if is_faulty else None

    def _put(self, memory: ModelMemory, key: Key, place: int) -> RecordOutcome:
        entry = memory.entries[place]
        assert entry.leases > 0, f"slot {place} is written to the tier without a lease"
        found = [memory.pieces.get((place, key[2], piece)) for piece in range(PIECES)]
        assert found == [(key[0], key[3], key[2])] * PIECES, f"slot {place} is written to the tier as what it is not"
        fault = self._fault()
        if fault is not None:
            return RecordOutcome.FAILED if fault in (RecordOutcome.MISSING, RecordOutcome.DAMAGED) else fault
        self._disk.records[key] = found
        return RecordOutcome.WRITTEN

    def _get(self, memory: ModelMemory, key: Key, place: int) -> RecordOutcome:
        entry = memory.entries[place]
        assert self._server.traffic is not None
        is_ours = entry.state == "reserved" and entry.session == self._server.traffic.reads.session
        assert is_ours, f"the tier writes to slot {place}, which is not its any more"
        fault, record = self._fault(), self._disk.records.get(key)
        if record is None or fault is RecordOutcome.MISSING:
            self._disk.records.pop(key, None)
            return RecordOutcome.MISSING
        for piece in range(PIECES):
            # The bytes of a bad record have been in the slot, too.
            memory.pieces[place, key[2], piece] = (b"", b"", 0) if fault is not None else record[piece]  # type: ignore[assignment]
        return RecordOutcome.FOUND if fault is None else fault

    def _look(self, _memory: ModelMemory, key: Key, _place: int) -> RecordOutcome:
        """Looks a record up. A record that is found may be gone when it is read."""
        if self._server.world.is_busy and self._server.timeline.chance(FAULT_RATE):
            return RecordOutcome.UNAVAILABLE
        return RecordOutcome.FOUND if key in self._disk.records else RecordOutcome.MISSING

    def _remove(self, _memory: ModelMemory, key: Key, _place: int) -> RecordOutcome:
        if self._server.world.is_busy and self._server.timeline.chance(FAULT_RATE):
            return RecordOutcome.UNAVAILABLE
        gone = self._disk.records.pop(key, None)
        return RecordOutcome.MISSING if gone is None else RecordOutcome.REMOVED


def keys_of(names: RecordNames) -> list[Key]:
    return [(names.fingerprint, names.group, names.shard, name) for name in split(names.hashes)]


def make_traffic(server: Server, disk: Disk, pid: int) -> TierTraffic:
    """Makes a tier's traffic. `pid`: of the server, which is its pidfd too."""
    timeline = server.timeline
    settings = TierSettings(
        write=timeline.random.choice(list(WriteRule)),
        piece_bytes=timeline.random.choice((32, 128)),
        under_way_bytes=timeline.random.choice((128, 1024)),
        queue_s=timeline.random.choice((0.001, 2.0)),
        put_timeout_s=1.0,
        hold_s=0.05,
        kept_share=timeline.random.choice((0.1, 0.5)),
    )
    return TierTraffic(ModelTier(server, disk), settings, open_pidfd=lambda: pid)


WAITS_MS = (1, 50, 300)
"""Milliseconds that a request waits for the tier."""
MARGIN_NS = 5 * MILLISECOND_NS
