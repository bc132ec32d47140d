"""Messages of links for the server's loop: blocks that they have stored or removed, or want from slower tiers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from kvoffload.peers.space_table import PeerSpace
from kvoffload.types import HASH_BYTES

MAX_BLOCKS = 65_536
"""The most blocks that wait for the loop. Beyond it stored ones are only counted; other requests are refused."""
TAKEN_BLOCKS = 4096
"""The most blocks that one `take` returns: as many as one request of a link may have."""
REMOVED_BLOCKS = 32
"""Number of blocks in a part of RemovedBlocks. A part counts as a quarter of TAKEN_BLOCKS, because each of its blocks
may have 16 records in each of several tiers."""


@dataclass(frozen=True, kw_only=True)
class LinkBlocks:
    """Blocks of one group, by their hashes; `domain` is a name."""

    domain: str
    space: PeerSpace
    group: int
    hashes: bytes

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def cost(self) -> int:
        """The part of TAKEN_BLOCKS that this takes."""
        return len(self)


@dataclass(frozen=True, kw_only=True)
class PutBlocks(LinkBlocks):
    """Blocks that became readable."""

    parents: bytes


@dataclass(frozen=True, kw_only=True)
class AwaitedBlocks(LinkBlocks):
    """Blocks with which a link waits for the loop to do something. `is_done`: False if it could not."""

    is_done: Future[bool] = field(default_factory=Future)

    def wait(self, timeout_s: float) -> bool:
        """Waits, and returns whether it is done by then."""
        try:
            return self.is_done.result(timeout_s)
        except TimeoutError:
            return False


@dataclass(frozen=True, kw_only=True)
class RemovedBlocks(AwaitedBlocks):
    """Blocks that must not be trusted, wherever they are, or a part of them."""

    is_last: bool = True
    """Whether no other part follows. All parts have `is_done` in common."""

    @property
    def cost(self) -> int:
        return TAKEN_BLOCKS // 4

    def cut(self) -> list[RemovedBlocks]:
        """Returns the parts, each with at most REMOVED_BLOCKS blocks."""
        size = REMOVED_BLOCKS * HASH_BYTES
        firsts = range(0, max(len(self.hashes), 1), size)
        return [
            replace(self, hashes=self.hashes[first : first + size], is_last=first == firsts[-1]) for first in firsts
        ]

    def end_part(self, *, is_right: bool) -> None:
        """Answers the link after the last part, or after one that failed."""
        if (self.is_last or not is_right) and not self.is_done.done():
            self.is_done.set_result(is_right)


@dataclass(frozen=True, kw_only=True)
class WantedBlocks(AwaitedBlocks):
    """Blocks that lie in slower tiers and are wanted in memory."""

    wait_s: float


class LoopQueue:
    """Safe to use from any thread. The loop watches `fileno` and then calls `take`."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._blocks: deque[LinkBlocks] = deque()
        self._count = 0
        self._lost = 0
        self._is_refusing = False

    def fileno(self) -> int:
        return self._event

    @property
    def has_more(self) -> bool:
        """Whether `take` has something to return."""
        with self._lock:
            return bool(self._blocks or self._lost)

    def send(self, blocks: LinkBlocks) -> None:
        """Adds blocks for the loop. Those that cannot be taken are refused at once, so that no link waits for them."""
        parts = blocks.cut() if isinstance(blocks, RemovedBlocks) else [blocks]
        with self._lock:
            is_taken = not self._is_refusing and self._count + len(blocks) <= MAX_BLOCKS
            if is_taken:
                self._blocks.extend(parts)
                self._count += len(blocks)
            elif isinstance(blocks, PutBlocks):
                self._lost += len(blocks)
            os.eventfd_write(self._event, 1)
        if not is_taken:
            _refuse(blocks)

    def take(self) -> tuple[list[LinkBlocks], int]:
        """Returns the next blocks in the order in which they came, at most TAKEN_BLOCKS or what came first. `fileno`
        stays readable while there are more. With the last ones it returns how many were lost."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._lock:
            taken: list[LinkBlocks] = []
            left = TAKEN_BLOCKS
            while self._blocks and (not taken or self._blocks[0].cost <= left):
                taken.append(self._blocks.popleft())
                left -= taken[-1].cost
                self._count -= len(taken[-1])
            if self._blocks:
                os.eventfd_write(self._event, 1)
                return taken, 0
            lost, self._lost = self._lost, 0
        return taken, lost

    def refuse(self) -> None:
        """Refuses everything from here on. The loop takes nothing any more, so no link should wait for it."""
        with self._lock:
            self._is_refusing = True
            blocks, self._blocks = self._blocks, deque()
        for one in blocks:
            _refuse(one)

    def close(self) -> None:
        os.close(self._event)


def _refuse(blocks: LinkBlocks) -> None:
    if isinstance(blocks, AwaitedBlocks) and not blocks.is_done.done():
        blocks.is_done.set_result(False)
