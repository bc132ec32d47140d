"""What links have for the server's loop: blocks that they have stored or removed, and those they want from below."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field

from kvoffload.peers.space_book import PeerSpace
from kvoffload.types import HASH_BYTES

MAX_BLOCKS = 65_536
"""Not taken yet. Beyond it they are only counted, and nothing is brought up."""


@dataclass(frozen=True, kw_only=True)
class LinkBlocks:
    """Of one group; in `domain` by its name."""

    domain: str
    space: PeerSpace
    group: int
    hashes: bytes

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES


@dataclass(frozen=True, kw_only=True)
class StoredBlocks(LinkBlocks):
    """They became readable."""

    parents: bytes


@dataclass(frozen=True, kw_only=True)
class RemovedBlocks(LinkBlocks):
    """They are not to be trusted, wherever they are."""


@dataclass(frozen=True, kw_only=True)
class WantedBlocks(LinkBlocks):
    """They lie below memory. `is_over`: they have come, or will not."""

    wait_s: float
    is_over: threading.Event = field(default_factory=threading.Event)


class LoopMail:
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
        """What is wanted and cannot be taken is over at once."""
        is_wanted = isinstance(blocks, WantedBlocks)
        with self._lock:
            if self._is_refusing or self._count + len(blocks) > MAX_BLOCKS:
                self._lost += 0 if is_wanted else len(blocks)
            else:
                self._blocks.append(blocks)
                self._count += len(blocks)
                is_wanted = False
            os.eventfd_write(self._event, 1)
        if is_wanted:
            assert isinstance(blocks, WantedBlocks)
            blocks.is_over.set()

    def take(self) -> tuple[list[LinkBlocks], int]:
        """What has come since the last time, in its order, and how many blocks were lost."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._lock:
            blocks, self._blocks = self._blocks, []
            lost, self._lost, self._count = self._lost, 0, 0
        return blocks, lost

    def refuse(self) -> None:
        """From here on the loop takes nothing: nobody is to wait for it."""
        with self._lock:
            self._is_refusing = True
            blocks, self._blocks = self._blocks, []
        for one in blocks:
            if isinstance(one, WantedBlocks):
                one.is_over.set()

    def close(self) -> None:
        os.close(self._event)
