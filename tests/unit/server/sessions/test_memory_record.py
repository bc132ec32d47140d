"""A successor may take memory that servers of the same path have recorded, and none whose number was guessed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.server.sessions.memory_record import MAX_SERVERS, MemoryRecord


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_where_nothing_was_recorded_any_memory_may_be_the_domains(file: int) -> None:
    assert MemoryRecord(file).admits("main", 5)


def test_only_memory_of_servers_of_the_same_path_is_the_domains(file: int) -> None:
    MemoryRecord(file).add("main", 5)
    MemoryRecord(file).add("main", 6)
    MemoryRecord(file).add("other", 7)
    record = MemoryRecord(file)
    assert [record.admits("main", boot_id) for boot_id in (5, 6, 7)] == [True, True, False]
    assert [record.admits("other", boot_id) for boot_id in (5, 7)] == [False, True]
    assert record.admits("new", 5)


def test_a_server_counts_once_and_the_oldest_are_forgotten(file: int) -> None:
    for boot_id in (1, *range(1, MAX_SERVERS + 2)):
        MemoryRecord(file).add("main", boot_id)
    record = MemoryRecord(file)
    assert [record.admits("main", boot_id) for boot_id in (1, 2, MAX_SERVERS + 1)] == [False, True, True]


def test_it_is_new_until_a_server_has_recorded_something(file: int) -> None:
    record = MemoryRecord(file)
    assert record.is_new
    record.add("main", 5)
    assert not MemoryRecord(file).is_new


def test_a_shorter_line_over_a_longer_one_is_read_whole(file: int) -> None:
    """A server that is killed before it has cut the file leaves such a line."""
    os.pwrite(file, b'{"main": [5]}\n, 6, 7, 8]}\n', 0)
    record = MemoryRecord(file)
    assert (record.admits("main", 5), record.admits("main", 6)) == (True, False)


@pytest.mark.parametrize(
    "text", [b"nonsense\n", b"[]\n", b'{"main": 5}\n', b'{"main": ["x"]}\n', b"\xff\n", b"[" * 9999]
)
def test_what_cannot_be_read_is_told_and_not_asked(file: int, text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    os.pwrite(file, text, 0)
    record = MemoryRecord(file)
    assert record.admits("main", 5)
    assert not record.is_new
    assert "cannot be read" in caplog.text
    record.add("main", 6)
    assert not MemoryRecord(file).admits("main", 5)
