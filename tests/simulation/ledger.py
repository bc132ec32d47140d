"""A record of everything that servers granted, kept by an observer who sees all: answers, their fate, every copy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.protocol import Abort, Acquired, CreditsGranted, Publish, Release
from kvoffload.protocol.message import OneWay

if TYPE_CHECKING:
    from kvoffload.cache import ReservedSlots
    from tests.simulation.channels import Connection
    from tests.simulation.engine import Job
    from tests.simulation.memory import AnyMemory
    from tests.simulation.process import Process


@dataclass(eq=False)
class Grant:
    """A slot or a lease that a server gave to a process."""

    process: Process
    connection: Connection
    visit: int
    """The process's visit to that session."""
    is_delivered: bool = False
    published_by: list[tuple[Process, int]] = field(default_factory=list)
    """Processes that published it, with the visit."""
    is_excused: bool = False
    """The message that would have ended it was lost on the wire, which no real wire does."""


class Ledger:
    """Raises AssertionError when a slot is granted that is still in use."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], Grant] = {}
        """Slots by memory and ticket."""
        self.leases: dict[tuple[int, int], Grant] = {}
        """Leases by memory and number."""
        self.writers = Counter[tuple[int, int]]()
        self.readers = Counter[tuple[int, int]]()
        """Copies that run: by memory and address."""
        self.exited: set[int] = set()
        """Numbers of processes that have exited."""
        self.lost = Counter[str]()
        """Grants that are still held for an engine that does not know of them, by reason."""

    def grant(
        self, process: Process, connection: Connection, memory: AnyMemory, message: CreditsGranted | Acquired
    ) -> None:
        """Notes the slots or the lease that a server grants."""
        number = memory.number
        if isinstance(message, Acquired):
            if message.lease:
                assert (number, message.lease) not in self.leases, f"lease {message.lease} is given twice"
                self.leases[number, message.lease] = Grant(process, connection, process.visits)
            for address in (at for group in message.groups for at in read(group.addresses)):
                assert not self.writers[number, address], f"slot {address} is read while somebody writes to it"
            return
        for ticket, address in zip(read(message.tickets), read(message.addresses), strict=True):
            if ticket:
                place = number, address
                assert (number, ticket) not in self.slots, f"ticket {ticket} is given twice"
                assert not self.writers[place], f"slot {address} is given away under a running save"
                assert not self.readers[place], f"slot {address} is given away under a running load"
                self.slots[number, ticket] = Grant(process, connection, process.visits)

    def deliver(self, process: Process, connection: Connection, message: CreditsGranted | Acquired) -> None:
        """Notes that an answer has come to the process that asked."""
        assert connection.truth is not None
        number = connection.truth[0]
        if isinstance(message, Acquired):
            if message.lease:
                self.leases[number, message.lease].is_delivered = True
            return
        for ticket in read(message.tickets):
            if ticket:
                self.slots[number, ticket].is_delivered = True

    def publish(self, worker: Process, slots: ReservedSlots) -> None:
        """It is about to say so."""
        for ticket in slots.tickets.tolist():
            self.slots[slots.memory_id, ticket].published_by.append((worker, worker.visits))

    def excuse(self, process: Process, message: OneWay) -> None:
        """The wire loses this one."""
        number = process.truth[0] if process.truth is not None else 0
        if isinstance(message, Release):
            found = [self.leases.get((number, lease)) for lease in read(message.leases)]
        elif isinstance(message, Publish | Abort):
            found = [self.slots.get((number, ticket)) for ticket in read(message.tickets)]
        else:
            found = []
        for grant in found:
            if grant is not None:
                grant.is_excused = True

    def mark(self, job: Job, change: int) -> None:
        """A copy begins (1) or has ended (-1)."""
        copies = self.readers if job.lease is not None else self.writers
        for address in job.addresses:
            copies[job.memory_id, address] += change

    # ---- at the end ----

    def check_leases(self, memory: AnyMemory) -> None:
        """Checks leases when all engines have released what they had."""
        for lease, session in memory.held_leases():
            grant = self.leases.get((memory.number, lease))
            assert grant is not None, f"lease {lease} of memory {memory.number} was not given away: the server has it"
            self._check(memory, session, grant, f"lease {lease} of memory {memory.number}")

    def check_slots(self, memory: AnyMemory, stocks: set[int]) -> None:
        """Reserved is what lies in stocks, and what was lost with a connection or a process."""
        reserved = dict(memory.reservations())
        assert stocks <= reserved.keys(), f"slots in stocks are not reserved: {sorted(stocks - reserved.keys())}"
        for ticket, session in reserved.items():
            if ticket not in stocks:
                grant = self.slots.get((memory.number, ticket))
                assert grant is not None, f"ticket {ticket} of memory {memory.number} is the server's own"
                self._check(memory, session, grant, f"ticket {ticket} of memory {memory.number}")

    def _check(self, memory: AnyMemory, session: int, grant: Grant, what: str) -> None:
        """Checks whether what is still held may be."""
        process = grant.process
        users = [(process, grant.visit), *grant.published_by]
        members = memory.members(session)
        assert members - self.exited, f"{what} is held for session {session}, whose processes {members} have exited"
        if not all(one.is_alive for one, _ in users):
            self.lost["with a process"] += 1
        elif any(one.truth != (memory.number, session) or one.visits != visit for one, visit in users):
            self.lost["in a former session"] += 1
        elif grant.is_excused:
            self.lost["by the wire"] += 1
        else:
            assert not grant.is_delivered, f"{what}: {process.name} has forgotten it"
            assert grant.connection not in process.wire.all_open, f"{what}: the answer never came to {process.name}"
            self.lost["with a connection"] += 1


def read(blob: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(blob, "<u8").tolist()
    return numbers
