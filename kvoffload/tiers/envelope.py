"""The envelope of a record in an external store: its name, its digest, and the hash of the block before it.

A record may be coded there, or sealed (docs/format.md). Its digest is that of the record itself in any case; of a
sealed one it lies within the seal.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.tiers.base import Addresses, Digests, RecordNames
from kvoffload.tiers.record_store import Value
from kvoffload.types import HASH_BYTES

MAGIC: Final = b"KVOR"
VERSION: Final = 1
CODED_VERSION: Final = 2
SEALED_VERSION: Final = 3
_CODE: Final = 1
"""The version of coded records."""
_SEAL: Final = 2
"""The code of sealed records."""
_FIELDS = struct.Struct("<4sHHIIQQ32s32s32s")
_CODED_SHIFT: Final = 32
"""Shift of the coded length in the field of the record's length, which holds both: no record of 4 GiB is coded."""
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_MASK: Final = (1 << 64) - 1
HEAD_BYTES: Final = _FIELDS.size + _CHECKSUM.size

_HASH = f"V{HASH_BYTES}"
_HEAD = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("code", "<u2"),
        ("group", "<u4"),
        ("shard", "<u4"),
        ("record_bytes", "<u8"),
        ("digest", "<u8"),
        ("fingerprint", _HASH),
        ("block_hash", _HASH),
        ("parent", _HASH),
        ("checksum", "<u8"),
    ]
)
"""The same as an array's element: heads of records that are not coded are packed and checked by the batch."""
_PARENT: Final = HEAD_BYTES - _CHECKSUM.size - HASH_BYTES

Heads = npt.NDArray[np.uint8]
"""Heads, one a row of HEAD_BYTES."""

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
    """Returns the name with this key."""
    return RecordName(*_KEY.unpack(key))


@dataclass(frozen=True, slots=True)
class RecordHead:
    """`parent`: the hash of the block before this one. `coded_bytes`: of what follows; 0 where that is the record.
    `is_sealed`: what follows is sealed, and `digest` is the number of the key."""

    name: RecordName
    record_bytes: int
    digest: int
    parent: bytes
    coded_bytes: int = 0
    is_sealed: bool = False

    def pack(self) -> bytes:
        name, version, code = self.name, VERSION, 0
        if self.coded_bytes:
            version, code = (SEALED_VERSION, _SEAL) if self.is_sealed else (CODED_VERSION, _CODE)
        fields = _FIELDS.pack(
            MAGIC,
            version,
            code,
            name.group,
            name.shard,
            self.record_bytes | self.coded_bytes << _CODED_SHIFT,
            self.digest,
            name.fingerprint,
            name.block_hash,
            self.parent,
        )
        return fields + _CHECKSUM.pack(_sum(fields))


class Verdict(Enum):
    """The result of checking a stored value."""

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


def list_keys(names: RecordNames) -> list[bytes]:
    """Returns the keys of all records."""
    begin = _KEY.pack(names.fingerprint, names.group, names.shard, b"")[:-HASH_BYTES]
    return [begin + names.hashes[at : at + HASH_BYTES] for at in range(0, len(names.hashes), HASH_BYTES)]


def pack_heads(names: RecordNames, record_bytes: int, digests: Digests, parents: bytes = b"") -> Heads:
    """Packs the heads of records that are not coded. `parents`: none, or one a record."""
    heads = np.zeros(len(names), _HEAD)
    heads["magic"], heads["version"] = MAGIC, VERSION
    heads["group"], heads["shard"], heads["record_bytes"] = names.group, names.shard, record_bytes
    heads["digest"] = digests
    heads["fingerprint"] = np.void(names.fingerprint)
    heads["block_hash"] = np.frombuffer(names.hashes, _HASH)
    if parents:
        heads["parent"] = np.frombuffer(parents, _HASH)
    packed = heads.view(np.uint8)
    fields = packed.data
    heads["checksum"] = [_sum(fields[at : at + _FIELDS.size]) for at in range(0, len(fields), HEAD_BYTES)]
    return packed.reshape(-1, HEAD_BYTES)


@dataclass(frozen=True, eq=False)
class CameRecords:
    """The heads of values that have come, and the digests of the records behind them."""

    heads: Heads
    digests: Digests

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def parents(self) -> npt.NDArray[np.uint8]:
        """Returns what the heads say, a row each."""
        return self.heads[:, _PARENT : _PARENT + HASH_BYTES]

    def are(self, names: RecordNames, record_bytes: int) -> npt.NDArray[np.bool_]:
        """Returns which of them are these records, not coded and whole: their heads are what would be written now."""
        written = pack_heads(names, record_bytes, self.digests, self.parents.tobytes())
        return np.asarray((self.heads == written).all(1), np.bool_)


def read_head(value: bytes | memoryview) -> RecordHead | Verdict:
    """Reads the head of a value, or of its first HEAD_BYTES."""
    return _read_head(value, None)


def digest_of(data: memoryview, name: RecordName) -> int:
    """Returns the digest of a record's bytes under its name."""
    return native.digest_record(
        data, fingerprint=name.fingerprint, block_hash=name.block_hash, group=name.group, shard=name.shard
    )


def digest_slots(names: RecordNames, slots: Addresses, record_bytes: int) -> Digests:
    """Returns the digests that records in slots have under their names."""
    made = native.digest_slots(
        slots.data,
        record_bytes,
        fingerprint=names.fingerprint,
        block_hashes=names.hashes,
        group=names.group,
        shard=names.shard,
    )
    return np.frombuffer(made, np.uint64)


def pack_value(
    name: RecordName, data: Value, digest: int, parent: bytes, *, coded: bytes | None, keys: native.SealKeys | None
) -> tuple[bytes, Value]:
    """Returns the head of a record, and the bytes that follow it: sealed if there are keys, and coded if `coded` is
    the coded record."""
    if keys is None:
        return RecordHead(name, len(data), digest, parent, len(coded or b"")).pack(), coded or data
    sealed = keys.seal(
        coded or data,
        is_coded=bool(coded),
        digest=digest,
        record_bytes=len(data),
        fingerprint=name.fingerprint,
        block_hash=name.block_hash,
        group=name.group,
        shard=name.shard,
        parent=parent,
    )
    return RecordHead(name, len(data), keys.sealing, parent, len(sealed), is_sealed=True).pack(), sealed


def most_value_bytes(record_bytes: int, keys: native.SealKeys | None) -> int:
    """Returns the length of the longest value that is a record of this length."""
    return HEAD_BYTES + record_bytes + (0 if keys is None else native.SEAL_OVERHEAD_BYTES)


def open_value(
    value: memoryview,
    name: RecordName,
    record_bytes: int,
    *,
    room: memoryview | None = None,
    keys: native.SealKeys | None = None,
) -> OpenValue | Verdict:
    """Returns the value's bytes if it is this record, or why it is not. `room`: memory of the record's length for the
    bytes of a coded or sealed one; new memory if None. After a verdict, the bytes in `room` mean nothing.

    With `keys` a record that is not sealed counts as damaged: anyone who may write to the store could have put it
    there. So does one that is sealed with another key, and the server may put it again.
    """
    head = _read_head(value, name)
    if isinstance(head, Verdict):
        return head
    if head.name is not name:
        return Verdict.DAMAGED
    if head.record_bytes != record_bytes or (head.is_sealed and keys is None):
        return Verdict.OTHER
    record = value[HEAD_BYTES:]
    if keys is not None:
        return _open_sealed(head, record, room, keys)
    if head.coded_bytes:
        return _open_coded(head, record, room)
    checked = _check(head, record, name)
    return OpenValue(checked, record) if isinstance(checked, RecordHead) else checked


def _open_coded(head: RecordHead, coded: memoryview, room: memoryview | None) -> OpenValue | Verdict:
    if len(coded) != head.coded_bytes:
        return Verdict.DAMAGED
    if room is None:
        # A value without a room may lie in memory that another process can write to.
        coded = memoryview(bytes(coded))
    decoded = memoryview(bytearray(head.record_bytes)) if room is None else room
    if not native.decode_record(coded, decoded) or head.digest != digest_of(decoded, head.name):
        return Verdict.DAMAGED
    return OpenValue(head, decoded)


def _open_sealed(
    head: RecordHead, sealed: memoryview, room: memoryview | None, keys: native.SealKeys
) -> OpenValue | Verdict:
    if not head.is_sealed or len(sealed) != head.coded_bytes:
        return Verdict.DAMAGED
    name = head.name
    record = memoryview(bytearray(head.record_bytes)) if room is None else room
    digest = keys.open(
        sealed,
        record,
        number=head.digest,
        fingerprint=name.fingerprint,
        block_hash=name.block_hash,
        group=name.group,
        shard=name.shard,
        parent=head.parent,
    )
    if digest is None:
        return Verdict.DAMAGED
    coded_bytes = head.coded_bytes - native.SEAL_OVERHEAD_BYTES
    is_coded = coded_bytes < head.record_bytes
    return OpenValue(replace(head, digest=digest, coded_bytes=coded_bytes if is_coded else 0, is_sealed=False), record)


def check_record(head_bytes: bytes | memoryview, data: memoryview, name: RecordName) -> RecordHead | Verdict:
    """Returns the head, if `data` is this record, not coded, and has its digest."""
    return _check(_read_head(head_bytes, name), data, name)


def _check(head: RecordHead | Verdict, data: memoryview, name: RecordName) -> RecordHead | Verdict:
    if isinstance(head, Verdict):
        return head
    if head.coded_bytes:
        return Verdict.OTHER
    if head.name is not name or len(data) != head.record_bytes or head.digest != digest_of(data, name):
        return Verdict.DAMAGED
    return head


def _sum(fields: bytes | memoryview) -> int:
    """Returns the sum of a head's fields, cut to 64 bits: a digest may have one bit more, and the author of a parent
    hash could bring that about."""
    return native.digest_run(fields) & _CHECKSUM_MASK


def _read_head(value: bytes | memoryview, expected: RecordName | None) -> RecordHead | Verdict:
    """Reads a head. If it has the expected name, the result holds `expected` itself: comparing is cheaper than making
    one."""
    if len(value) < HEAD_BYTES or value[:4] != MAGIC:
        return Verdict.DAMAGED
    fields = bytes(value[: _FIELDS.size])
    _, version, code, group, shard, record_bytes, digest, fingerprint, block_hash, parent = _FIELDS.unpack(fields)
    if _CHECKSUM.unpack_from(value, _FIELDS.size) != (_sum(fields),):
        return Verdict.DAMAGED
    coded_bytes, is_sealed = 0, (version, code) == (SEALED_VERSION, _SEAL)
    if is_sealed or (version, code) == (CODED_VERSION, _CODE):
        coded_bytes, record_bytes = record_bytes >> _CODED_SHIFT, record_bytes % (1 << _CODED_SHIFT)
        # A sealed record may be as long as the record, a coded one is shorter and never empty.
        least, more = (native.SEAL_OVERHEAD_BYTES,) * 2 if is_sealed else (1, -1)
        if not least <= coded_bytes <= record_bytes + more:
            return Verdict.DAMAGED
    elif version != VERSION:
        return Verdict.OTHER
    if expected is not None and (
        (block_hash, group, shard, fingerprint)
        == (expected.block_hash, expected.group, expected.shard, expected.fingerprint)
    ):
        return RecordHead(expected, record_bytes, digest, parent, coded_bytes, is_sealed)
    name = RecordName(fingerprint, group, shard, block_hash)
    return RecordHead(name, record_bytes, digest, parent, coded_bytes, is_sealed)
