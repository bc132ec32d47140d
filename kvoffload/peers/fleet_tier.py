"""The memory of a fleet as one tier: each record has its home with one of the members, the same for all of them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvoffload.errors import TierError
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
    Tier,
    TierHealth,
    TierState,
)
from kvoffload.tiers.homes import HomeBatch, Homes, join_homes, pick_hashes, split_by_home

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Batch:
    """A batch of this tier: its size, the outcome of records that no part covers, and the results of its parts."""

    count: int
    otherwise: RecordOutcome
    ended: list[tuple[HomeBatch, FinishedBatch]] = field(default_factory=list)
    waits_for: dict[tuple[str, Ticket], HomeBatch] = field(default_factory=dict)
    """The parts under way, by member and its tier's ticket."""


Wants = Callable[[bytes], npt.NDArray[np.bool_]]
"""Returns which of these hashes' records are meant."""
FindHomes = Callable[[tuple[str, ...], bytes], Homes]
"""Returns, for members and hashes, the place of each hash's home in the list. It is the same on all machines."""


class FleetTier:
    """A Tier over others, one a member. Records whose home is this server stay in its memory: they are not sent
    anywhere, and not asked for.

    A member that is absent has no records: until it is back, the next one in its order is their home.
    """

    knows_all = False

    def __init__(self, own_name: str, members: Mapping[str, Tier], homes: FindHomes) -> None:
        """Takes the tiers of the other members. `own_name` must not be among them."""
        self._own_name = own_name
        self._homes = homes
        self._lock = threading.Lock()
        self._members = dict(members)
        self._places: dict[str, str] = {}
        """Addresses of members that were announced, by name."""
        self._has_left = False
        """Whether this server is no home any more."""
        self._ready: dict[str, int] = {}
        """How often each member that is ready had been lost, when `find_moved` was called last."""
        self._leaving: set[str] = set()
        """Names of members that get no more requests. Each is dropped when its last request has ended."""
        self._parted: list[Tier] = []
        """Tiers of members that have gone, until a thread closes them."""
        self._partings: list[threading.Thread] = []
        self._warned: set[str] = set()
        """Members whose tier could not be opened, as the log has said."""
        self.on_close: Callable[[], None] = lambda: None
        self.own_fault = ""
        """Why this server is no proper member, in one line; empty: it is one. Set by any thread."""
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.epoll()
        self._poller.register(self._event, select.EPOLLIN)
        for tier in self._members.values():
            self._poller.register(tier.fileno(), select.EPOLLIN)
        self._batches: dict[Ticket, _Batch] = {}
        self._parts: dict[tuple[str, Ticket], Ticket] = {}
        """Tickets of this tier, by member and its tier's ticket."""
        self._finished: list[FinishedBatch] = []
        self._last_ticket = 0
        self._is_closed = False

    @property
    def members(self) -> dict[str, Tier]:
        """The members' tiers by name, without this server."""
        with self._lock:
            return dict(self._members)

    @property
    def capacity_bytes(self) -> int:
        return sum(tier.capacity_bytes for tier in self.members.values())

    def is_home(self, hashes: bytes) -> npt.NDArray[np.bool_]:
        """Returns which of these records have their home here."""
        with self._lock:
            present = self._present()
        return self._has_home(present, {self._own_name}, hashes)

    def leave(self) -> Wants | None:
        """Makes other members the homes of all records, because this server ends. Returns what finds the records whose
        home was here. None: there is no other member."""
        with self._lock:
            present = self._present()
            self._has_left = True
        return partial(self._has_home, present, {self._own_name}) if len(present) > 1 else None

    def find_moved(self) -> Wants | None:
        """Returns what finds the records whose homes are members that came, or came back, since the last call. None: no
        member did."""
        with self._lock:
            healths = {name: tier.health() for name, tier in self._members.items()}
            ready = {
                name: sum(one.counts.get("lost", 0) for one in health)
                for name, health in healths.items()
                if any(one.state is TierState.READY for one in health)
            }
            before, self._ready = self._ready, ready
            came = {name for name, lost in ready.items() if before.get(name) != lost}
            return partial(self._has_home, self._present(), came) if came else None

    def put(self, batch: RecordBatch, *, timeout_s: float) -> Ticket | None:
        """Puts records at their homes. Those whose home is here count as stored: this server's memory has them."""

        def ask(tier: Tier, part: HomeBatch) -> Ticket | None:
            chosen = replace(
                batch,
                names=part.names,
                slots=np.ascontiguousarray(batch.slots[part.places]),
                digests=np.ascontiguousarray(batch.digests[part.places]),
                parents=pick_hashes(batch.parents, part.places),
            )
            return tier.put(chosen, timeout_s=timeout_s)

        stored = RecordOutcome.DURABLE if batch.is_durable else RecordOutcome.WRITTEN
        return self._split(batch.names, ask, RecordOutcome.UNAVAILABLE if self._has_left else stored)

    def get(self, names: RecordNames, slots: Addresses, *, record_bytes: int, timeout_s: float) -> Ticket | None:
        def ask(tier: Tier, part: HomeBatch) -> Ticket | None:
            chosen = np.ascontiguousarray(slots[part.places])
            return tier.get(part.names, chosen, record_bytes=record_bytes, timeout_s=timeout_s)

        return self._split(names, ask, RecordOutcome.MISSING)

    def look(self, names: RecordNames, *, timeout_s: float) -> Ticket | None:
        return self._split(names, lambda tier, part: tier.look(part.names, timeout_s=timeout_s), RecordOutcome.MISSING)

    def remove(self, names: RecordNames, *, timeout_s: float) -> Ticket | None:
        return self._split(
            names, lambda tier, part: tier.remove(part.names, timeout_s=timeout_s), RecordOutcome.MISSING
        )

    def contains(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        return np.zeros(len(names), np.bool_)

    def poll(self) -> list[FinishedBatch]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._lock:
            for name, tier in self._members.items():
                for ended in tier.poll():
                    self._take(name, ended)
            self._part()
            finished, self._finished = self._finished, []
        return finished

    def scan(self, cursor: int = 0, *, timeout_s: float) -> ScanPage:
        raise TierError("the memory of other servers is not listed from here")

    def health(self) -> list[TierHealth]:
        own = TierHealth(name="this server", state=TierState.ABSENT, reason=self.own_fault)
        return [*([own] if own.reason else []), *(one for tier in self.members.values() for one in tier.health())]

    def fileno(self) -> int:
        return self._poller.fileno()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            members = [*self._members.values(), *self._parted]
        self.on_close()
        for thread in self._partings:
            thread.join(timeout_s)
        faults: list[str] = []

        def close(tier: Tier) -> None:
            try:
                tier.close(timeout_s)
            except TierError as fault:
                faults.append(str(fault))

        closing = [threading.Thread(target=close, args=[tier], name="kvoffload-fleet") for tier in members]
        started = []
        for thread, tier in zip(closing, members, strict=True):
            try:
                thread.start()
            except RuntimeError:
                close(tier)
            else:
                started.append(thread)
        for thread in started:
            thread.join()
        self._poller.close()
        os.close(self._event)
        if faults:
            raise TierError("; ".join(faults))

    # ---- inside ----

    def set_members(self, wanted: Mapping[str, Callable[[], Tier]], places: Mapping[str, str]) -> None:
        """Sets the members: opens new ones, and drops others when they are idle. One whose address has changed is
        dropped first, and opened by a later call. The caller calls it from one thread, again and again: one call may
        not take all."""
        with self._lock:
            if self._is_closed:
                return
            moved = {name for name, place in self._places.items() if places.get(name, place) != place}
            self._leaving = (self._members.keys() - wanted.keys()) | (moved & self._members.keys())
            new = wanted.keys() - self._members.keys()
            self._part()
        for name in sorted(new):
            # Opened without the lock, since its threads take a while to start.
            try:
                tier = wanted[name]()
            except TierError as fault:
                self._warn_without(name, fault)
                continue
            if not self._take_member(name, tier, places[name]):
                _close_quietly(tier)
                return

    def _warn_without(self, name: str, fault: TierError) -> None:
        """The caller's next look tries again, so the log has the fault of each member once."""
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("server %s is not asked for records for now: %s", name, fault)

    def _take_member(self, name: str, tier: Tier, place: str) -> bool:
        """Takes a member's tier. False: the tier was closed meanwhile."""
        with self._lock:
            if self._is_closed:
                return False
            self._members[name], self._places[name] = tier, place
            self._poller.register(tier.fileno(), select.EPOLLIN)
            self._warned.discard(name)
            return True

    def _part(self) -> None:
        """Drops members that leave and have nothing under way. Their tiers are closed on threads of their own."""
        busy = {name for name, _ in self._parts}
        for name in list(self._leaving - busy):
            tier = self._members.pop(name)
            self._places.pop(name, None)
            self._leaving.discard(name)
            self._poller.unregister(tier.fileno())
            self._parted.append(tier)
        self._partings = [thread for thread in self._partings if thread.is_alive()]
        while self._parted:
            thread = threading.Thread(target=_close_quietly, args=(self._parted[-1],), name="kvoffload-parting")
            try:
                thread.start()
            except RuntimeError:
                # The next call tries again.
                return
            self._parted.pop()
            self._partings.append(thread)

    def _present(self) -> tuple[str, ...]:
        """Returns the members that are not absent, and this server unless it has left, sorted as on all machines."""
        present = [
            name
            for name, tier in self._members.items()
            if name not in self._leaving and any(one.state is not TierState.ABSENT for one in tier.health())
        ]
        own = [] if present and self._has_left else [self._own_name]
        return tuple(sorted([*present, *own]))

    def _has_home(self, members: tuple[str, ...], chosen: Set[str], hashes: bytes) -> npt.NDArray[np.bool_]:
        """Returns which of these records have their home with one of the chosen members."""
        is_chosen = np.array([name in chosen for name in members], np.bool_)
        return is_chosen[self._homes(members, hashes)]

    def _split(
        self, names: RecordNames, ask: Callable[[Tier, HomeBatch], Ticket | None], here: RecordOutcome
    ) -> Ticket | None:
        """Sends the parts of a batch to their homes. `here`: the outcome of records whose home is this server."""
        with self._lock:
            if self._is_closed:
                raise TierError("the tier of peers is closed")
            if len(self._batches) + len(self._finished) >= BATCH_LIMIT:
                return None
            present = self._present()
            self._last_ticket += 1
            ticket = self._last_ticket
            batch = self._batches[ticket] = _Batch(len(names), here)
            for part in split_by_home(names, self._homes(present, names.hashes)):
                name = present[part.home]
                if name == self._own_name:
                    continue
                asked = ask(self._members[name], part)
                if asked is None:
                    batch.ended.append((part, _refuse(part)))
                    continue
                self._parts[name, asked] = ticket
                batch.waits_for[name, asked] = part
            if not batch.waits_for:
                self._finish(ticket)
                os.eventfd_write(self._event, 1)
        return ticket

    def _take(self, name: str, ended: FinishedBatch) -> None:
        ticket = self._parts.pop((name, ended.ticket), None)
        if ticket is None:
            return
        batch = self._batches[ticket]
        batch.ended.append((batch.waits_for.pop((name, ended.ticket)), ended))
        if not batch.waits_for:
            self._finish(ticket)

    def _finish(self, ticket: Ticket) -> None:
        batch = self._batches.pop(ticket)
        self._finished.append(join_homes(ticket, batch.count, batch.ended, otherwise=batch.otherwise))


def _close_quietly(tier: Tier) -> None:
    """Closes a tier. A connection that hangs is left to its thread, which is a daemon."""
    with contextlib.suppress(TierError):
        tier.close()


def _refuse(part: HomeBatch) -> FinishedBatch:
    """Makes the result of a part whose member takes no more batches now."""
    outcomes = np.full(len(part.names), RecordOutcome.UNAVAILABLE, np.uint8)
    return FinishedBatch(ticket=0, outcomes=outcomes, digests=np.empty(0, np.uint64), parents=b"")
