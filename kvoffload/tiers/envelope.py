"""What a record is wrapped in where it lies in somebody else's store: its name, its digest, and what came before it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvoffload import native
from kvoffload.tiers.base import RecordNames
from kvoffload.types import HASH_BYTES

MAGIC: Final = b"KVOR"
VERSION: Final = 1
_FIELDS = struct.Struct("<4sHHIIQQ32s32s32s")
_CHECKSUM = struct.Struct("<Q")
HEAD_BYTES: Final = _FIELDS.size + _CHECKSUM.size

_KEY = struct.Struct(">32sII32s")
KEY_BYTES: Final = _KEY.size


@dataclass(frozen=True, slots=True)
class RecordName:
    """Names one record."""

    fingerprint: bytes
    group: int
    shard: int
    block_hash: bytes

    @property
    def key(self) -> bytes:
        """What stores know it by. Records of one identity, group and shard have keys that begin alike."""
        return _KEY.pack(self.fingerprint, self.group, self.shard, self.block_hash)


def read_key(key: bytes) -> RecordName:
    """The name whose key it is."""
    return RecordName(*_KEY.unpack(key))


@dataclass(frozen=True, slots=True)
class RecordHead:
    """`parent`: the hash of the block before this one."""

    name: RecordName
    record_bytes: int
    digest: int
    parent: bytes

    def pack(self) -> bytes:
        name = self.name
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            0,
            name.group,
            name.shard,
            self.record_bytes,
            self.digest,
            name.fingerprint,
            name.block_hash,
            self.parent,
        )
        return fields + _CHECKSUM.pack(native.digest_run(fields))


class Verdict(Enum):
    """What a stored value turned out to be."""

    GOOD = "good"
    OTHER = "other"
    """Of another length, or written by a version that this one does not know: nothing is wrong with it."""
    DAMAGED = "damaged"


def list_names(names: RecordNames) -> Iterator[RecordName]:
    for at in range(0, len(names.hashes), HASH_BYTES):
        yield RecordName(names.fingerprint, names.group, names.shard, names.hashes[at : at + HASH_BYTES])


def read_head(value: bytes | memoryview) -> RecordHead | Verdict:
    """Of a value, or of its first HEAD_BYTES."""
    return _read_head(value, None)


def digest_of(data: memoryview, name: RecordName) -> int:
    """Of a record's bytes under its name."""
    return native.digest_record(
        data, fingerprint=name.fingerprint, block_hash=name.block_hash, group=name.group, shard=name.shard
    )


def open_value(value: memoryview, name: RecordName, record_bytes: int) -> RecordHead | Verdict:
    """The head, if what follows it is this record and has its digest."""
    head = _read_head(value, name)
    if isinstance(head, RecordHead) and head.name is name and head.record_bytes != record_bytes:
        return Verdict.OTHER
    return _check(head, value[HEAD_BYTES:], name)


def check_record(head_bytes: bytes | memoryview, data: memoryview, name: RecordName) -> RecordHead | Verdict:
    """The head, if `data` is this record and has its digest."""
    return _check(_read_head(head_bytes, name), data, name)


def _check(head: RecordHead | Verdict, data: memoryview, name: RecordName) -> RecordHead | Verdict:
    if isinstance(head, Verdict):
        return head
    if head.name is not name or len(data) != head.record_bytes or head.digest != digest_of(data, name):
        return Verdict.DAMAGED
    return head


def _read_head(value: bytes | memoryview, expected: RecordName | None) -> RecordHead | Verdict:
    """With that name itself where it is that one: to make one costs more than to compare."""
    if len(value) < HEAD_BYTES or value[:4] != MAGIC:
        return Verdict.DAMAGED
    fields = bytes(value[: _FIELDS.size])
    _, version, _, group, shard, record_bytes, digest, fingerprint, block_hash, parent = _FIELDS.unpack(fields)
    if _CHECKSUM.unpack_from(value, _FIELDS.size) != (native.digest_run(fields),):
        return Verdict.DAMAGED
    if version != VERSION:
        return Verdict.OTHER
    if expected is not None and (
        (block_hash, group, shard, fingerprint)
        == (expected.block_hash, expected.group, expected.shard, expected.fingerprint)
    ):
        return RecordHead(expected, record_bytes, digest, parent)
    return RecordHead(RecordName(fingerprint, group, shard, block_hash), record_bytes, digest, parent)
