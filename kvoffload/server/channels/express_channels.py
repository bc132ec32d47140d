"""The server's express channels: opened and ended by the event loop, served by native threads beside it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvoffload import native
from kvoffload.cache import StoredBlocks
from kvoffload.protocol import limits
from kvoffload.server.event_feed import Space
from kvoffload.server.outbox import OpenExpress
from kvoffload.server.shares import has_shares
from kvoffload.units import GIB, MIB

MAX_CHANNELS = 2048
"""At a time, a thread each; no user and no domain gets all."""
MAX_LOGGED = 65_536
"""Blocks that were stored and not told yet. Beyond it they are only counted."""
MAX_MESSAGE_BYTES = GIB
"""Of all channels, for messages that have come in part and answers that are not read yet, where these are long."""
_SOCKET_BYTES = MIB
"""What may lie in a socket, in each direction, as far as the machine permits."""


class ExpressChannels:
    """Belongs to the thread of the event loop, which watches `fileno` and then calls `take_stored`."""

    def __init__(self, *, boot_id: int) -> None:
        self._server = native.ExpressServer(
            boot_id=boot_id,
            frame_bytes=limits.FRAME_BYTES,
            blocks=limits.MAX_BLOCKS,
            batch=limits.MAX_BATCH,
            leases=limits.MAX_LEASES,
            shards=limits.MAX_SHARDS,
            channels=MAX_CHANNELS,
            logged=MAX_LOGGED,
            message_bytes=MAX_MESSAGE_BYTES,
        )
        self._by_lifeline: dict[int, tuple[int, OpenExpress]] = {}
        self._owners: dict[Space, int] = {}

    def fileno(self) -> int:
        """Readable when blocks were stored that somebody wants to hear of."""
        return self._server.log_file()

    def open(self, wanted: OpenExpress, cache: native.Cache) -> int | None:
        """The process's end, which is the caller's from here on. None: there are too many, of all or of its owner."""
        if not self._has_room(wanted):
            return None
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            return None
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        channel = self._server.open(
            end=ours.detach(),
            cache=cache,
            session=wanted.session,
            cache_session=wanted.cache_session,
            name_space=wanted.space.name_space,
            tenant=wanted.tenant,
            tenants=list(wanted.tenants),
            owner=self._owners.setdefault(wanted.space, len(self._owners)),
            user=wanted.owner,
        )
        if not channel:
            theirs.close()
            return None
        self._by_lifeline[wanted.lifeline] = channel, wanted
        return theirs.detach()

    def end(self, lifeline: int) -> None:
        """The process is served nothing more this way."""
        channel, _ = self._by_lifeline.pop(lifeline, (None, None))
        if channel is not None:
            self._server.end(channel)

    def tick(self) -> None:
        """Is called now and then: lets go of channels that have ended."""
        self._server.tick()

    def call_times(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Returns by call: counts by bucket, and all nanoseconds."""
        return self._server.call_times()

    def refusals(self) -> dict[int, int]:
        """How many calls got an error for an answer, by its code."""
        return self._server.refusals()

    def start_drain(self) -> None:
        """Begins to end: nothing new is taken, and what is held is taken back."""
        self._server.start_drain()

    def watch_stored(self, is_wanted: bool) -> None:
        """Whether somebody wants to hear of blocks that are stored."""
        self._server.watch_stored(is_wanted)

    def take_stored(
        self,
        tell: Callable[[Space, StoredBlocks], None],
        tell_forgotten: Callable[[Space, int, bytes], object],
        tell_lost: Callable[[int], None],
    ) -> None:
        """Tells what was stored, and what is to be forgotten, since the last time; in that order."""
        spaces = list(self._owners)
        stored, lost = self._server.take_stored()
        for owner, group, hashes, parents, is_forgotten in stored:
            if is_forgotten:
                tell_forgotten(spaces[owner], group, hashes)
            else:
                tell(spaces[owner], StoredBlocks(group, hashes, parents))
        if lost:
            tell_lost(lost)

    def _has_room(self, wanted: OpenExpress) -> bool:
        others = [other for _, other in self._by_lifeline.values()]
        of_owner = sum(other.owner == wanted.owner for other in others)
        of_domain = sum(other.space.domain == wanted.space.domain for other in others)
        return has_shares(of_owner, of_domain, total=len(others), limit=MAX_CHANNELS)

    def close(self) -> None:
        """Waits for what is being served."""
        self._server.close()
