"""A model of a native express channel, on the memory of a simulated server."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvoffload.cache import LocalCache, SessionId
from kvoffload.protocol import (
    Abort,
    Acquire,
    AcquireEntries,
    Call,
    Credits,
    Done,
    ErrorCode,
    Invalidate,
    Mark,
    Publish,
    Release,
    ServerMessage,
)
from kvoffload.protocol.message import OneWay
from kvoffload.server import ServerCore
from kvoffload.server.common.refusal import refuse
from kvoffload.server.sessions.event_feed import Space
from kvoffload.server.sessions.session import Registration
from tests.simulation import block_service


@dataclass(eq=False)
class ExpressModel:
    """One channel, with the rights of one session."""

    session: int
    cache_session: SessionId
    registration: Registration
    cache: LocalCache
    space: Space
    core: ServerCore
    """That hears of what is stored, and of what is not to be trusted."""
    one_way: int = 0

    def serve(self, call: Call, now_ns: int, *, is_draining: bool) -> ServerMessage | None:
        message = call.message
        assert call.session == self.session, "a channel is used for another session"
        if isinstance(message, OneWay):
            self.one_way += 1
            assert call.number == self.one_way, "a stream has lost something"
        if call.is_late(now_ns):
            return None
        refusal = block_service.check_names(self.registration, message)
        if refusal is not None:
            return refusal
        if is_draining and isinstance(message, Acquire | AcquireEntries | Credits):
            return refuse(message, ErrorCode.DRAINING, "this server ends")
        match message:
            case Acquire() | AcquireEntries():
                return block_service.acquire(self.cache, self.cache_session, message)
            case Credits():
                return block_service.grant_credits(self.cache, self.cache_session, self.registration, message)
            case Publish():
                tell = partial(self.core.tell_stored, self.space)
                return block_service.publish(self.cache, self.cache_session, self.registration, message, tell)
            case Abort():
                block_service.abort(self.cache, self.cache_session, message)
            case Release():
                block_service.release(self.cache, self.cache_session, message)
            case Invalidate():
                block_service.invalidate(self.cache, message)
                self.core.tiers.forget(self.space, message.group, message.hashes)
            case Mark():
                return Done()
            case _:
                raise AssertionError(f"{message} does not belong on an express channel")
        return None
