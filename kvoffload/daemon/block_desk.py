"""Operations on blocks: each is checked against what its session registered, and done in the session's cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from kvoffload.daemon import block_calls
from kvoffload.daemon.event_feed import Space
from kvoffload.daemon.session import Connection
from kvoffload.protocol import (
    Abort,
    Acquire,
    AcquireEntries,
    Credits,
    Invalidate,
    Publish,
    Release,
    ServerMessage,
)
from kvoffload.types import HASH_BYTES

LONG_BLOCKS = 4096
"""An acquire of more than these takes half a millisecond and longer."""

BlockMessage: TypeAlias = Acquire | AcquireEntries | Credits | Publish | Abort | Release | Invalidate


class BlockDesk:
    """Belongs to the thread of the server's core."""

    def __init__(
        self,
        tell_stored: Callable[[Space, int, bytes, bytes], None],
        tell_forgotten: Callable[[Space, int, bytes], object],
    ) -> None:
        """They hear of blocks that became readable, and of those that are not to be trusted."""
        self._tell_stored = tell_stored
        self._tell_forgotten = tell_forgotten

    def serve(
        self, connection: Connection, message: BlockMessage
    ) -> ServerMessage | Callable[[], ServerMessage] | None:
        """The answer; None to a one-way message that was served. The agreement permits the operation.

        A call that finds the answer, on any thread, if that takes long.
        """
        cache, session, registration = connection.hold()
        refusal = block_calls.check_names(registration, message)
        if refusal is not None:
            return refusal
        space = Space(
            domain=connection.session.domain.name,
            name_space=registration.name_space,
            fingerprint=registration.register.fingerprint,
        )
        match message:
            case Acquire() | AcquireEntries():
                hashes = message.chain if isinstance(message, Acquire) else message.hashes
                if len(hashes) > LONG_BLOCKS * HASH_BYTES:
                    return partial(block_calls.acquire, cache, session, message)
                return block_calls.acquire(cache, session, message)
            case Credits():
                return block_calls.grant_credits(cache, session, registration, message)
            case Publish():
                return block_calls.publish(
                    cache,
                    session,
                    registration,
                    message,
                    lambda hashes, parents: self._tell_stored(space, message.group, hashes, parents),
                )
            case Abort():
                block_calls.abort(cache, session, message)
            case Release():
                block_calls.release(cache, session, message)
            case Invalidate():
                block_calls.invalidate(cache, message)
                self._tell_forgotten(space, message.group, message.hashes)
        return None
