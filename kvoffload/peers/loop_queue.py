"""Messages of links for the server's loop: blocks that they have stored or removed, or want from slower tiers."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvoffload.peers.space_table import PeerSpace
from kvoffload.types import HASH_BYTES

MAX_BLOCKS = 65_536
"""The most blocks that wait for the loop. Beyond it stored ones are only counted; other requests are refused."""


@dataclass(frozen=True, kw_only=True)
class LinkBlocks:
    """Blocks of one group, by their hashes; `domain` is a name."""

    domain: str
    space: PeerSpace
    group: int
    hashes: bytes

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES


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
    """Blocks that must not be trusted, wherever they are."""


@dataclass(frozen=True, kw_only=True)
class WantedBlocks(AwaitedBlocks):
    """Blocks that lie in slower tiers and are wanted in memory."""

    wait_s: float


class LoopQueue:
    """Safe to use from any thread. The loop watches `fileno` and then calls `take`."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._blocks: list[LinkBlocks] = []
        self._count = 0
        self._lost = 0
        self._is_refusing = False

    def fileno(self) -> int:
        return self._event

    def send(self, blocks: LinkBlocks) -> None:
        """Adds blocks for the loop. Those that cannot be taken are refused at once, so that no link waits for them."""
        with self._lock:
            is_taken = not self._is_refusing and self._count + len(blocks) <= MAX_BLOCKS
            if is_taken:
                self._blocks.append(blocks)
                self._count += len(blocks)
            elif isinstance(blocks, PutBlocks):
                self._lost += len(blocks)
            os.eventfd_write(self._event, 1)
        if not is_taken:
            _refuse(blocks)

    def take(self) -> tuple[list[LinkBlocks], int]:
        """Returns the blocks that have come since the last call, in their order, and how many more were lost."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._lock:
            blocks, self._blocks = self._blocks, []
            lost, self._lost, self._count = self._lost, 0, 0
        return blocks, lost

    def refuse(self) -> None:
        """Refuses everything from here on. The loop takes nothing any more, so no link should wait for it."""
        with self._lock:
            self._is_refusing = True
            blocks, self._blocks = self._blocks, []
        for one in blocks:
            _refuse(one)

    def close(self) -> None:
        os.close(self._event)


def _refuse(blocks: LinkBlocks) -> None:
    if isinstance(blocks, AwaitedBlocks):
        blocks.is_done.set_result(False)
