"""How a process joins a server: decides what to send next from what arrives. Pure: no socket, no clock.

    start ─► greeting ─► welcome ─► hello ─► accepted ──────────────► memory ─► register ─► express ─► JOINED
                                                 │                       ▲
                                                 └► adopt ─► WANTED ─► offers      (it holds an old server's memory)

The express channel comes once the session is registered: for later processes of a session, right behind the welcome.

Any other message ends the attempt with one line that names it; the caller starts another attempt later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvoffload import __version__
from kvoffload.packets import close_all
from kvoffload.protocol import (
    CAPABILITIES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Adopt,
    AdoptAnswer,
    AdoptVerdict,
    Answer,
    ClientMessage,
    Error,
    ErrorCode,
    Greeting,
    Hello,
    HelloAccepted,
    Memory,
    Offer,
    Register,
    Registered,
    Role,
    Welcome,
)

OFFERED_AT_ONCE = 250
"""The most segments in one packet."""
SOFTWARE = f"kvoffload {__version__}"
_MEMORY_SESSIONS = 1 << 32
"""The lower half of a session's number is that of its memory."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """The process that wants to be served."""

    engine: str
    role: Role
    rank: int = 0
    pid: int = 0
    uid: int = 0
    domain: str = ""


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """A server's memory as this process holds it. The descriptors stay the holder's."""

    boot_id: int
    session: int
    lock: int
    index: int
    index_bytes: int
    segments: tuple[int, ...]
    segment_sizes: tuple[int, ...]

    @property
    def memory_session(self) -> int:
        """The memory's own number of the session."""
        return self.session % _MEMORY_SESSIONS


@dataclass(frozen=True)
class OnLifeline:
    """A message for the lifeline, with descriptors, which stay the owner's."""

    message: ClientMessage
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True)
class OnControl:
    """A message for a new control connection to the endpoint that the welcome names."""

    message: ClientMessage


ToSend = OnLifeline | OnControl


class Step(Enum):
    """The message that the attempt waits for."""

    WELCOME = "welcome"
    HELLO = "hello_accepted"
    ADOPT = "adopt_answer"
    MEMORY = "memory"
    REGISTERED = "registered"
    EXPRESS = "express"
    JOINED = "nothing"
    FAILED = "nothing any more"


@dataclass(eq=False)
class _Parcel:
    """The memory, as far as it has come."""

    index_bytes: int = 0
    lock: int = -1
    index: int = -1
    segments: list[int] = field(default_factory=list)
    segment_sizes: list[int] = field(default_factory=list)
    total: int = -1
    adopted_boot_id: int = 0

    @property
    def is_whole(self) -> bool:
        return self.total == len(self.segments)

    def close(self) -> None:
        close_all([file for file in (self.lock, self.index, *self.segments) if file >= 0])
        self.lock = self.index = -1
        self.segments.clear()


class Joining:
    """One attempt to join a server. `close` closes descriptors that it has received and that were not taken."""

    def __init__(
        self,
        member: Member,
        register: Register | None,
        *,
        former: HeldMemory | None = None,
    ) -> None:
        """An observer has no register, no memory and no blocks. The express channel is the caller's to take."""
        assert (register is None) == (member.role is Role.OBSERVER)
        self._member = member
        self._register = register
        self._former = former
        self._parcel = _Parcel()
        self.step = Step.WELCOME
        self.awaits_express = register is not None
        self.fault = ""
        """One line, once the attempt has failed."""
        self.refusal: Error | None = None
        """The server's refusal, or None if the attempt failed otherwise or has not failed."""
        self.boot_id = 0
        self.welcome: Welcome | None = None
        self.accepted: HelloAccepted | None = None
        self.registered: Registered | None = None

    @property
    def keeps_former(self) -> bool:
        """The memory that this process holds is the server's own: what is mapped stays."""
        held = self._former
        return held is not None and self.step is Step.JOINED and held.boot_id in (self.boot_id, self._adopted)

    @property
    def _adopted(self) -> int:
        return self._parcel.adopted_boot_id or self.boot_id

    def start(self, pidfd: int) -> list[ToSend]:
        """Returns the first message to send. The pidfd stays the caller's."""
        held = self._former
        greeting = Greeting(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            engine=self._member.engine,
            role=self._member.role,
            rank=self._member.rank,
            pid=self._member.pid,
            uid=self._member.uid,
            domain=self._member.domain,
            former_session=0 if held is None else held.session,
            former_boot_id=0 if held is None else held.boot_id,
            software=SOFTWARE,
            wants_express=self._register is not None,
            wants_warnings=self._member.role is Role.SCHEDULER,
            heeds_shrinking=True,
        )
        return [OnLifeline(greeting, (pidfd,))]

    def on_lifeline(self, answer: Answer, descriptors: list[int]) -> list[ToSend]:
        """Hears a message of the lifeline, and takes its descriptors."""
        message = answer.message
        if isinstance(message, Welcome) and self.step is Step.WELCOME:
            close_all(descriptors)
            return self._on_welcome(message, answer.boot_id)
        if isinstance(message, Memory) and self._awaits_memory():
            return self._on_memory(message, descriptors)
        close_all(descriptors)
        return self._fail_on(answer, "lifeline")

    def on_express(self) -> None:
        """The caller has taken the express channel."""
        self.awaits_express = False
        if self.step is Step.EXPRESS:
            self.step = Step.JOINED

    def on_control(self, answer: Answer) -> list[ToSend]:
        message = answer.message
        if answer.boot_id != self.boot_id:
            return self._fail(f"control: the server has changed, {answer.boot_id:#x} answers for {self.boot_id:#x}")
        if isinstance(message, HelloAccepted) and self.step is Step.HELLO:
            self.accepted = message
            return self._after_hello()
        if isinstance(message, AdoptAnswer) and self.step is Step.ADOPT:
            self.step = Step.MEMORY
            # The server's own memory may have been quicker than this answer.
            is_wanted = message.verdict is AdoptVerdict.WANTED and self._parcel.total < 0
            offers = self._offers() if is_wanted else []
            return offers or self._after_memory()
        if isinstance(message, Registered) and self.step is Step.REGISTERED:
            self.registered = message
            self.step = Step.EXPRESS if self.awaits_express else Step.JOINED
            return []
        return self._fail_on(answer, "control")

    def take_memory(self) -> HeldMemory | None:
        """Returns the memory that came, once joined: the descriptors are the caller's from now on. None: an
        observer's."""
        assert self.step is Step.JOINED
        assert self.welcome is not None
        parcel = self._parcel
        if parcel.lock < 0:
            return None
        assert self.registered is not None
        held = HeldMemory(
            boot_id=self.boot_id,
            session=self.registered.resume or self.welcome.session,
            lock=parcel.lock,
            index=parcel.index,
            index_bytes=parcel.index_bytes,
            segments=tuple(parcel.segments),
            segment_sizes=tuple(parcel.segment_sizes),
        )
        self._parcel = _Parcel(adopted_boot_id=parcel.adopted_boot_id)
        return held

    def close(self) -> None:
        self._parcel.close()

    def _on_welcome(self, welcome: Welcome, boot_id: int) -> list[ToSend]:
        self.welcome = welcome
        self.boot_id = boot_id
        self.step = Step.HELLO
        hello = Hello(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            capabilities=tuple(sorted(CAPABILITIES)),
            domain=self._member.domain,
            software=SOFTWARE,
        )
        return [OnControl(hello)]

    def _after_hello(self) -> list[ToSend]:
        assert self.accepted is not None
        if self._register is None:
            self.step = Step.JOINED
            return []
        held = self._former
        # Memory that has come already is not that of an offer: the server has its own.
        is_new = held is not None and held.boot_id != self.boot_id and self._parcel.total < 0
        if held is not None and is_new and "adopt" in self.accepted.capabilities:
            self.step = Step.ADOPT
            sizes = np.array(held.segment_sizes, "<u8").tobytes()
            return [OnControl(Adopt(former_boot_id=held.boot_id, index_bytes=held.index_bytes, segment_sizes=sizes))]
        self.step = Step.MEMORY
        return self._after_memory()

    def _offers(self) -> list[ToSend]:
        held = self._former
        assert held is not None
        offers: list[ToSend] = []
        for first in range(0, max(len(held.segments), 1), OFFERED_AT_ONCE):
            part = slice(first, first + OFFERED_AT_ONCE)
            offer = Offer(
                former_boot_id=held.boot_id,
                first=first,
                segment_sizes=np.array(held.segment_sizes[part], "<u8").tobytes(),
                is_last=first + OFFERED_AT_ONCE >= len(held.segments),
            )
            beside = (held.lock, held.index) if first == 0 else ()
            offers.append(OnLifeline(offer, (*beside, *held.segments[part])))
        return offers

    def _awaits_memory(self) -> bool:
        is_early = self.step in (Step.HELLO, Step.ADOPT, Step.MEMORY)
        return is_early and self._register is not None and not self._parcel.is_whole

    def _on_memory(self, memory: Memory, descriptors: list[int]) -> list[ToSend]:
        parcel = self._parcel
        sizes = np.frombuffer(memory.segment_sizes, "<u8").tolist()
        beside = 2 if memory.first == 0 else 0
        is_next = memory.first == len(parcel.segments) and parcel.total in (-1, memory.segments)
        if not is_next or len(descriptors) != beside + len(sizes) or memory.first + len(sizes) > memory.segments:
            close_all(descriptors)
            return self._fail(f"memory: {len(descriptors)} descriptors for segments from {memory.first} on do not fit")
        if beside:
            parcel.lock, parcel.index = descriptors[:2]
            parcel.index_bytes = memory.index_bytes
            parcel.adopted_boot_id = memory.adopted_boot_id
            parcel.total = memory.segments
        parcel.segments += descriptors[beside:]
        parcel.segment_sizes += sizes
        return self._after_memory()

    def _after_memory(self) -> list[ToSend]:
        if self.step is not Step.MEMORY or not self._parcel.is_whole:
            return []
        assert self._register is not None
        self.step = Step.REGISTERED
        return [OnControl(self._register)]

    def _fail_on(self, answer: Answer, channel: str) -> list[ToSend]:
        message = answer.message
        if isinstance(message, Error):
            self.refusal = message
            why = (
                "the server has no version of the protocol that we have"
                if message.code is ErrorCode.VERSION
                else "refused"
            )
            return self._fail(f"{why}: {message.message}")
        return self._fail(f"{channel}: {type(message).__name__} came, awaited was {self.step.value}")

    def _fail(self, line: str) -> list[ToSend]:
        self.fault = line
        self.step = Step.FAILED
        self.close()
        return []
