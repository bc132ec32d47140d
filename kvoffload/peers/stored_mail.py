"""What links have stored, on its way to the server's loop."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import NamedTuple

from kvoffload.peers.space_book import PeerSpace
from kvoffload.types import HASH_BYTES

MAX_BLOCKS = 65_536
"""Not taken yet. Beyond it they are only counted."""


class StoredBlocks(NamedTuple):
    """Of one group; in `domain` by its name."""

    domain: str
    space: PeerSpace
    group: int
    hashes: bytes
    parents: bytes


class StoredMail:
    """Safe to use from any thread. The loop watches `fileno` and then calls `take`."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._blocks: list[StoredBlocks] = []
        self._count = 0
        self._lost = 0

    def fileno(self) -> int:
        return self._event

    def send(self, blocks: StoredBlocks) -> None:
        """They became readable."""
        count = len(blocks.hashes) // HASH_BYTES
        with self._lock:
            if self._count + count > MAX_BLOCKS:
                self._lost += count
            else:
                self._blocks.append(blocks)
                self._count += count
            os.eventfd_write(self._event, 1)

    def take(self) -> tuple[list[StoredBlocks], int]:
        """What has come since the last time, and how many blocks were lost."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._lock:
            blocks, self._blocks = self._blocks, []
            lost, self._lost, self._count = self._lost, 0, 0
        return blocks, lost

    def close(self) -> None:
        os.close(self._event)
