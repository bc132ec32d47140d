"""What the core wants to be sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from kvoffload.cache import SessionId
from kvoffload.protocol import ClientMessage, ServerMessage
from kvoffload.server.event_feed import Space

FoundLater: TypeAlias = ServerMessage | Callable[[], ServerMessage | None]
"""An answer, or what says it; None: it comes by another way."""


class ToConnection(NamedTuple):
    """A reply on a control connection; `number` is the request's."""

    connection: bytes
    message: ServerMessage
    number: int


class Later(NamedTuple):
    """An answer that takes long to find, and `find` may be called on any thread. With what it returns, or raised,
    `ServerCore.finish` is to be called before anything that came behind it on this connection is handled: that is the
    answer, or says it on the core's thread."""

    connection: bytes
    request: ClientMessage
    number: int
    find: Callable[[], FoundLater]


class ToLifeline(NamedTuple):
    """A reply on a lifeline; or with number 0 an event, which is counted by whoever sends it, among `memory`'s."""

    lifeline: int
    message: ServerMessage
    number: int = 0


class SendMemory(NamedTuple):
    """The domain's descriptors go to this process, behind what was sent before."""

    lifeline: int
    domain: str
    adopted_boot_id: int


class OpenExpress(NamedTuple):
    """The process may have an express channel with its session's rights, behind what was sent before."""

    lifeline: int
    session: int
    cache_session: SessionId
    tenant: int
    tenants: tuple[int, ...]
    space: Space
    owner: str = ""
    """Whose share of all channels it is of."""


Sendable: TypeAlias = ToConnection | Later | ToLifeline | SendMemory | OpenExpress
