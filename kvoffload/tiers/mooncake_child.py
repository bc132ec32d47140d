"""Mooncake's client in a process of its own: its calls cannot be interrupted, and some stop all of Python."""

from __future__ import annotations

import mmap
from ctypes import addressof, c_char
from typing import Any

from kvoffload.tiers.store_child import Verbs


def load(memory_fd: int) -> Verbs:
    """Loads the library, and returns the commands. ImportError: it is not there."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as fault:
        raise ImportError(f"Mooncake's client cannot be loaded: {fault}") from fault
    return Child(MooncakeDistributedStore(), memory_fd).verbs


class Child:
    """One client, and the memory that is registered with it."""

    def __init__(self, client: Any, memory_fd: int) -> None:
        self._client = client
        self._memory_fd = memory_fd
        self._view: Any = None
        self._address = 0
        self.verbs: Verbs = {
            "setup": self.setup,
            "map": self.map,
            "put": self.put,
            "get": self.get,
            "look": client.batch_is_exist,
            "remove": lambda keys: self._client.batch_remove(keys, True),
        }

    def setup(self, host: str, metadata: str, protocol: str, device: str, master: str) -> int:
        return int(self._client.setup(host, metadata, 0, 16 << 20, protocol, device, master))

    def map(self, size_bytes: int) -> int:
        """Maps the shared memory, which has a new size."""
        if self._address:
            self._client.unregister_buffer(self._address)
        self._view = (c_char * size_bytes).from_buffer(mmap.mmap(self._memory_fd, size_bytes))
        self._address = addressof(self._view)
        return int(self._client.register_buffer(self._address, size_bytes))

    def put(self, keys: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        return list(self._client.batch_put_from(keys, self._places(offsets), sizes))

    def get(self, keys: list[str], offsets: list[int], size_bytes: int) -> list[int]:
        return list(self._client.batch_get_into(keys, self._places(offsets), [size_bytes] * len(keys)))

    def _places(self, offsets: list[int]) -> list[int]:
        return [self._address + offset for offset in offsets]
