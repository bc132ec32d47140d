"""The base classes of messages: frozen dataclasses that state their operation number, direction, channel and
version."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import ClassVar

from kvoffload.protocol.limits import FRAME_BYTES, PACKET_BYTES

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1


class Channel(Enum):
    """Where messages go, and how large one may be."""

    CONTROL = "control"
    LIFELINE = "lifeline"
    EXPRESS = "express"

    # There is one of each; Enum's own is code in Python, on the way of every message.
    __hash__ = object.__hash__

    @property
    def limit_bytes(self) -> int:
        return PACKET_BYTES if self is Channel.LIFELINE else FRAME_BYTES


CONTROL = (Channel.CONTROL,)
LIFELINE = (Channel.LIFELINE,)
EXPRESS = (Channel.EXPRESS,)


class Phase(IntEnum):
    """How far a process has come with a server."""

    NEW = 0
    GREETED = 1
    """Hello was accepted: version, capabilities and domain are agreed."""
    REGISTERED = 2
    """Register was accepted: identity and geometry are agreed, blocks may be named."""


class Message:
    """Every subclass is a frozen dataclass with an `op` of its own; its annotations are its fields on the wire."""

    op: ClassVar[int]
    """Operation number: below 64 from client to server, from 64 on the other way. A number is never used again."""
    since: ClassVar[int] = 1
    """Protocol version in which the message first appeared."""
    channels: ClassVar[tuple[Channel, ...]] = CONTROL
    descriptors: ClassVar[str] = ""
    """The file descriptors that go with the message as SCM_RIGHTS, in their order, for the docs; empty: none."""


class ClientMessage(Message):
    """Its frame is `[op, number, session, expires_ns, ...fields]`."""

    needs: ClassVar[Phase] = Phase.REGISTERED
    capability: ClassVar[str] = ""
    """Capability that must have been agreed before the message is sent; empty: none."""
    is_for_operators: ClassVar[bool] = False
    """Whether only operators may send it. If so, it has a field `token`."""


class ServerMessage(Message):
    """Its frame is `[op, number, boot_id, ...fields]`."""


class Reply(ServerMessage):
    """Answers a request; `number` is the request's."""


class Event(ServerMessage):
    """Sent unasked; `number` counts the events of its channel from 1, without holes."""


class Request(ClientMessage):
    """Gets exactly one answer, its reply or an error, unless it came late."""

    reply: ClassVar[type[Reply]]


ONE_WAY_OPS = range(32, 48)
"""Operations whose messages are one-way; the others of a client's are requests."""


class OneWay(ClientMessage):
    """Gets no answer when all is well; `number` counts the one-way messages of its channel from 1."""
