"""The server's express channels: the event loop opens and ends them, and a native thread serves each one."""

from __future__ import annotations

import logging
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from kvoffload import native
from kvoffload.cache import StoredBlocks
from kvoffload.packets import refuse_descriptors
from kvoffload.protocol import limits
from kvoffload.server.channels.open_files import count_processes
from kvoffload.server.common.shares import has_shares
from kvoffload.server.common.thread_limit import count_spare
from kvoffload.server.sessions.event_feed import Space
from kvoffload.server.sessions.outbox import OpenExpress
from kvoffload.types import HASH_BYTES
from kvoffload.units import GIB, MIB

logger = logging.getLogger(__name__)

MAX_CHANNELS = 2048
"""Number of channels at a time, where the limits of threads allow as many. Each channel has a thread. No user and no
domain gets all."""
MAX_LOGGED = 65_536
"""Number of stored blocks that may wait until the event loop takes them. Further ones are only counted."""
TOLD_BLOCKS = 4096
"""Number of stored blocks that one call of `take_stored` reports, rounded up to a whole part."""
PART_BLOCKS = 1024
"""Number of stored blocks in a part."""
FORGOTTEN_BLOCKS = 32
"""Number of blocks to forget in a part. It counts as TOLD_BLOCKS stored ones, because each of its blocks may have 16
records in each of several tiers."""
MAX_MESSAGE_BYTES = GIB
"""Bytes, for all channels together, of long messages that have come in part and long answers that are not read yet."""
_SOCKET_BYTES = MIB
"""Bytes that may lie in a socket in each direction, as far as the machine permits."""


def count_channels(root: Path = Path("/")) -> int:
    """Returns how many channels there may be at a time, by the limits of threads and descriptors that bind this process
    now. `root` is where `proc` and `sys` are."""
    return min(MAX_CHANNELS, count_spare(root), count_processes())


class ExpressChannels:
    """Belongs to the thread of the event loop, which watches `fileno` and then calls `take_stored`."""

    def __init__(self, *, boot_id: int) -> None:
        self.limit = count_channels()
        """Number of channels at a time, of which each user and each domain has a share."""
        if self.limit < MAX_CHANNELS:
            logger.info("the limits of threads and open files leave room for %d express channels", self.limit)
        self._server = native.ExpressServer(
            boot_id=boot_id,
            frame_bytes=limits.FRAME_BYTES,
            blocks=limits.MAX_BLOCKS,
            batch=limits.MAX_BATCH,
            leases=limits.MAX_LEASES,
            shards=limits.MAX_SHARDS,
            channels=self.limit,
            logged=MAX_LOGGED,
            message_bytes=MAX_MESSAGE_BYTES,
        )
        self._by_lifeline: dict[int, tuple[int, OpenExpress]] = {}
        self._of_owner: Counter[str] = Counter()
        """Number of channels of each user that has some."""
        self._of_domain: Counter[str] = Counter()
        """Number of channels of each domain that has some."""
        self._owners: dict[Space, int] = {}
        self._domains: dict[str, int] = {}
        self._has_warned = False
        self._untold: deque[tuple[int, int, bytes, bytes, bool]] = deque()
        """Parts of what was stored and is not reported yet, as the native log has them, the oldest first."""
        self._lost = 0
        """Number of blocks that were only counted, to be reported after these parts."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when blocks were stored and subscribers or tiers want to hear of
        them."""
        return self._server.log_file()

    def open(self, wanted: OpenExpress, cache: native.Cache) -> int | None:
        """Opens a channel and returns the process's end of it, which belongs to the caller. None: there are too many,
        in all or of its owner or domain, or there is no descriptor or no thread for it."""
        of_owner, of_domain = self._of_owner[wanted.owner], self._of_domain[wanted.space.domain]
        if not has_shares(of_owner, of_domain, total=len(self._by_lifeline), limit=self.limit):
            return None
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            return None
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        refuse_descriptors(ours)
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
            domain=self._domains.setdefault(wanted.space.domain, len(self._domains)),
        )
        if not channel:
            theirs.close()
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "no thread can be started for an express channel; %d others run: processes that want one are "
                    "refused; raise the limit of threads (ulimit -u, pids.max)",
                    len(self._by_lifeline),
                )
            return None
        self._by_lifeline[wanted.lifeline] = channel, wanted
        self._count(wanted, 1)
        return theirs.detach()

    def end(self, lifeline: int) -> None:
        """Ends the channel of a process, if it has one. No further call is served on it."""
        known = self._by_lifeline.pop(lifeline, None)
        if known is not None:
            channel, wanted = known
            self._server.end(channel)
            self._count(wanted, -1)

    def tick(self) -> None:
        """Lets go of channels that have ended. To be called now and then."""
        self._server.tick()

    def call_times(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Returns for each call how many took how long, by bucket, and the sum in nanoseconds."""
        return self._server.call_times()

    def refusals(self, domain: str) -> dict[int, int]:
        """Returns how many calls of this domain were answered with an error, by its code."""
        number = self._domains.get(domain)
        return {} if number is None else self._server.refusals(number)

    def start_drain(self) -> None:
        """Begins to end: the channels take nothing new, and still serve releases."""
        self._server.start_drain()

    def watch_stored(self, is_wanted: bool) -> None:
        """Sets whether subscribers or tiers want to hear of blocks that are stored."""
        self._server.watch_stored(is_wanted)

    def take_stored(
        self,
        tell: Callable[[Space, StoredBlocks], None],
        tell_forgotten: Callable[[Space, int, bytes], object],
        tell_lost: Callable[[int], None],
    ) -> None:
        """Reports which blocks were stored, and which an engine wants forgotten, in the order of these events: about
        TOLD_BLOCKS, and the others with the next calls, while `has_untold`. `tell_lost` gets the number of blocks that
        were only counted."""
        spaces = list(self._owners)
        if not self._untold:
            stored, self._lost = self._server.take_stored()
            self._untold.extend(part for blocks in stored for part in _cut(*blocks))
        left = TOLD_BLOCKS
        while self._untold and left > 0:
            owner, group, hashes, parents, is_forgotten = self._untold.popleft()
            count = len(hashes) // HASH_BYTES
            if is_forgotten:
                # Tiers have a call for each shard, however few blocks there are.
                left -= max(count, FORGOTTEN_BLOCKS // 4) * TOLD_BLOCKS // FORGOTTEN_BLOCKS
                tell_forgotten(spaces[owner], group, hashes)
            else:
                left -= count
                tell(spaces[owner], StoredBlocks(group, hashes, parents))
        if not self._untold and self._lost:
            lost, self._lost = self._lost, 0
            tell_lost(lost)

    @property
    def has_untold(self) -> bool:
        """Whether `take_stored` has more to report, even if `fileno` is not readable."""
        return bool(self._untold)

    def close(self) -> None:
        """Ends all channels, and waits for calls that are being served."""
        self._server.close()

    def _count(self, wanted: OpenExpress, more: int) -> None:
        for counts, key in ((self._of_owner, wanted.owner), (self._of_domain, wanted.space.domain)):
            counts[key] += more
            if not counts[key]:
                del counts[key]


def _cut(
    owner: int, group: int, hashes: bytes, parents: bytes, is_forgotten: bool
) -> Iterator[tuple[int, int, bytes, bytes, bool]]:
    size = (FORGOTTEN_BLOCKS if is_forgotten else PART_BLOCKS) * HASH_BYTES
    for first in range(0, len(hashes), size):
        yield owner, group, hashes[first : first + size], parents[first : first + size], is_forgotten
