"""A store in a dictionary, which many connections share, and which goes wrong as a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvoffload.tiers.record_store import StoreFacts, StoreFaultError, Value


class Place:
    """State that all connections share. `fault`: the error that answers every request. `gate`: every request waits for
    it."""

    def __init__(self, capacity_bytes: int = 32 << 20) -> None:
        self.capacity_bytes = capacity_bytes
        self.values: dict[bytes, bytes] = {}
        self.lock = threading.Lock()
        self.fault = ""
        self.gate = threading.Event()
        self.gate.set()
        self.opened = self.closed = self.waiting = 0
        self.asked: list[tuple[str, int]] = []
        """The requests: verb and number of keys."""
        self.change: Callable[[bytes], bytes] = bytes
        """Changes each value on its way back."""

    def open(self) -> DictStore:
        if self.fault:
            raise StoreFaultError(self.fault)
        self.opened += 1
        return DictStore(self)

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.values.values()))


class DictStore:
    """A RecordStore over a dictionary."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def _ask(self, verb: str, count: int) -> Place:
        self._place.waiting += 1
        self._place.gate.wait()
        self._place.waiting -= 1
        if self._place.fault:
            raise StoreFaultError(self._place.fault)
        self._place.asked.append((verb, count))
        return self._place

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[Value]]) -> list[bool]:
        place = self._ask("put", len(keys))
        with place.lock:
            for key, parts in zip(keys, values, strict=True):
                value = b"".join(map(bytes, parts))
                while place.values and place.used_bytes + len(value) > place.capacity_bytes:
                    del place.values[next(iter(place.values))]
                place.values[key] = value
        return [True] * len(keys)

    def get(self, keys: Sequence[bytes], limit_bytes: int) -> list[memoryview | None]:
        place = self._ask("get", len(keys))
        found = [place.values.get(key) for key in keys]
        return [None if value is None else memoryview(place.change(value))[:limit_bytes] for value in found]

    def look(self, keys: Sequence[bytes], *, is_use: bool = False) -> list[bool]:
        return [key in self._ask("look", 1).values for key in keys]

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._ask("remove", 1).values.pop(key, None) is not None for key in keys]

    def scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        values = list(self._ask("scan", 0).values.values())
        following = cursor + 8 if cursor + 8 < len(values) else 0
        return following, [value[:head_bytes] for value in values[cursor : cursor + 8]]

    def probe(self) -> StoreFacts:
        place = self._ask("probe", 0)
        with place.lock:
            return StoreFacts(
                capacity_bytes=place.capacity_bytes, used_bytes=place.used_bytes, values=len(place.values)
            )

    def close(self) -> None:
        self._place.closed += 1
