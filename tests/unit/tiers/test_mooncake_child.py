"""The process moves what it is told to, between its client and memory that is shared."""

from __future__ import annotations

import os
import sys

import pytest

from kvoffload.tiers.mooncake_child import Child, load


class Client:
    """A stand-in for Mooncake's client, with one value."""

    def __init__(self) -> None:
        self.value = b""
        self.told: list[tuple[object, ...]] = []

    def setup(self, *words: object) -> int:
        self.told.append(words)
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        self.told.append(("register", size))
        return 0

    def unregister_buffer(self, address: int) -> int:
        self.told.append(("unregister",))
        return 0

    def batch_put_from(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        import ctypes

        self.value = ctypes.string_at(places[0], sizes[0])
        return [0]

    def batch_get_into(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        import ctypes

        ctypes.memmove(places[0], self.value, len(self.value))
        return [len(self.value)]

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [1 for _ in keys]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [0 if force else -706 for _ in keys]


def test_records_go_through_memory_that_is_shared() -> None:
    client = Client()
    memory = os.memfd_create("test")
    child = Child(client, memory)
    assert child.verbs["setup"]("here", "P2PHANDSHAKE", "tcp", "", "far:1") == 0
    assert client.told[0][2] == 0, "it offers no memory of its own"
    os.ftruncate(memory, 8192)
    assert child.verbs["map"](4096) == 0
    assert child.verbs["map"](8192) == 0
    assert client.told[1:] == [("register", 4096), ("unregister",), ("register", 8192)]
    os.pwrite(memory, b"a record", 100)
    assert child.verbs["put"](["key"], [100], [8]) == [0]
    assert child.verbs["get"](["key"], [5000], 8) == [8]
    assert os.pread(memory, 8, 5000) == b"a record"
    assert (child.verbs["look"](["key"]), child.verbs["remove"](["key"])) == ([1], [0])
    os.close(memory)


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ImportError, match="Mooncake's client cannot be loaded: "):
        load(0)
