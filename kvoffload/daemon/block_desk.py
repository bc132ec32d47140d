"""Operations on blocks: each is checked against what its session registered, and done in the session's cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from kvoffload.daemon import block_calls
from kvoffload.daemon.event_feed import Space
from kvoffload.daemon.session import Connection, Registration
from kvoffload.protocol import (
    Abort,
    Acquire,
    AcquireEntries,
    Credits,
    Error,
    Invalidate,
    Publish,
    Release,
    ServerMessage,
)
from kvoffload.types import HASH_BYTES
from kvoffload.units import MIB

_TICKET_BYTES = 8
LONG_BLOCKS = 4096
"""An acquire or a publish of more than these takes half a millisecond and longer."""

LONG_BYTES = 16 * MIB
"""Of records whose digests a publish leaves to the server: it reads them, which takes a millisecond and longer."""

BlockMessage: TypeAlias = Acquire | AcquireEntries | Credits | Publish | Abort | Release | Invalidate


class LongPublish:
    """Called on any thread, and then told on the core's."""

    def __init__(
        self, publish: Callable[[Callable[[bytes, bytes], None]], Error | None], tell: Callable[[bytes, bytes], None]
    ) -> None:
        self._publish = publish
        self._tell = tell
        self._stored: list[tuple[bytes, bytes]] = []

    def __call__(self) -> Error | None:
        return self._publish(lambda hashes, parents: self._stored.append((hashes, parents)))

    def tell(self) -> None:
        """What has become readable."""
        for hashes, parents in self._stored:
            self._tell(hashes, parents)


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
    ) -> ServerMessage | Callable[[], ServerMessage | None] | None:
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
                publish = partial(block_calls.publish, cache, session, registration, message)
                tell = partial(self._tell_stored, space, message.group)
                is_long = len(message.tickets) > LONG_BLOCKS * _TICKET_BYTES
                is_long |= _digested_bytes(registration, message) > LONG_BYTES
                return LongPublish(publish, tell) if is_long else publish(tell)
            case Abort():
                block_calls.abort(cache, session, message)
            case Release():
                block_calls.release(cache, session, message)
            case Invalidate():
                block_calls.invalidate(cache, message)
                self._tell_forgotten(space, message.group, message.hashes)
        return None


def _digested_bytes(registration: Registration, message: Publish) -> int:
    """Of the records that the cache has to read for a publish."""
    if message.digests:
        return 0
    records = len(message.tickets) // _TICKET_BYTES * (message.more_shards + 1)
    return records * registration.register.groups[message.group].record_bytes
