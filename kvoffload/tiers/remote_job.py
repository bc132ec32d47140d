"""A batch, or a part of one, on its way to a remote store and back. Its thread or its timeout ends it, for good."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.tiers.base import FinishedBatch, RecordBatch, RecordOutcome, Ticket
from kvoffload.tiers.envelope import (
    OpenValue,
    RecordName,
    Verdict,
    list_names,
    most_value_bytes,
    open_value,
    pack_value,
)
from kvoffload.tiers.record_coder import RecordCoder
from kvoffload.tiers.record_store import RecordStore, SlotStore, StoreFaultError, Value, fill_slot
from kvoffload.types import HASH_BYTES

_NOT_YET = 0
_NAMES_AT_ONCE = 1024
"""Names in one call of a look or a removal. Between calls a job that is late can stop."""
_RECORDS_AT_ONCE = 4096
"""The most records in one call, however small they are."""
_NO_PARENT = bytes(HASH_BYTES)


class Verb(Enum):
    PUT = "put"
    GET = "get"
    LOOK = "look"
    REMOVE = "remove"


@dataclass(eq=False)
class RemoteJob:
    """Slots are touched under `lock`, and not after `is_over`. A store that moves records itself has the lock
    meanwhile; `end` interrupts it."""

    ticket: Ticket
    verb: Verb
    batch: RecordBatch
    deadline_s: float
    is_over: bool = False
    is_interrupted: bool = False
    """Whether the job ended while its records were moving, which is not the store's fault."""
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        count = len(self.batch.names)
        self._outcomes: npt.NDArray[np.uint8] = np.full(count, _NOT_YET, np.uint8)
        self._found_digests = np.zeros(count, np.uint64)
        self._found_parents = [_NO_PARENT] * count
        self._mover: SlotStore | None = None
        """The store that has the lock and moves records, or None."""
        self._mover_lock = Lock()
        self._otherwise: RecordOutcome | None = None
        """The outcome of records that are not settled, from the first call of `end`; None: it was not called."""

    @property
    def _stored(self) -> RecordOutcome:
        return RecordOutcome.DURABLE if self.batch.is_durable else RecordOutcome.WRITTEN

    @cached_property
    def _list(self) -> Sequence[RecordName]:
        return list(list_names(self.batch.names))

    def end(self, otherwise: RecordOutcome) -> FinishedBatch | None:
        """Ends the job, once; records that were not settled end as `otherwise`. None: it was over before."""
        if self._otherwise is None:
            self._otherwise = otherwise
        with self._mover_lock:
            # Interrupts only a store that moves records for this job, not one that has gone on to another job.
            if self._mover is not None:
                self.is_interrupted = True
                self._mover.interrupt()
        with self.lock:
            if self.is_over:
                return None
            self.is_over = True
            self._outcomes[self._outcomes == _NOT_YET] = self._otherwise
        return FinishedBatch(
            ticket=self.ticket,
            outcomes=self._outcomes,
            digests=self._found_digests,
            parents=b"".join(self._found_parents),
        )

    def serve(self, store: RecordStore | SlotStore, call_bytes: int, coder: RecordCoder) -> None:
        """Serves the whole job, in calls of about so many bytes. `coder`: the tier's; a store that moves records itself
        has the same one. Raises what the store raises."""
        work: dict[Verb, Callable[[range], None]] = {
            Verb.LOOK: partial(self._look, store),
            Verb.REMOVE: partial(self._remove, store),
        }
        if isinstance(store, SlotStore):
            if coder.keys is not None and not store.seals_records:
                raise StoreFaultError("it cannot seal records, and seal_key_file is set")
            work |= {Verb.PUT: partial(self._put_slots, store), Verb.GET: partial(self._get_slots, store)}
        else:
            work |= {Verb.PUT: partial(self._put, store, coder), Verb.GET: partial(self._get, store, coder)}
        with coder.reading() if self.verb is Verb.GET else contextlib.nullcontext():
            for part in self._cut(call_bytes):
                if self.is_over:
                    return
                work[self.verb](part)

    def _cut(self, call_bytes: int) -> Iterator[range]:
        count, moves = len(self.batch.names), self.verb in (Verb.PUT, Verb.GET)
        step = min(max(call_bytes // max(self.batch.record_bytes, 1), 1) if moves else _NAMES_AT_ONCE, _RECORDS_AT_ONCE)
        return (range(at, min(at + step, count)) for at in range(0, count, step))

    def _settle(self, at: int, outcome: RecordOutcome) -> None:
        with self.lock:
            if not self.is_over:
                self._outcomes[at] = outcome

    def _put(self, store: RecordStore, coder: RecordCoder, part: range) -> None:
        """Puts records. What is there already is not sent again: another server, or this one, has computed it
        before."""
        there = store.look([self._list[at].key for at in part], is_use=True)
        values: dict[int, tuple[bytes, Value]] = {}
        for at, is_there in zip(part, there, strict=True):
            if is_there:
                self._settle(at, self._stored)
                continue
            with self.lock:
                if self.is_over:
                    return
                data = ctypes.string_at(int(self.batch.slots[at]), self.batch.record_bytes)
            name = self._list[at]
            digest = native.digest_record(
                data, fingerprint=name.fingerprint, block_hash=name.block_hash, group=name.group, shard=name.shard
            )
            if digest != int(self.batch.digests[at]):
                self._settle(at, RecordOutcome.DAMAGED)
                continue
            coded = coder.encode(name.group, data)
            values[at] = pack_value(name, data, digest, self.batch.parent(at), coded=coded, keys=coder.keys)
        if values:
            with coder.sending():
                taken = store.put([self._list[at].key for at in values], list(values.values()))
                coder.told_sent(sum(len(data) for _, data in values.values()))
            for at, is_taken in zip(values, taken, strict=True):
                self._settle(at, self._stored if is_taken else RecordOutcome.FAILED)

    def _get(self, store: RecordStore, coder: RecordCoder, part: range) -> None:
        damaged = []
        limit_bytes = most_value_bytes(self.batch.record_bytes, coder.keys) + 1  # one too many tells a longer value
        values = store.get([self._list[at].key for at in part], limit_bytes)
        for at, value in zip(part, values, strict=True):
            begun_s = time.perf_counter()
            opened: OpenValue | Verdict = Verdict.OTHER
            if value is not None:
                opened = open_value(value, self._list[at], self.batch.record_bytes, keys=coder.keys)
            if isinstance(opened, OpenValue):
                decoding_s = time.perf_counter() - begun_s if opened.head.coded_bytes else None
                coder.told_read(self.batch.record_bytes, decoding_s=decoding_s)
                with self.lock:
                    if self.is_over:
                        return
                    fill_slot(int(self.batch.slots[at]), opened.record)
                    self._found_digests[at] = opened.head.digest
                    self._found_parents[at] = opened.head.parent
                    self._outcomes[at] = RecordOutcome.FOUND
            elif opened is Verdict.DAMAGED:
                damaged.append(at)
                self._settle(at, RecordOutcome.DAMAGED)
            else:
                self._settle(at, RecordOutcome.MISSING)
        if damaged:
            store.remove([self._list[at].key for at in damaged])

    def _put_slots(self, store: SlotStore, part: range) -> None:
        chosen = slice(part.start, part.stop)
        with self._moving(store) as may_move:
            if not may_move:
                return
            outcomes = store.put_slots(self.batch.part(chosen))
            stored = outcomes == RecordOutcome.WRITTEN
            self._outcomes[chosen] = np.where(stored, np.uint8(self._stored), outcomes)

    def _get_slots(self, store: SlotStore, part: range) -> None:
        chosen = slice(part.start, part.stop)
        with self._moving(store) as may_move:
            if not may_move:
                return
            names = self.batch.names.part(chosen)
            found = store.get_slots(names, self.batch.slots[chosen], record_bytes=self.batch.record_bytes)
            self._outcomes[chosen] = found.outcomes
            self._found_digests[chosen] = found.digests
            for at, parent in enumerate(list_hashes(found.parents)):
                self._found_parents[part.start + at] = parent
        damaged = [
            self._list[part.start + int(at)].key for at in np.flatnonzero(found.outcomes == RecordOutcome.DAMAGED)
        ]
        if damaged:
            store.remove(damaged)

    @contextlib.contextmanager
    def _moving(self, store: SlotStore) -> Iterator[bool]:
        """Begins to move bytes. False: the job is over, or about to be."""
        with self.lock:
            self._mover = store
            try:
                yield not self.is_over and self._otherwise is None
            finally:
                with self._mover_lock:
                    self._mover = None

    def _look(self, store: RecordStore | SlotStore, part: range) -> None:
        for at, is_there in zip(part, store.look([self._list[at].key for at in part]), strict=True):
            self._settle(at, RecordOutcome.FOUND if is_there else RecordOutcome.MISSING)

    def _remove(self, store: RecordStore | SlotStore, part: range) -> None:
        for at, was_there in zip(part, store.remove([self._list[at].key for at in part]), strict=True):
            self._settle(at, RecordOutcome.REMOVED if was_there else RecordOutcome.MISSING)


def list_hashes(hashes: bytes) -> Iterator[bytes]:
    return (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
