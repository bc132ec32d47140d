"""A tier over a store that other machines use too: its own threads wait for the store, so that callers need not.

A store that does not answer costs what is under way one timeout. From then on every batch ends at once, as UNAVAILABLE,
until a probe in the background has found the store again.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from kvoffload.errors import TierError
from kvoffload.native import NO_DIGEST, SealKeys
from kvoffload.tiers.base import (
    BATCH_LIMIT,
    CLOSE_TIMEOUT_S,
    Addresses,
    FinishedBatch,
    RecordBatch,
    RecordNames,
    RecordOutcome,
    ScanPage,
    Ticket,
    TierHealth,
    TierState,
)
from kvoffload.tiers.damage_log import DamageLog
from kvoffload.tiers.envelope import HEAD_BYTES, RecordHead, read_head
from kvoffload.tiers.record_coder import RecordCoder
from kvoffload.tiers.record_store import RecordStore, SlotStore, StoreFacts, StoreFaultError
from kvoffload.tiers.remote_batch import RemoteBatch
from kvoffload.tiers.remote_job import RemoteJob, Verb
from kvoffload.units import MIB

if TYPE_CHECKING:
    from kvoffload.config.settings import Settings

logger = logging.getLogger(__name__)

_OUTCOMES = {int(outcome): outcome.name.lower() for outcome in RecordOutcome}
_URGENT = (Verb.GET, Verb.LOOK)
"""Requests wait for these."""


@dataclass(frozen=True, kw_only=True)
class RemoteTierSettings:
    """`place`: where the store is, for people to read, without secrets."""

    place: str
    open_store: Callable[[], RecordStore | SlotStore]
    """Connects to the store; raises StoreFaultError."""
    connections: int = 4
    call_bytes: int = 8 * MIB
    """Bytes moved by one call, so that small records travel together."""
    first_probe_s: float = 0.1
    last_probe_s: float = 10.0
    """Time between two probes of a store that is there. For a lost one it grows from `first_probe_s` up to this, and
    stays so long until the store has answered two probes in succession."""
    batch_limit: int = BATCH_LIMIT
    opens_alone: bool = False
    """Whether `open_store` does not ask the store. Then connections are opened at once, not when a probe has found
    it."""
    coder: RecordCoder = field(default_factory=RecordCoder)
    """The coder of records, which all connections share."""
    on_close: Callable[[], None] = lambda: None
    """Called by `close`, to end other waits for the store."""


class RemotePlace(ABC):
    """Where the store of a remote tier is, and how it is reached. Each kind of remote tier has a subclass, which the
    table of `config.tier_kinds` or the setting `custom_tier` names."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Settings, where: str) -> Self:
        """Makes a place from a server's settings, without connecting to the store. `where`: the value of the setting
        that says where the store is; of a custom tier it is `custom_tier_place`. ConfigError, ValueError: the settings
        do not fit, or a file that they name cannot be read."""

    @abstractmethod
    def describe(self) -> str:
        """Describes the place in a few words, without secrets, for log lines and `kvoffload doctor`."""

    @abstractmethod
    def open_tier(self) -> RemoteTier:
        """Opens the tier and starts its threads. The store need not be there."""

    @abstractmethod
    def find_remedy(self, reason: str) -> str:
        """Returns the command that starts or examines a store that is absent for this reason."""


class RemoteTier:
    """A tier over a remote store, with a thread for each connection."""

    knows_all = False

    def __init__(self, settings: RemoteTierSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the tier's threads. A store that cannot be had is no fault: `health` gives the reason. TierError: a
        thread cannot be started; those that were started end."""
        self._settings = settings
        self._clock = clock
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._to_serve = threading.Condition(self._lock)
        self._to_watch = threading.Condition(self._lock)
        self._to_probe = threading.Condition(self._lock)
        self._urgent: deque[RemoteJob] = deque()
        self._others: deque[RemoteJob] = deque()
        self._batches: dict[Ticket, RemoteBatch] = {}
        """Batches that were submitted and have not ended."""
        self._deadlines: list[tuple[float, Ticket]] = []
        """A heap; those of ended batches stay until they are due."""
        self._finished: list[FinishedBatch] = []
        self._last_ticket = 0
        self._damage_log = DamageLog(settings.place)
        self._state = TierState.OPENING
        self._reason = "it has not answered yet"
        self._facts = StoreFacts()
        self._losses = 0
        self._counts: Counter[str] = Counter()
        self._is_closed = False
        works = [(self._serve, f"kvoffload-far{at}") for at in range(settings.connections)]
        works += [(self._watch, "kvoffload-fard"), (self._probe, "kvoffload-farp")]
        self._threads: list[threading.Thread] = []
        for work, name in works:
            thread = threading.Thread(target=work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as fault:
                self.close()
                raise TierError(f"a thread for {settings.place} cannot be started: {fault}") from fault
            self._threads.append(thread)

    @property
    def capacity_bytes(self) -> int:
        return self._facts.capacity_bytes

    def put(self, batch: RecordBatch, *, timeout_s: float) -> Ticket | None:
        """Records are durable once another machine has them: they survive this one's loss of power."""
        return self._submit(Verb.PUT, batch, timeout_s)

    def get(self, names: RecordNames, slots: Addresses, *, record_bytes: int, timeout_s: float) -> Ticket | None:
        return self._submit(Verb.GET, RecordBatch(names, slots, record_bytes=record_bytes), timeout_s)

    def look(self, names: RecordNames, *, timeout_s: float) -> Ticket | None:
        return self._submit(Verb.LOOK, RecordBatch(names), timeout_s)

    def remove(self, names: RecordNames, *, timeout_s: float) -> Ticket | None:
        return self._submit(Verb.REMOVE, RecordBatch(names), timeout_s)

    def contains(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        return np.zeros(len(names), np.bool_)

    def poll(self) -> list[FinishedBatch]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def seal_with(self, keys: SealKeys) -> None:
        """Seals all records with these keys, and opens no others. Call it before the first batch."""
        self._settings.coder.keys = keys

    def scan(self, cursor: int = 0, *, timeout_s: float) -> ScanPage:
        with self._lock:
            self._check_open()
        answer: list[tuple[int, list[bytes]] | StoreFaultError] = []

        def ask() -> None:
            try:
                with contextlib.closing(self._settings.open_store()) as store:
                    answer.append(store.scan(cursor, HEAD_BYTES))
            except StoreFaultError as fault:
                answer.append(fault)

        asking = threading.Thread(target=ask, name="kvoffload-fars", daemon=True)
        try:
            asking.start()
        except RuntimeError as fault:
            raise TierError(f"{self._settings.place} cannot be listed: {fault}") from fault
        asking.join(timeout_s)
        found = answer[0] if answer else StoreFaultError(f"no answer within {timeout_s:g} s")
        if isinstance(found, StoreFaultError):
            raise TierError(f"{self._settings.place} cannot be listed: {found}")
        heads = [head for head in map(read_head, found[1]) if isinstance(head, RecordHead)]
        return ScanPage(
            cursor=found[0],
            fingerprints=b"".join(head.name.fingerprint for head in heads),
            hashes=b"".join(head.name.block_hash for head in heads),
            groups=np.array([head.name.group for head in heads], np.uint32),
            shards=np.array([head.name.shard for head in heads], np.uint32),
            record_bytes=np.array([head.record_bytes for head in heads], np.uint64),
            digests=np.array([NO_DIGEST if head.is_sealed else head.digest for head in heads], np.uint64),
            parents=b"".join(head.parent for head in heads),
        )

    def health(self) -> list[TierHealth]:
        with self._lock:
            return [
                TierHealth(
                    name=self._settings.place,
                    state=self._state,
                    reason=self._reason,
                    capacity_bytes=self._facts.capacity_bytes,
                    used_bytes=self._facts.used_bytes,
                    records=self._facts.values,
                    counts={**self._counts, **self._settings.coder.counts},
                )
            ]

    def wait_open(self, timeout_s: float) -> bool:
        """Waits until the store has answered, or could not be had. False: that takes longer."""
        with self._to_watch:
            return self._to_watch.wait_for(lambda: self._state is not TierState.OPENING, timeout_s)

    def fileno(self) -> int:
        return self._event

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._state, self._reason = TierState.ABSENT, "closed"
            left = [job for batch in self._batches.values() for job in batch.jobs]
            for condition in (self._to_serve, self._to_watch, self._to_probe):
                condition.notify_all()
        for job in left:
            self._end(job, RecordOutcome.UNAVAILABLE)
        self._settings.on_close()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0))
        if any(thread.is_alive() for thread in self._threads):
            raise TierError(f"{self._settings.place} does not let go: a connection hangs")
        os.close(self._event)

    # ---- batches ----

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError(f"the tier {self._settings.place} is closed")

    def _submit(self, verb: Verb, batch: RecordBatch, timeout_s: float) -> Ticket | None:
        if len(batch.slots) != (len(batch.names) if verb in (Verb.PUT, Verb.GET) else 0):
            raise TierError(f"{len(batch.names)} records cannot lie in {len(batch.slots)} slots")
        deadline_s = self._clock() + timeout_s
        with self._lock:
            self._check_open()
            if len(self._batches) + len(self._finished) >= self._settings.batch_limit:
                return None
            self._last_ticket += 1
            ticket = self._last_ticket
            whole = RemoteJob(ticket, verb, batch, deadline_s)
            asked = self._batches[ticket] = RemoteBatch(
                whole, connections=self._settings.connections, call_bytes=self._settings.call_bytes
            )
            is_taken = self._state is not TierState.ABSENT
            if is_taken:
                heapq.heappush(self._deadlines, (deadline_s, ticket))
                (self._urgent if verb in _URGENT else self._others).extend(asked.jobs)
                self._to_serve.notify(len(asked.jobs))
                if self._deadlines[0][1] == ticket:
                    self._to_watch.notify()
        for job in [] if is_taken else asked.jobs:
            self._end(job, RecordOutcome.UNAVAILABLE)
        return ticket

    def _end(self, job: RemoteJob, otherwise: RecordOutcome) -> None:
        ended = job.end(otherwise)
        if ended is None:
            return
        with self._lock:
            finished = self._batches[job.ticket].take(job, ended)
            if finished is None:
                return
            del self._batches[job.ticket]
            self._finished.append(finished)
            if self._settings.coder.keys is not None:
                self._damage_log.note(finished.count(RecordOutcome.DAMAGED))
            for outcome, count in enumerate(np.bincount(finished.outcomes).tolist()):
                if count:
                    self._counts[f"{job.verb.value}_{_OUTCOMES.get(outcome, 'unknown')}"] += count
        os.eventfd_write(self._event, 1)

    # ---- threads ----

    def _serve(self) -> None:
        """Serves jobs by one connection."""
        opened = 0
        store = self._open_ahead()
        while (job := self._next()) is not None:
            losses = self._losses
            if store is not None and opened != losses:
                # The store was gone meanwhile, and this connection with it.
                store.close()
                store = None
            try:
                if store is None:
                    store, opened = self._settings.open_store(), losses
                job.serve(store, self._settings.call_bytes, self._settings.coder)
            except StoreFaultError as fault:
                if store is not None:
                    store.close()
                    store = None
                if not job.is_interrupted:
                    self._lose(str(fault), losses)
                self._end(job, RecordOutcome.UNAVAILABLE)
            except Exception:
                logger.exception("%s: a batch failed", self._settings.place)
                self._end(job, RecordOutcome.FAILED)
                if store is not None:
                    # Unread answers may lie in the connection.
                    store.close()
                    store = None
            else:
                self._end(job, RecordOutcome.FAILED)
                if job.is_interrupted:
                    # It had all been moved just before.
                    store.close()
                    store = None
        if store is not None:
            store.close()

    def _open_ahead(self) -> RecordStore | SlotStore | None:
        """Opens a connection as soon as that can be done, or a job comes: the first job has no time to wait for it.
        None: it cannot be opened, which the first job finds out."""
        with self._to_serve:
            self._to_serve.wait_for(
                lambda: (
                    self._settings.opens_alone
                    or self._is_closed
                    or self._urgent
                    or self._others
                    or self._state is TierState.READY
                )
            )
            if self._is_closed or self._losses:
                return None
        try:
            return self._settings.open_store()
        except StoreFaultError:
            return None
        except Exception:
            logger.exception("%s: a connection cannot be opened", self._settings.place)
            return None

    def _next(self) -> RemoteJob | None:
        """Returns the next job. None: the tier is closed."""
        with self._to_serve:
            while not self._is_closed:
                for jobs in (self._urgent, self._others):
                    while jobs:
                        job = jobs.popleft()
                        if not job.is_over:
                            self._settings.coder.told_waiting(len(self._others), self._settings.connections)
                            return job
                self._to_serve.wait()
        return None

    def _lose(self, reason: str, losses: int) -> None:
        """Marks the store as lost, and ends all waiting jobs. `losses`: as many as there were when the store was
        asked."""
        with self._lock:
            if self._is_closed or self._losses != losses or self._state is TierState.ABSENT:
                return
            self._losses += 1
            self._counts["lost"] += 1
            self._state, self._reason = TierState.ABSENT, reason
            waiting = [*self._urgent, *self._others]
            self._urgent.clear()
            self._others.clear()
            self._to_watch.notify_all()
            self._to_probe.notify()
        for job in waiting:
            self._end(job, RecordOutcome.UNAVAILABLE)

    def _watch(self) -> None:
        """Ends batches whose deadline has passed."""
        while True:
            with self._to_watch:
                if self._is_closed:
                    return
                now_s = self._clock()
                due: list[RemoteJob] = []
                while self._deadlines and self._deadlines[0][0] <= now_s:
                    _, ticket = heapq.heappop(self._deadlines)
                    if ticket in self._batches:
                        due += self._batches[ticket].jobs
                if not due:
                    self._to_watch.wait(self._deadlines[0][0] - now_s if self._deadlines else None)
            for job in due:
                self._end(job, RecordOutcome.LATE)

    def _probe(self) -> None:
        """Asks now and then whether the store is there, by a connection that nothing else needs."""
        store: RecordStore | SlotStore | None = None
        wait_s = self._settings.first_probe_s
        while True:
            losses = self._losses
            try:
                store = store or self._settings.open_store()
                facts = store.probe()
            except Exception as fault:
                if not isinstance(fault, StoreFaultError):
                    logger.exception("%s: a probe failed", self._settings.place)
                if store is not None:
                    store.close()
                    store = None
                self._lose(str(fault), losses)
                with self._lock:
                    if self._state is TierState.ABSENT and not self._is_closed:
                        # The fault of now may differ from the one by which the store was lost.
                        self._reason = str(fault)
            else:
                self._find(facts)
            with self._to_probe:
                is_here = not self._is_closed and self._state is TierState.READY
                if is_here and not self._to_probe.wait(self._settings.last_probe_s):
                    # It has stayed. A store that answers probes and nothing else is probed less and less often.
                    wait_s = self._settings.first_probe_s
                    continue
                if not self._is_closed:
                    self._to_probe.wait_for(lambda: self._is_closed, wait_s)
                    wait_s = min(2 * wait_s, self._settings.last_probe_s)
                if self._is_closed:
                    break
        if store is not None:
            store.close()

    def _find(self, facts: StoreFacts) -> None:
        with self._lock:
            self._facts = facts
            if not self._is_closed and self._state is not TierState.READY:
                self._state, self._reason = TierState.READY, ""
                self._to_watch.notify_all()
                self._to_serve.notify_all()
