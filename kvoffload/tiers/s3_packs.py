"""Packs of small records as one connection writes them, and the index objects that list their places.

A pack is written before the index lists it; a crash between the two leaves an unlisted pack, which the bucket's
lifecycle removes. A removed record is overwritten with zeros, so that readers that know its place find it gone.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvoffload.tiers.envelope import HEAD_BYTES, RecordHead, read_head
from kvoffload.tiers.record_store import Value
from kvoffload.tiers.s3_client import S3Client
from kvoffload.tiers.s3_index import PACK_LIMIT, IndexPart, PackedRecord, PackIndex, PackPlace, Section, SectionKind
from kvoffload.units import KIB, MIB

PACK_BYTES: Final = 9 * MIB
"""The most bytes of a pack: 8 MiB of records, with their envelopes."""
INDEX_BYTES: Final = 64 * KIB
"""Length of an index object beyond which the next one is begun."""

_LOGS = 64
"""The most index objects that one connection appends to; for further spaces it begins new ones."""
_TRIES = 4
"""The most tries to change a pack that others change, too."""


@dataclass(frozen=True, kw_only=True)
class SmallRecord:
    """A value in its parts, and the block hash in its name."""

    block_hash: bytes
    parts: Sequence[Value]
    size_bytes: int


@dataclass(eq=False)
class _Log:
    """An index object of this connection's own."""

    path: str
    data: bytes = b""
    e_tag: str = ""


class S3Packs:
    """Writes packs and index objects, on one thread. New ones have names of their own; `blank` changes others'
    packs."""

    def __init__(self, bucket: S3Client, index: PackIndex) -> None:
        self._bucket = bucket
        self._index = index
        self._writer = os.urandom(8)
        self._written = 0
        self._logs: OrderedDict[str, _Log] = OrderedDict()

    def lay_out(self, records: Sequence[SmallRecord]) -> list[tuple[Section, Sequence[Value]]]:
        """Lays records out in new packs of at most PACK_BYTES, in their order."""
        packs: list[tuple[Section, Sequence[Value]]] = []
        for pack in _cut(records):
            places, offset = [], 0
            for record in pack:
                places.append(PackedRecord(block_hash=record.block_hash, offset=offset, size_bytes=record.size_bytes))
                offset += record.size_bytes
            section = Section(kind=SectionKind.PACKED, pack=self._new_name(), records=places)
            packs.append((section, [part for record in pack for part in record.parts]))
        return packs

    def publish(self, space: str, sections: Iterable[Section]) -> bool:
        """Publishes sections of the index. False: it is refused."""
        new = b"".join(section.write() for section in sections)
        for _ in range(2):
            log = self._logs.get(space)
            if log is None or (log.data and len(log.data) + len(new) > INDEX_BYTES):
                log = self._logs[space] = _Log(f"{space}/index-{self._new_name().hex()}")
            self._logs.move_to_end(space)
            if len(self._logs) > _LOGS:
                self._logs.popitem(last=False)
            e_tag = self._bucket.put_version(log.path, log.data + new, log.e_tag)
            if e_tag is not None:
                part = IndexPart(path=log.path, start=len(log.data), end=len(log.data) + len(new))
                log.data, log.e_tag = log.data + new, e_tag
                self._index.learn(space, part, new)
                return True
            # The bucket's lifecycle has removed it, or another writer has written to it.
            del self._logs[space]
        return False

    def blank(self, space: str, pack: bytes, hashes: dict[PackPlace, bytes]) -> list[PackPlace]:
        """Overwrites records with zeros, for all readers, and returns those that were there. An empty pack is
        removed."""
        path = pack_path(space, pack)
        for _ in range(_TRIES):
            found = self._bucket.get_version(path, PACK_LIMIT)
            if found is None:
                self._index.forget_pack(space, pack)
                return []
            data, e_tag = found
            blanked = []
            for place, block_hash in hashes.items():
                end = place.offset + place.size_bytes
                value = memoryview(data)[place.offset : end]
                head = read_head(value)
                is_another = isinstance(head, RecordHead) and head.name.block_hash != block_hash
                if not is_blank(value) and not is_another:
                    value[:] = bytes(len(value))
                    blanked.append(place)
            if not blanked:
                return []
            if np.frombuffer(data, np.uint8).any():
                is_done = self._bucket.put_version(path, data, e_tag) is not None
            else:
                [is_done] = self._bucket.delete([path])
            if is_done:
                records = [
                    PackedRecord(block_hash=hashes[p], offset=p.offset, size_bytes=p.size_bytes) for p in blanked
                ]
                self.publish(space, [Section(kind=SectionKind.REMOVED, pack=pack, records=records)])
                return blanked
        return []

    def _new_name(self) -> bytes:
        """Returns a name that no other writer uses, for a pack or an index object."""
        self._written += 1
        return self._writer + self._written.to_bytes(8, "big")


def pack_path(space: str, pack: bytes) -> str:
    return f"{space}/pack/{pack.hex()}"


def is_blank(value: memoryview) -> bool:
    """Whether the record has been removed. No record begins with zeros."""
    return not any(value[:HEAD_BYTES])


def _cut(records: Sequence[SmallRecord]) -> Iterator[Sequence[SmallRecord]]:
    pack: list[SmallRecord] = []
    room = PACK_BYTES
    for record in records:
        if pack and record.size_bytes > room:
            yield pack
            pack, room = [], PACK_BYTES
        pack.append(record)
        room -= record.size_bytes
    if pack:
        yield pack
