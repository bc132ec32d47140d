"""A tier that keeps records in the memory of the server's own process: an example of a tier of your own.

A store that other machines use too would have a client of that store where this one has a dictionary.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self

from kvoffload.config.settings import Settings
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import Key, StoreFacts, Value
from kvoffload.tiers.remote import RemotePlace, RemoteTier, RemoteTierSettings
from kvoffload.units import format_size, parse_size

PAGE = 64
"""Records that one call of `scan` lists."""


class MemoryPlace(RemotePlace):
    """The place of the tier, which `custom_tier = "memory_tier:MemoryPlace"` names."""

    def __init__(self, capacity_bytes: int, *, connections: int, coding: Coding) -> None:
        self._records = Records(capacity_bytes)
        self._connections = connections
        self._coding = coding

    @classmethod
    def from_settings(cls, settings: Settings, where: str) -> Self:
        """Reads the capacity from `custom_tier_place`, such as "8GiB". ValueError: it is no size."""
        coding = Coding(settings.remote_compress)
        return cls(parse_size(where), connections=settings.remote_connections, coding=coding)

    def describe(self) -> str:
        return f"{format_size(self._records.capacity_bytes)} of the server's own memory"

    def open_tier(self) -> RemoteTier:
        """Opens the tier, whose threads each call `open_store` for a connection of their own."""
        settings = RemoteTierSettings(
            place=self.describe(),
            open_store=lambda: MemoryStore(self._records),
            connections=self._connections,
            coder=RecordCoder(self._coding),
        )
        return RemoteTier(settings)

    def find_remedy(self, reason: str) -> str:
        return "free memory on this machine"


class Records:
    """The values that all connections share. When there is no room, the ones that were put first are dropped."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.lock = threading.Lock()
        self.values: dict[Key, bytes] = {}

    def put(self, key: Key, value: bytes) -> bool:
        """Keeps a value. Returns False if it is larger than the capacity."""
        if len(value) > self.capacity_bytes:
            return False
        with self.lock:
            self.drop(key)
            while self.used_bytes + len(value) > self.capacity_bytes:
                self.drop(next(iter(self.values)))
            self.values[key] = value
            self.used_bytes += len(value)
        return True

    def drop(self, key: Key) -> bool:
        """Removes a value while the caller has the lock. Returns whether it was there."""
        value = self.values.pop(key, None)
        self.used_bytes -= len(value or b"")
        return value is not None


class MemoryStore:
    """One connection, which belongs to one thread. A store that cannot be asked raises `StoreFaultError`: the tier is
    absent then, and opens another connection after a while. Here nothing can fail."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def put(self, keys: Sequence[Key], values: Sequence[Sequence[Value]]) -> list[bool]:
        """Keeps values, each of which comes in parts. The parts are only valid during this call."""
        return [self._records.put(key, b"".join(parts)) for key, parts in zip(keys, values, strict=True)]

    def get(self, keys: Sequence[Key], limit_bytes: int) -> list[memoryview | None]:
        """Returns the values that are there. The tier verifies them, so wrong bytes are a miss and never a hit."""
        found = [self._records.values.get(key) for key in keys]
        return [None if value is None else memoryview(value)[:limit_bytes] for value in found]

    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]:
        return [key in self._records.values for key in keys]

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        with self._records.lock:
            return [self._records.drop(key) for key in keys]

    def scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        """Lists the beginnings of some values, and returns where to go on; 0 at the end."""
        with self._records.lock:
            values = list(self._records.values.values())
        end = cursor + PAGE
        return end if end < len(values) else 0, [value[:head_bytes] for value in values[cursor:end]]

    def probe(self) -> StoreFacts:
        """Returns the figures of the store. The tier calls this now and then to see whether the store is there."""
        with self._records.lock:
            return StoreFacts(
                capacity_bytes=self._records.capacity_bytes,
                used_bytes=self._records.used_bytes,
                values=len(self._records.values),
            )

    def close(self) -> None:
        """Closes the connection. The values stay for the others."""
