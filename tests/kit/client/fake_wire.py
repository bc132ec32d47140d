"""A wire that keeps what is sent, and the server's part of a conversation as a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from kvoffload.client.joining import HeldMemory, Member
from kvoffload.client.lanes import LOOK_NS
from kvoffload.client.link import Link
from kvoffload.client.memories import Memories
from kvoffload.client.settings import SECOND_NS, LinkSettings, LinkState
from kvoffload.protocol import (
    Adopt,
    AdoptAnswer,
    AdoptVerdict,
    Answer,
    Call,
    Channel,
    Express,
    Hello,
    HelloAccepted,
    Memory,
    Register,
    Registered,
    Release,
    Role,
    ServerMessage,
    Welcome,
)
from tests.kit.cache.cache_model import PLAIN
from tests.kit.server.harness import register_of

NO_FILE = 1 << 20
"""Numbers from here on belong to no descriptor."""
SETTINGS = LinkSettings()


class FakeWire:
    def __init__(self) -> None:
        self.listens = True
        self.takes = True
        self.dials = self.hang_ups = 0
        self.endpoint = ""
        self.lifeline: list[tuple[Call, tuple[int, ...]]] = []
        self.control: list[Call] = []
        self.express: list[Call] = []
        self.express_end = -1

    def dial(self) -> str:
        self.dials += 1
        return "" if self.listens else "there is no socket"

    def open_control(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def send_lifeline(self, call: Call, descriptors: tuple[int, ...]) -> bool:
        self.lifeline.append((call, descriptors))
        return self.takes

    def send_control(self, call: Call) -> bool:
        if self.takes:
            self.control.append(call)
        return self.takes

    def open_express(self, descriptor: int) -> None:
        self.express_end = descriptor

    def send_express(self, call: Call) -> bool:
        if self.takes:
            self.express.append(call)
        return self.takes

    def hang_up(self) -> None:
        self.hang_ups += 1

    def take(self) -> list[Call]:
        """Takes the calls that were sent on the control channel since the last look."""
        taken, self.control = self.control, []
        return taken

    def take_all(self) -> list[Call]:
        """Takes the calls that were sent on both channels; each has its own order."""
        return [*self.take(), *self.take_express()]

    def take_express(self) -> list[Call]:
        taken, self.express = self.express, []
        return taken


class FakeMemory:
    def __init__(self, held: HeldMemory) -> None:
        self.held = held
        self.memory_id = held.index
        self.sessions = {held.memory_session}
        self.ready_bytes = 100
        self.is_closed = False
        self.is_mapped = False
        """Whether another holder still maps the memory after it was closed."""

    def watch(self) -> Callable[[], bool]:
        return lambda: self.is_mapped

    def join(self, held: HeldMemory) -> None:
        self.held = replace(self.held, boot_id=held.boot_id, session=held.session)
        self.sessions.add(held.memory_session)

    def close(self) -> None:
        self.is_closed = True


def make_memories(*, keeps_former: bool = False) -> Memories:
    return Memories(keeps_former=keeps_former, open_memory=FakeMemory, name=lambda held: held.index)


def make_link(
    wire: FakeWire, *, role: Role = Role.SCHEDULER, settings: LinkSettings = SETTINGS, pidfd: int = 3, **options: Any
) -> Link:
    register: Register | None = None if role is Role.OBSERVER else register_of(PLAIN)
    member = Member(engine="engine", role=role)
    memories = make_memories(keeps_former=role is Role.WORKER)
    return Link(member, register, settings, wire, memories, pidfd=pidfd, random=Random(1), **options)


def lease(number: int) -> Release:
    return Release(leases=number.to_bytes(8, "little"))


class Script:
    """A server that lets the link join, and answers when it is told to."""

    def __init__(self, link: Link, wire: FakeWire) -> None:
        self.link = link
        self.wire = wire
        self.boot_id = 1
        self.now_ns = SECOND_NS
        self.verdict = AdoptVerdict.HAS_MEMORY

    def join(
        self,
        *,
        boot_id: int = 1,
        session: int = 0x70005,
        is_reopened: bool = False,
        memory: int = NO_FILE,
        adopted_boot_id: int = 0,
        name_space: int = 4,
        resume: int = 0,
        brings_express: bool = False,
        opens_express: bool = True,
        capabilities: tuple[str, ...] = ("adopt", "events"),
        tenants: tuple[str, ...] = (),
    ) -> list[Call]:
        """Lets the link join, from the dial on to being served; what is sent right after that, on both channels."""
        self.boot_id = boot_id
        self.wire.take_all()
        self.link.on_time(self.now_ns)
        welcome = Welcome(protocol=1, session=session, domain="", control="ipc://c", is_reopened=is_reopened)
        self.tell(welcome)
        if brings_express and opens_express:
            self.open_express()
        for call in self.wire.take():
            assert isinstance(call.message, Hello)
            self.answer(call, HelloAccepted(protocol=1, capabilities=capabilities, domain=""))
        if self.link.state is LinkState.SERVING:
            return self.wire.take()
        for call in self.wire.take():
            assert isinstance(call.message, Adopt)
            self.answer(call, AdoptAnswer(verdict=self.verdict))
        if self.link.state is LinkState.JOINING:
            sizes = np.array([1 << 20], "<u8").tobytes()
            parcel = Memory(index_bytes=1, segments=1, first=0, segment_sizes=sizes, adopted_boot_id=adopted_boot_id)
            self.tell(parcel, [memory + 1, memory, memory + 2])
        for call in self.wire.take():
            assert isinstance(call.message, Register)
            self.answer(call, Registered(name_space=name_space, resume=resume, tenants=tenants))
        if opens_express and not brings_express:
            self.open_express()
        return self.wire.take_all()

    def tell(self, message: ServerMessage, descriptors: list[int] | None = None) -> None:
        """Gives the link a message on the lifeline."""
        self.link.on_lifeline(Answer(message, 1, self.boot_id), descriptors or [], self.now_ns)

    def open_express(self) -> None:
        self.tell(Express(), [NO_FILE])

    def answer_express(self, call: Call, message: ServerMessage) -> None:
        self.link.on_express(Answer(message, call.number, self.boot_id), self.now_ns)

    def answer(self, call: Call, message: ServerMessage) -> None:
        """Answers a call where it came from; a mark's is the control channel."""
        if Channel.CONTROL in call.message.channels:
            self.link.on_control(Answer(message, call.number, self.boot_id), self.now_ns)
        else:
            self.answer_express(call, message)

    def send(self, message: ServerMessage, number: int = 0) -> None:
        """Sends something on the control channel, unasked."""
        self.link.on_control(Answer(message, number, self.boot_id), self.now_ns)

    def pass_time(self, seconds: float) -> None:
        """The process looks for answers after this time, and did not look before."""
        self.now_ns += int(seconds * SECOND_NS)
        self.link.on_time(self.now_ns)

    def look_for(self, seconds: float) -> None:
        """Passes this time in a process that looks for answers as often as one that is not held up."""
        end_ns = self.now_ns + int(seconds * SECOND_NS)
        while self.now_ns < end_ns:
            self.now_ns = min(self.now_ns + LOOK_NS, end_ns)
            self.link.on_time(self.now_ns)
