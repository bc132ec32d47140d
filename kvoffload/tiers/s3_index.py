"""The places of small records in packs: the sections of index objects, and what a server remembers of them.

An index object has one writer, one connection of one server, which appends whole sections and never changes earlier
ones. So a reader that knows how far it has read an object reads only what was appended.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.types import HASH_BYTES
from kvoffload.units import MIB

MAGIC: Final = b"KVOI"
VERSION: Final = 1
INDEX_LIMIT: Final = 1 << 22
"""The most records that are remembered, of all spaces together: 20 bytes of memory each."""
READ_BYTES: Final = 8 * MIB
"""The most bytes of index objects read for one question; the next question reads on. None of ours is as long."""
PLACE_LIMIT: Final = 8
"""The most places of one record that are tried, in each sorted run, whatever indexes say; the newest ones."""
PACK_LIMIT: Final = 16 * MIB
"""No pack is longer, whatever an index says."""

_HEAD = struct.Struct("<4sHHI4x16s")
_CHECKSUM = struct.Struct("<Q")
_ENTRY = np.dtype([("hash", "u1", (HASH_BYTES,)), ("offset", "<u4"), ("bytes", "<u4")])
_PLACE = np.dtype([("pack", "<u4"), ("offset", "<u4"), ("bytes", "<u4")])

_Keys = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.void]


class SectionKind(IntEnum):
    PACKED = 0
    """The section's records lie in the pack."""
    REMOVED = 1
    """The section's records do not lie in the pack any more."""


@dataclass(frozen=True, kw_only=True)
class PackedRecord:
    """A record, and where in its pack it is."""

    block_hash: bytes
    offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Section:
    """The entries of an index object about one pack."""

    kind: SectionKind
    pack: bytes
    records: Sequence[PackedRecord]

    def write(self) -> bytes:
        entries = np.zeros(len(self.records), _ENTRY)
        for at, record in enumerate(self.records):
            entries[at] = np.frombuffer(record.block_hash, np.uint8), record.offset, record.size_bytes
        data = _HEAD.pack(MAGIC, VERSION, self.kind, len(self.records), self.pack) + entries.tobytes()
        return data + _CHECKSUM.pack(native.digest_run(data))


def read_sections(data: bytes | memoryview) -> list[Section]:
    """Reads sections, up to the first that is invalid."""
    sections: list[Section] = []
    at = 0
    while at + _HEAD.size <= len(data):
        magic, version, kind, count, pack = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + count * _ENTRY.itemsize
        if (magic, version) != (MAGIC, VERSION) or kind not in tuple(SectionKind) or end + _CHECKSUM.size > len(data):
            break
        if _CHECKSUM.unpack_from(data, end) != (native.digest_run(bytes(data[at:end])),):
            break
        entries = np.frombuffer(data[at + _HEAD.size : end], _ENTRY)
        if (entries["offset"].astype(np.uint64) + entries["bytes"] > PACK_LIMIT).any():
            break
        records = [
            PackedRecord(block_hash=row["hash"].tobytes(), offset=int(row["offset"]), size_bytes=int(row["bytes"]))
            for row in entries
        ]
        sections.append(Section(kind=SectionKind(kind), pack=pack, records=records))
        at = end + _CHECKSUM.size
    return sections


@dataclass(frozen=True, kw_only=True)
class ListedIndex:
    """An index object, as a listing tells of it."""

    path: str
    size_bytes: int
    changed: datetime


@dataclass(frozen=True, kw_only=True)
class IndexPart:
    """The part of an index object that is still to read."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PackPlace:
    """A place where a record may lie. The value there names its own record."""

    pack: bytes
    offset: int
    size_bytes: int


@dataclass(frozen=True, eq=False)
class _Run:
    """Places of records, sorted by their keys."""

    keys: _Keys
    places: _Places

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(eq=False)
class _Space:
    """The remembered packs and places of one identity, group and shard."""

    read: dict[str, int] = field(default_factory=dict)
    """Offset up to which each index object was read, by path."""
    packs: list[bytes | None] = field(default_factory=list)
    """Names of packs by number; None for those that are gone."""
    gone: list[int] = field(default_factory=list)
    numbers: dict[bytes, int] = field(default_factory=dict)
    runs: list[_Run] = field(default_factory=list)
    """Sorted; each has more than twice the records of the next, so that there are few."""
    removed: set[tuple[bytes, int]] = field(default_factory=set)
    """Packs and offsets of records that were removed."""
    has_whole: bool = False
    """Whether some records are objects of their own."""

    @property
    def records(self) -> int:
        return sum(map(len, self.runs)) + len(self.removed)

    def number(self, pack: bytes) -> int:
        if pack not in self.numbers:
            self.numbers[pack] = len(self.packs)
            self.packs.append(pack)
        return self.numbers[pack]

    def add(self, keys: _Keys, places: _Places) -> None:
        """Sorts places in; those in packs that are gone are left out on the way."""
        while self.runs and len(self.runs[-1]) <= 2 * len(keys):
            run = self.runs.pop()
            keys, places = np.concatenate([run.keys, keys]), np.concatenate([run.places, places])
        if self.gone:
            is_here = ~np.isin(places["pack"], self.gone)
            keys, places = keys[is_here], places[is_here]
        order = np.argsort(keys, kind="stable")
        self.runs.append(_Run(keys[order], places[order]))


class PackIndex:
    """Knows the packs that all connections of one server have read of. Safe to call from any thread; nothing here
    waits."""

    def __init__(self, limit: int = INDEX_LIMIT) -> None:
        self._limit = limit
        self._lock = Lock()
        self._spaces: OrderedDict[str, _Space] = OrderedDict()
        """The spaces by path, the one used last at the end."""

    def find(self, space: str, hashes: Sequence[bytes]) -> list[list[PackPlace]]:
        """Returns the known places of each record, the newest first."""
        found: list[list[PackPlace]] = [[] for _ in hashes]
        with self._lock:
            here = self._use(space)
            keys = _keys_of(b"".join(hashes))
            for run in reversed(here.runs):
                first, last = (np.searchsorted(run.keys, keys, side) for side in ("left", "right"))
                counts = np.minimum(last - first, PLACE_LIMIT)
                behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
                rows = run.places[np.repeat(last - 1, counts) - behind]
                for at, (number, offset, size) in zip(
                    np.repeat(np.arange(len(keys)), counts).tolist(), rows.tolist(), strict=True
                ):
                    pack = here.packs[number]
                    if pack is not None and (pack, offset) not in here.removed:
                        found[at].append(PackPlace(pack, offset, size))
        return found

    def plan(self, space: str, listed: Iterable[ListedIndex]) -> list[IndexPart]:
        """Returns the parts to read, of the newest objects first. A list older than what is known changes nothing."""
        parts = []
        with self._lock:
            here = self._use(space)
            room = self._limit - here.records if here.read else self._limit // 2
            left = READ_BYTES
            for one in sorted(listed, key=lambda one: one.changed, reverse=True):
                start = here.read.get(one.path, 0)
                if start >= one.size_bytes or one.size_bytes > READ_BYTES or left <= 0:
                    continue
                if not start and room <= 0:
                    # This object is older than what there is room for.
                    here.read[one.path] = one.size_bytes
                    continue
                parts.append(IndexPart(path=one.path, start=start, end=one.size_bytes))
                left -= one.size_bytes - start
                room -= (one.size_bytes - start) // _ENTRY.itemsize
        return parts

    def learn(self, space: str, part: IndexPart, data: bytes | memoryview) -> None:
        """Takes the data that was read of that part."""
        sections = read_sections(data)
        with self._lock:
            here = self._use(space)
            if here.read.get(part.path, 0) != part.start:
                return
            here.read[part.path] = part.end
            for section in sections:
                if section.kind is SectionKind.REMOVED:
                    here.removed |= {(section.pack, record.offset) for record in section.records}
            packed = [section for section in sections if section.kind is SectionKind.PACKED]
            rows = [(here.number(section.pack), record) for section in packed for record in section.records]
            places = np.array([(number, record.offset, record.size_bytes) for number, record in rows], _PLACE)
            here.add(_keys_of(b"".join(record.block_hash for _, record in rows)), places)
            self._keep_to_limit()

    def forget_pack(self, space: str, pack: bytes) -> None:
        """Forgets a pack that is gone."""
        with self._lock:
            here = self._use(space)
            if pack in here.numbers:
                number = here.numbers.pop(pack)
                here.packs[number] = None
                here.gone.append(number)

    def forget_record(self, space: str, place: PackPlace) -> None:
        """Notes that a record is not in its place any more."""
        with self._lock:
            self._use(space).removed.add((place.pack, place.offset))
            self._keep_to_limit()

    def has_whole(self, space: str) -> bool:
        """Whether some of its records are objects of their own, as far as is known."""
        with self._lock:
            return self._use(space).has_whole

    def note_whole(self, space: str, has_whole: bool) -> None:
        with self._lock:
            self._use(space).has_whole = has_whole

    def _use(self, space: str) -> _Space:
        here = self._spaces.setdefault(space, _Space())
        self._spaces.move_to_end(space)
        return here

    def _keep_to_limit(self) -> None:
        """Keeps to the limit: the space that was unused for longest goes first. A space that alone is too large goes,
        too, and is read again from its newest objects, up to half of the limit."""
        while sum(space.records for space in self._spaces.values()) > self._limit:
            self._spaces.popitem(last=False)


def _keys_of(hashes: bytes) -> _Keys:
    """Returns eight bytes of each hash: enough to find a record, which names itself."""
    return np.frombuffer(hashes, "<u8").reshape(-1, HASH_BYTES // 8)[:, 0]
