"""What a record is wrapped in where it lies in somebody else's store: its name, its digest, and what came before it.

A record may be coded there (docs/format.md). Its digest is that of the record itself in any case.
"""

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
CODED_VERSION: Final = 2
_CODE: Final = 1
"""The version of coded records."""
_FIELDS = struct.Struct("<4sHHIIQQ32s32s32s")
_CODED_SHIFT: Final = 32
"""Of a coded record both lengths lie in the field of the one: no record of 4 GiB is coded."""
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
        """The key that stores know the record by. Records of one identity, group and shard have keys that begin
        alike."""
        return _KEY.pack(self.fingerprint, self.group, self.shard, self.block_hash)


def read_key(key: bytes) -> RecordName:
    """The name whose key it is."""
    return RecordName(*_KEY.unpack(key))


@dataclass(frozen=True, slots=True)
class RecordHead:
    """`parent`: the hash of the block before this one. `coded_bytes`: of what follows; 0 where that is the record."""

    name: RecordName
    record_bytes: int
    digest: int
    parent: bytes
    coded_bytes: int = 0

    def pack(self) -> bytes:
        name = self.name
        fields = _FIELDS.pack(
            MAGIC,
            CODED_VERSION if self.coded_bytes else VERSION,
            _CODE if self.coded_bytes else 0,
            name.group,
            name.shard,
            self.record_bytes | self.coded_bytes << _CODED_SHIFT,
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


@dataclass(frozen=True, slots=True)
class OpenValue:
    """A value that is the record that was asked for, as its digest says."""

    head: RecordHead
    record: memoryview


def list_names(names: RecordNames) -> Iterator[RecordName]:
    for at in range(0, len(names.hashes), HASH_BYTES):
        yield RecordName(names.fingerprint, names.group, names.shard, names.hashes[at : at + HASH_BYTES])


def read_head(value: bytes | memoryview) -> RecordHead | Verdict:
    """Reads the head of a value, or of its first HEAD_BYTES."""
    return _read_head(value, None)


def digest_of(data: memoryview, name: RecordName) -> int:
    """Returns the digest of a record's bytes under its name."""
    return native.digest_record(
        data, fingerprint=name.fingerprint, block_hash=name.block_hash, group=name.group, shard=name.shard
    )


def open_value(
    value: memoryview, name: RecordName, record_bytes: int, *, room: memoryview | None = None
) -> OpenValue | Verdict:
    """Says whether a value is this record, and returns its bytes. `room`: memory of its length for the bytes of a coded
    one; new memory if None. What is written there is worth nothing if the answer is a verdict."""
    head = _read_head(value, name)
    if isinstance(head, RecordHead) and head.name is name and head.record_bytes != record_bytes:
        return Verdict.OTHER
    record = value[HEAD_BYTES:]
    if isinstance(head, RecordHead) and head.coded_bytes:
        if head.name is not name or len(record) != head.coded_bytes:
            return Verdict.DAMAGED
        decoded = memoryview(bytearray(record_bytes)) if room is None else room
        if not native.decode_record(record, decoded) or head.digest != digest_of(decoded, name):
            return Verdict.DAMAGED
        return OpenValue(head, decoded)
    checked = _check(head, record, name)
    return OpenValue(checked, record) if isinstance(checked, RecordHead) else checked


def check_record(head_bytes: bytes | memoryview, data: memoryview, name: RecordName) -> RecordHead | Verdict:
    """The head, if `data` is this record, not coded, and has its digest."""
    return _check(_read_head(head_bytes, name), data, name)


def _check(head: RecordHead | Verdict, data: memoryview, name: RecordName) -> RecordHead | Verdict:
    if isinstance(head, Verdict):
        return head
    if head.coded_bytes:
        return Verdict.OTHER
    if head.name is not name or len(data) != head.record_bytes or head.digest != digest_of(data, name):
        return Verdict.DAMAGED
    return head


def _read_head(value: bytes | memoryview, expected: RecordName | None) -> RecordHead | Verdict:
    """With that name itself where it is that one: to make one costs more than to compare."""
    if len(value) < HEAD_BYTES or value[:4] != MAGIC:
        return Verdict.DAMAGED
    fields = bytes(value[: _FIELDS.size])
    _, version, code, group, shard, record_bytes, digest, fingerprint, block_hash, parent = _FIELDS.unpack(fields)
    if _CHECKSUM.unpack_from(value, _FIELDS.size) != (native.digest_run(fields),):
        return Verdict.DAMAGED
    coded_bytes = 0
    if version == CODED_VERSION and code == _CODE:
        coded_bytes, record_bytes = record_bytes >> _CODED_SHIFT, record_bytes % (1 << _CODED_SHIFT)
        if not 0 < coded_bytes < record_bytes:
            return Verdict.DAMAGED
    elif version != VERSION:
        return Verdict.OTHER
    if expected is not None and (
        (block_hash, group, shard, fingerprint)
        == (expected.block_hash, expected.group, expected.shard, expected.fingerprint)
    ):
        return RecordHead(expected, record_bytes, digest, parent, coded_bytes)
    return RecordHead(RecordName(fingerprint, group, shard, block_hash), record_bytes, digest, parent, coded_bytes)
