"""A bucket in a process of its own: what is read goes to shared memory, what is put comes from there."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Coroutine, Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, TypeVar

from kvoffload.config.s3_address import S3Address
from kvoffload.s3_keys import S3Keys
from kvoffload.tiers.record_store import Value
from kvoffload.tiers.s3_bucket import Ranges, S3Access, S3Bucket
from kvoffload.tiers.store_child import Verbs

Result = TypeVar("Result")


def load(memory_fd: int) -> Verbs:
    """Loads the library, and returns the commands. ImportError: it is not there."""
    if find_spec("obstore") is None:
        raise ImportError("obstore is not installed: pip install obstore")
    child = S3Child(memory_fd)
    return {
        "setup": child.setup,
        "map": child.map,
        "has": lambda paths: child.run(child.bucket.has(paths)),
        "get": child.get,
        "get_ranges": child.get_ranges,
        "get_version": child.get_version,
        "list_level": child.list_level,
        "list_after": lambda *words: child.run(child.bucket.list_after(*words)),
        "put_new": child.put_new,
        "put_version": child.put_version,
        "delete": lambda paths: child.run(child.bucket.delete(paths)),
    }


class S3Child:
    """One connection's bucket, and the memory that is shared. Places are offsets in that memory."""

    bucket: S3Bucket

    def __init__(self, memory_fd: int) -> None:
        self._memory_fd = memory_fd
        self._memory = memoryview(b"")
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(work)

    def setup(self, access: dict[str, Any], address: dict[str, str], keys: dict[str, str] | None) -> None:
        self.bucket = S3Bucket(S3Access(address=S3Address(**address), keys=S3Keys(**keys) if keys else None, **access))

    def map(self, size_bytes: int) -> None:
        """Maps the shared memory, which has a new size."""
        self._memory = memoryview(mmap.mmap(self._memory_fd, size_bytes))

    def get(self, paths: Sequence[str], limit_bytes: int, place: int) -> list[int]:
        """Reads each object to a row of `limit_bytes`, and returns its length; -1 where there is none."""
        sizes = self.run(
            self.bucket.get(paths, limit_bytes, lambda row, data: self._store(place + row * limit_bytes, data))
        )
        return [-1 if size is None else size for size in sizes]

    def get_ranges(self, wanted: Sequence[tuple[str, list[int], list[int]]], place: int) -> list[list[int] | None]:
        """Reads ranges to places behind each other, each of the length that is wanted; returns their lengths."""
        ranges = [Ranges(path=path, starts=starts, sizes=sizes) for path, starts, sizes in wanted]
        lengths: list[list[int] | None] = []
        for one, found in zip(ranges, self.run(self.bucket.get_ranges(ranges)), strict=True):
            *places, place = accumulate(one.sizes, initial=place)
            lengths.append(None if found is None else list(map(self._store, places, found)))
        return lengths

    def get_version(self, path: str, limit_bytes: int, place: int) -> tuple[int, str] | None:
        found = self.run(self.bucket.get_version(path, limit_bytes))
        return None if found is None else (self._store(place, found[0]), found[1])

    def list_level(self, path: str) -> tuple[list[tuple[str, int, float]], list[str]]:
        level = self.run(self.bucket.list_level(path))
        return [(one.path, one.size_bytes, one.changed.timestamp()) for one in level.objects], list(level.folders)

    def put_new(self, objects: Sequence[tuple[str, int, int]]) -> list[bool]:
        """Puts objects, of which each has a path, a place and a length."""
        return self.run(
            self.bucket.put_new([(path, [self._memory[place : place + size]]) for path, place, size in objects])
        )

    def put_version(self, path: str, place: int, size: int, e_tag: str) -> str | None:
        return self.run(self.bucket.put_version(path, self._memory[place : place + size], e_tag))

    def _store(self, place: int, data: Value) -> int:
        self._memory[place : place + len(data)] = data
        return len(data)
