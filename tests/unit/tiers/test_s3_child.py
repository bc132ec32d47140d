"""Objects of a bucket land where the parent wants them, and nothing else is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest

from kvoffload.tiers import s3_child
from kvoffload.tiers.s3_bucket import Ranges
from kvoffload.tiers.s3_child import S3Child, load


class Bucket:
    """A bucket with an object at each path that is a word."""

    async def get(
        self, paths: Sequence[str], limit_bytes: int, take: Callable[[int, memoryview], int]
    ) -> list[int | None]:
        values = [memoryview(path.encode() * 3)[:limit_bytes] for path in paths]
        return [take(at, value) if value else None for at, value in enumerate(values)]

    async def get_ranges(self, wanted: Sequence[Ranges]) -> list[list[memoryview] | None]:
        found = []
        for one in wanted:
            data = memoryview(one.path.encode())
            parts = [data[start : start + size] for start, size in zip(one.starts, one.sizes, strict=True)]
            found.append(parts if one.path else None)
        return found

    async def put_new(self, objects: Sequence[tuple[str, Sequence[memoryview]]]) -> list[bool]:
        return [path.encode() == b"".join(parts) for path, parts in objects]


def test_each_object_lands_in_its_place() -> None:
    memory = os.memfd_create("test")
    os.ftruncate(memory, 4096)
    child = S3Child(memory)
    child.bucket = Bucket()  # type: ignore[assignment]
    child.map(4096)
    assert child.get(["ab", "", "cde"], 7, 10) == [6, -1, 7]
    assert os.pread(memory, 23, 9) == b"\0ababab\0" + bytes(7) + b"cdecdec\0"
    ranges = [("abcdef", [2, 5, 9], [3, 4, 2]), ("", [0], [5]), ("xyz", [0], [3])]
    assert child.get_ranges(ranges, 100) == [[3, 1, 0], None, [3]]
    assert os.pread(memory, 18, 100) == b"cdef" + bytes(3 + 2 + 5) + b"xyz\0"
    os.pwrite(memory, b"a value", 200)
    assert child.put_new([("a value", 200, 7), ("value", 202, 5), ("another", 200, 7)]) == [True, True, False]
    os.close(memory)


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_child, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"obstore is not installed: pip install obstore"):
        load(0)
