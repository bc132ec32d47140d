"""A bucket of an S3-compatible object store as a record store.

Large records are objects of their own. Small ones lie behind each other in packs, and index objects say where. How long
either stays is the bucket's business: its lifecycle removes them, and what is gone is a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import Key, StoreFacts, Value
from kvoffload.tiers.remote import RemoteTier, RemoteTierTerms
from kvoffload.tiers.s3_bucket import Ranges, S3Access, S3Bucket
from kvoffload.tiers.s3_index import READ_BYTES, PackIndex, PackPlace, SectionKind, read_sections
from kvoffload.tiers.s3_packs import S3Packs, SmallRecord, is_blank, pack_path
from kvoffload.types import HASH_BYTES
from kvoffload.units import KIB

LAYOUT: Final = "1"
"""The first part of every path."""
WHOLE_BYTES: Final = 256 * KIB
"""A value of at least so many bytes is an object of its own."""

_SPACE_BYTES = HASH_BYTES + 8
"""Of a key: fingerprint, group, shard."""
_SCANNED = 64

Result = TypeVar("Result")
Rows = list[int]
"""Places in a list of keys."""


@dataclass(frozen=True, kw_only=True)
class S3Terms(S3Access):
    """Says how a tier reaches a bucket."""

    connections: int = 4
    compress: Coding = Coding.OFF

    def describe(self) -> str:
        """Describes the bucket in a few words."""
        return f"{self.address} at {self.endpoint}" if self.endpoint else str(self.address)

    def open_tier(self) -> RemoteTier:
        """Opens the tier and starts its threads; the store need not be there."""
        open_store = partial(self.open_store, PackIndex())
        return RemoteTier(
            RemoteTierTerms(
                place=self.describe(),
                open_store=open_store,
                connections=self.connections,
                coder=RecordCoder(self.compress),
            )
        )

    def open_store(self, index: PackIndex | None = None) -> S3Store:
        """Opens a store. StoreFaultError: it cannot be had. `index`: what connections of one tier share."""
        return S3Store(S3Bucket(self), PackIndex() if index is None else index)


class S3Store:
    """Is a RecordStore in a bucket."""

    def __init__(self, bucket: S3Bucket, index: PackIndex) -> None:
        self._bucket = bucket
        self._index = index
        self._loop = asyncio.new_event_loop()
        self._packs = S3Packs(bucket, index)

    def put(self, keys: Sequence[Key], values: Sequence[Sequence[Value]]) -> list[bool]:
        return self._run(self._put(keys, values))

    def get(self, keys: Sequence[Key], limit_bytes: int) -> list[memoryview | None]:
        return self._run(self._get(keys, limit_bytes))

    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]:
        """Says what is there. Nothing lives longer for it."""
        return self._run(self._look(keys))

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        return self._run(self._remove(keys))

    def scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        return self._run(self._scan(cursor, head_bytes))

    def probe(self) -> StoreFacts:
        """It tells nothing of itself, but that it answers this user."""
        self._run(self._bucket.list_level(f"{LAYOUT}/probe"))
        return StoreFacts()

    def close(self) -> None:
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(work)

    # ---- where a record is ----

    async def _search(
        self,
        keys: Sequence[Key],
        ask_packs: Callable[[str, Rows], Awaitable[Rows]],
        ask_whole: Callable[[str, Rows], Awaitable[Rows]],
    ) -> None:
        """Each answers which ones it has not found. What is not where it is known to be may have come since."""
        for space, rows in _by_space(keys):
            left = await ask_packs(space, rows)
            has_asked = bool(left) and self._index.has_whole(space)
            if has_asked:
                left = await ask_whole(space, left)
            if left:
                await self._refresh(space)
                left = await ask_packs(space, left)
            if left and not has_asked and self._index.has_whole(space):
                await ask_whole(space, left)

    async def _refresh(self, space: str) -> None:
        """Learns what others have written: one list, and what is new in index objects."""
        level = await self._bucket.list_level(space)
        self._index.note_whole(space, "record" in level.folders)
        parts = self._index.plan(space, level.objects)
        wanted = [Ranges(path=part.path, starts=[part.start], sizes=[part.end - part.start]) for part in parts]
        for part, found in zip(parts, await self._bucket.get_ranges(wanted), strict=True):
            if found is not None:
                self._index.learn(space, part, found[0])

    async def _look(self, keys: Sequence[Key]) -> list[bool]:
        there = [False] * len(keys)

        async def ask_packs(space: str, rows: Rows) -> Rows:
            places = self._index.find(space, [_hash_of(keys[row]) for row in rows])
            packs = sorted({place.pack for some in places for place in some})
            is_there = dict(zip(packs, await self._bucket.has([pack_path(space, pack) for pack in packs]), strict=True))
            for pack in packs:
                if not is_there[pack]:
                    self._index.forget_pack(space, pack)
            for row, some in zip(rows, places, strict=True):
                there[row] = any(is_there[place.pack] for place in some)
            return [row for row in rows if not there[row]]

        async def ask_whole(space: str, rows: Rows) -> Rows:
            for row, is_there in zip(rows, await self._bucket.has(_whole_paths(keys, rows)), strict=True):
                there[row] = is_there
            return [row for row in rows if not there[row]]

        await self._search(keys, ask_packs, ask_whole)
        return there

    async def _get(self, keys: Sequence[Key], limit_bytes: int) -> list[memoryview | None]:
        values: list[memoryview | None] = [None] * len(keys)

        async def ask_packs(space: str, rows: Rows) -> Rows:
            places = dict(zip(rows, self._index.find(space, [_hash_of(keys[row]) for row in rows]), strict=True))
            while any(places.values()):
                asked = {row: some.pop(0) for row, some in places.items() if some}
                for row, value in (await self._read(space, asked, limit_bytes)).items():
                    values[row] = value
                    del places[row]
            return list(places)

        async def ask_whole(space: str, rows: Rows) -> Rows:
            for row, value in zip(rows, await self._bucket.get(_whole_paths(keys, rows), limit_bytes), strict=True):
                values[row] = value
            return [row for row in rows if values[row] is None]

        await self._search(keys, ask_packs, ask_whole)
        return values

    async def _read(self, space: str, places: dict[int, PackPlace], limit_bytes: int) -> dict[int, memoryview]:
        """Of packs, by one request where they lie together; without what is gone."""
        by_pack: dict[bytes, Rows] = {}
        for row, place in places.items():
            by_pack.setdefault(place.pack, []).append(row)
        wanted = [
            Ranges(
                path=pack_path(space, pack),
                starts=[places[row].offset for row in rows],
                sizes=[min(places[row].size_bytes, limit_bytes) for row in rows],
            )
            for pack, rows in by_pack.items()
        ]
        values = {}
        for (pack, rows), found in zip(by_pack.items(), await self._bucket.get_ranges(wanted), strict=True):
            if found is None:
                self._index.forget_pack(space, pack)
                continue
            for row, value in zip(rows, found, strict=True):
                if is_blank(value):
                    self._index.forget_record(space, places[row])
                else:
                    values[row] = value
        return values

    # ---- changes ----

    async def _put(self, keys: Sequence[Key], values: Sequence[Sequence[Value]]) -> list[bool]:
        taken = [False] * len(keys)
        for space, rows in _by_space(keys):
            sizes = {row: sum(map(len, values[row])) for row in rows}
            whole = [row for row in rows if sizes[row] >= WHOLE_BYTES]
            small = [row for row in rows if sizes[row] < WHOLE_BYTES]
            packs = self._packs.lay_out(
                [SmallRecord(block_hash=_hash_of(keys[row]), parts=values[row], size_bytes=sizes[row]) for row in small]
            )
            objects = list(zip(_whole_paths(keys, whole), [values[row] for row in whole], strict=True))
            objects += [(pack_path(space, section.pack), parts) for section, parts in packs]
            answers = iter(await self._bucket.put_new(objects))
            for row in whole:
                taken[row] = next(answers)
            if whole:
                self._index.note_whole(space, True)
            there = [section for (section, _), is_taken in zip(packs, answers, strict=True) if is_taken]
            if there and await self._packs.publish(space, there):
                in_packs = {record.block_hash for section in there for record in section.records}
                for row in small:
                    taken[row] = _hash_of(keys[row]) in in_packs
        return taken

    async def _remove(self, keys: Sequence[Key]) -> list[bool]:
        gone = [False] * len(keys)
        for space, rows in _by_space(keys):
            await self._refresh(space)
            if self._index.has_whole(space):
                paths = _whole_paths(keys, rows)
                there = [at for at, is_there in enumerate(await self._bucket.has(paths)) if is_there]
                for at, is_gone in zip(there, await self._bucket.delete([paths[at] for at in there]), strict=True):
                    gone[rows[at]] = is_gone
            by_pack: dict[bytes, dict[PackPlace, int]] = {}
            for row, places in zip(rows, self._index.find(space, [_hash_of(keys[row]) for row in rows]), strict=True):
                for place in places:
                    by_pack.setdefault(place.pack, {})[place] = row
            for pack, in_pack in by_pack.items():
                hashes = {place: _hash_of(keys[row]) for place, row in in_pack.items()}
                for place in await self._packs.blank(space, pack, hashes):
                    gone[in_pack[place]] = True
        return gone

    # ---- all of it ----

    async def _scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        """The cursor is the last path as a number."""
        after = cursor.to_bytes((cursor.bit_length() + 7) // 8, "big").decode()
        page = await self._bucket.list_after(LAYOUT, after, _SCANNED)
        heads = await self._bucket.get_head([path for path, _ in page if "/record/" in path], head_bytes)
        indexes = [
            Ranges(path=path, starts=[0], sizes=[size_bytes])
            for path, size_bytes in page
            if "/index-" in path and size_bytes <= READ_BYTES
        ]
        for one, found in zip(indexes, await self._bucket.get_ranges(indexes), strict=True):
            sections = [] if found is None else read_sections(found[0])
            wanted = [
                Ranges(
                    path=pack_path(one.path.rpartition("/")[0], section.pack),
                    starts=[record.offset for record in section.records],
                    sizes=[min(record.size_bytes, head_bytes) for record in section.records],
                )
                for section in sections
                if section.kind is SectionKind.PACKED
            ]
            heads += [head for some in await self._bucket.get_ranges(wanted) for head in some or []]
        told = [bytes(head) for head in heads if head is not None and not is_blank(head)]
        return (int.from_bytes(page[-1][0].encode(), "big") if page else 0), told


def _by_space(keys: Sequence[Key]) -> Iterator[tuple[str, Rows]]:
    """Rows of keys that begin alike, and where those lie."""
    spaces: dict[bytes, Rows] = {}
    for row, key in enumerate(keys):
        spaces.setdefault(key[:_SPACE_BYTES], []).append(row)
    for begin, rows in spaces.items():
        yield _space_path(begin), rows


def _space_path(key: Key) -> str:
    return f"{LAYOUT}/{key[:HASH_BYTES].hex()}/{key[HASH_BYTES:_SPACE_BYTES].hex()}"


def _hash_of(key: Key) -> bytes:
    return key[_SPACE_BYTES:]


def _whole_paths(keys: Sequence[Key], rows: Rows) -> list[str]:
    return [f"{_space_path(keys[row])}/record/{_hash_of(keys[row]).hex()}" for row in rows]
