"""The messages and other things that the core returns to the event loop to send."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvoffload.cache import SessionId
from kvoffload.protocol import ClientMessage, ServerMessage
from kvoffload.server.common.steps import Find, FoundLater, Unfinished
from kvoffload.server.sessions.event_feed import Space


class ToConnection(NamedTuple):
    """A reply on a control connection; `number` is the request's."""

    connection: bytes
    message: ServerMessage
    number: int


class Later(NamedTuple):
    """An answer that takes long to find. The caller passes what `find` returned or raised in the end to
    `ServerCore.finish`, before it handles anything that came later on this connection; that is the answer, or a
    callable that returns it on the core's thread."""

    connection: bytes
    request: ClientMessage
    number: int
    find: Find

    def find_all(self) -> FoundLater:
        """Does all parts of the work, one behind the other."""
        while isinstance(found := self.find(), Unfinished):
            pass
        return found


class ToLifeline(NamedTuple):
    """A reply on a lifeline, or with number 0 an event. The sender numbers events, those of `SendMemory` among them."""

    lifeline: int
    message: ServerMessage
    number: int = 0


class SendMemory(NamedTuple):
    """Sends the domain's descriptors to this process, after everything sent before."""

    lifeline: int
    domain: str
    adopted_boot_id: int


class OpenExpress(NamedTuple):
    """Opens an express channel for the process with its session's rights, after everything sent before."""

    lifeline: int
    session: int
    cache_session: SessionId
    tenant: int
    tenants: tuple[int, ...]
    space: Space
    owner: str = ""
    """Name of the user or client whose share of all express channels it uses."""


Sendable: TypeAlias = ToConnection | Later | ToLifeline | SendMemory | OpenExpress
