"""A bucket as its server sees it: a process of its own asks the store, and only this process knows the library.

An answer that ends the library, a leak in it, and a call that hangs are the end of that process, which is a fault of
the store like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, Final

import numpy as np

from kvoffload.tiers import store_child
from kvoffload.tiers.record_store import StoreFaultError, Value, fill_slot
from kvoffload.tiers.s3_bucket import PART_BYTES, REQUESTS, Level, Ranges, S3Access
from kvoffload.tiers.s3_index import ListedIndex
from kvoffload.tiers.store_process import StoreProcess
from kvoffload.units import MIB

LIBRARY: Final = store_child.Library(module="kvoffload.tiers.s3_child", data_bytes=256 * MIB, data_per_shared=4)
_LISTS: Final = 16
"""Requests for which a listing of one level has time: one for each 1,000 objects."""
_SPARE_S: Final = 1.0
"""Time in seconds that the process has for an answer beyond its requests' deadlines."""


class S3Client:
    """The process that asks a bucket for one thread. Its calls raise StoreFaultError where the store cannot be asked
    now. What they return of objects lies in shared memory and is valid until the next `begin`."""

    def __init__(self, settings: S3Access) -> None:
        """Starts the process. StoreFaultError: it cannot be had."""
        self._call_timeout_s = settings.call_timeout_s
        self._used = 0
        self._process = StoreProcess(LIBRARY, "the S3 client")
        access = {name: getattr(settings, name) for name in ("endpoint", "region", "ca_certificates", "call_timeout_s")}
        try:
            self._process.ask(
                store_child.START_S,
                "setup",
                access,
                asdict(settings.address),
                asdict(settings.keys) if settings.keys else None,
            )
        except StoreFaultError:
            self.close()
            raise

    def begin(self) -> None:
        """Begins a use of the bucket, which may have several calls."""
        self._used = 0

    def close(self) -> None:
        self._process.close()

    # ---- questions ----

    def has(self, paths: Sequence[str]) -> list[bool]:
        return [is_there is True for is_there in self._process.ask_each(self._wait(len(paths)), "has", list(paths))]

    def get(self, paths: Sequence[str], limit_bytes: int) -> list[memoryview | None]:
        """Reads objects; of a longer one its beginning."""
        if not paths:
            return []
        place, room = self._take(limit_bytes * len(paths))
        parts = -(-limit_bytes // PART_BYTES)
        sizes = self._process.ask_each(self._wait(parts * len(paths)), "get", list(paths), limit_bytes, place)
        rows = range(0, len(room), limit_bytes)
        return [
            None if size == -1 else room[row : row + self._check(size, limit_bytes)]
            for row, size in zip(rows, sizes, strict=True)
        ]

    def get_head(self, paths: Sequence[str], size_bytes: int) -> list[memoryview | None]:
        """Reads the first bytes of objects."""
        wanted = [Ranges(path=path, starts=[0], sizes=[size_bytes]) for path in paths]
        return [None if found is None else found[0] for found in self.get_ranges(wanted)]

    def get_ranges(self, wanted: Sequence[Ranges]) -> list[list[memoryview] | None]:
        """Reads ranges of objects. None where the object is gone; less where it is shorter."""
        if not wanted:
            return []
        place, room = self._take(sum(sum(one.sizes) for one in wanted))
        requests = sum(len(one.starts) for one in wanted)
        asked = [(one.path, list(one.starts), list(one.sizes)) for one in wanted]
        answers = self._process.ask_each(self._wait(requests), "get_ranges", asked, place)
        found: list[list[memoryview] | None] = []
        end = 0
        for one, lengths in zip(wanted, answers, strict=True):
            *starts, end = accumulate(one.sizes, initial=end)
            if lengths is None:
                found.append(None)
                continue
            checked = map(self._check, self._list(lengths, len(starts)), one.sizes)
            found.append([room[start : start + size] for start, size in zip(starts, checked, strict=True)])
        return found

    def get_version(self, path: str, limit_bytes: int) -> tuple[bytearray, str] | None:
        """Returns all of an object, and its version. None: it is gone, or longer than `limit_bytes`."""
        place, room = self._take(limit_bytes)
        found = self._process.ask(self._wait(1), "get_version", path, limit_bytes, place)
        if found is None:
            return None
        size, e_tag = self._list(found, 2)
        return bytearray(room[: self._check(size, limit_bytes)]), str(e_tag)

    def list_level(self, path: str) -> Level:
        told = self._process.ask(self._wait(_LISTS * REQUESTS), "list_level", path)
        try:
            objects, folders = told
            return Level(
                objects=[
                    ListedIndex(path=str(path), size_bytes=int(size), changed=datetime.fromtimestamp(changed, UTC))
                    for path, size, changed in objects
                ],
                folders=set(map(str, folders)),
            )
        except (TypeError, ValueError, OverflowError, OSError) as fault:
            raise self._process.complain() from fault

    def list_after(self, path: str, after: str, limit: int) -> list[tuple[str, int]]:
        """Returns up to `limit` objects at all levels of the path that come after `after`, with their sizes."""
        told = self._process.ask(self._wait(1), "list_after", path, after, limit)
        if not isinstance(told, list):
            raise self._process.complain()
        try:
            return [(str(path), int(size)) for path, size in told]
        except (TypeError, ValueError) as fault:
            raise self._process.complain() from fault

    # ---- changes ----

    def put_new(self, objects: Sequence[tuple[str, Sequence[Value]]]) -> list[bool]:
        """Puts objects. One that is there stays as it is, and counts as put. False: it is refused."""
        asked = [(path, *self._store(parts)) for path, parts in objects]
        requests = sum(-(-size // PART_BYTES) for _, _, size in asked)
        return [is_put is True for is_put in self._process.ask_each(self._wait(requests), "put_new", asked)]

    def put_version(self, path: str, data: Value, e_tag: str) -> str | None:
        """Replaces the version `e_tag` of an object, or creates it if that is empty, and returns the new version. None:
        the object has another version by now, or the put is refused."""
        told = self._process.ask(self._wait(1), "put_version", path, *self._store([data]), e_tag)
        return None if told is None else str(told)

    def delete(self, paths: Sequence[str]) -> list[bool]:
        """Deletes objects. False: it is refused. An object that was not there counts as deleted."""
        return [is_gone is True for is_gone in self._process.ask_each(self._wait(len(paths)), "delete", list(paths))]

    # ---- inside ----

    def _wait(self, requests: int) -> float:
        """Returns the time in seconds in which so many requests end: each has one deadline, REQUESTS are under way at
        once, and a request that fails may be followed by one more."""
        return (-(-requests // REQUESTS) + 1) * self._call_timeout_s + _SPARE_S

    def _take(self, size_bytes: int) -> tuple[int, memoryview]:
        """Returns shared memory that this use has not taken yet, and its place."""
        place, self._used = self._used, self._used + size_bytes
        return place, self._process.take(self._wait(0), self._used)[place:].data

    def _store(self, parts: Sequence[Value]) -> tuple[int, int]:
        """Copies parts to shared memory, behind each other. Returns their place and length."""
        sizes = list(map(len, parts))
        place, room = self._take(sum(sizes))
        begin = np.frombuffer(room, np.uint8).ctypes.data
        for at, part in zip(accumulate(sizes, initial=begin), parts, strict=False):
            fill_slot(at, memoryview(part))
        return place, sum(sizes)

    def _check(self, size: Any, most: int) -> int:
        if not isinstance(size, int) or not 0 <= size <= most:
            raise self._process.complain()
        return size

    def _list(self, told: Any, length: int) -> list[Any]:
        if not isinstance(told, list) or len(told) != length:
            raise self._process.complain()
        return told
