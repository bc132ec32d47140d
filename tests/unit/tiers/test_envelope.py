"""A record and its head: what is read back is what was packed, or it is damaged."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from kvoffload import native
from kvoffload.tiers.base import RecordNames
from kvoffload.tiers.envelope import (
    HEAD_BYTES,
    KEY_BYTES,
    MAGIC,
    CameRecords,
    OpenValue,
    RecordHead,
    RecordName,
    Verdict,
    check_record,
    digest_of,
    digest_slots,
    list_keys,
    list_names,
    most_value_bytes,
    open_value,
    pack_heads,
    pack_value,
    read_head,
    read_key,
)
from tests.kit.tiers.seals import make_keys

NAME = RecordName(b"F" * 32, 3, 1, b"H" * 32)
DATA = bytes(range(100))
HEAD = RecordHead(NAME, len(DATA), digest_of(memoryview(DATA), NAME), b"P" * 32)
LONG = (np.random.default_rng(36).normal(size=400).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
CODED = native.RecordEncoder().encode(LONG) or b""
KEYS = make_keys(1)
CODED_HEAD = RecordHead(NAME, len(LONG), digest_of(memoryview(LONG), NAME), b"P" * 32, len(CODED))


def open_bytes(value: bytes, record_bytes: int) -> tuple[RecordHead, bytes] | Verdict:
    opened = open_value(memoryview(value), NAME, record_bytes)
    return (opened.head, bytes(opened.record)) if isinstance(opened, OpenValue) else opened


def seal(fields: bytes) -> bytes:
    """A head whose checksum is right."""
    return fields + struct.pack("<Q", native.digest_run(fields))


def test_a_head_is_read_as_it_was_packed() -> None:
    packed = HEAD.pack()
    assert len(packed) == HEAD_BYTES == 136
    assert read_head(packed) == HEAD
    assert read_head(memoryview(packed + DATA)) == HEAD


def test_its_bytes_are_those_of_version_1() -> None:
    fields = struct.pack("<4sHHIIQQ", MAGIC, 1, 0, 3, 1, 100, HEAD.digest) + b"F" * 32 + b"H" * 32 + b"P" * 32
    assert HEAD.pack() == seal(fields)


def test_the_bytes_of_a_coded_record_are_those_of_version_2() -> None:
    lengths = (len(LONG), len(CODED))
    fields = struct.pack("<4sHHIIIIQ", MAGIC, 2, 1, 3, 1, *lengths, CODED_HEAD.digest)
    assert CODED_HEAD.pack() == seal(fields + b"F" * 32 + b"H" * 32 + b"P" * 32)
    assert read_head(CODED_HEAD.pack()) == CODED_HEAD


def test_every_bit_of_a_head_is_looked_at() -> None:
    packed = HEAD.pack()
    for bit in range(8 * HEAD_BYTES):
        broken = bytearray(packed)
        broken[bit // 8] ^= 1 << bit % 8
        assert read_head(bytes(broken)) is Verdict.DAMAGED, bit
    for length in range(HEAD_BYTES):
        assert read_head(packed[:length]) is Verdict.DAMAGED


def test_a_version_that_is_not_known_is_no_damage() -> None:
    fields = bytearray(HEAD.pack()[:-8])
    struct.pack_into("<H", fields, 4, 3)
    later = seal(bytes(fields))
    assert read_head(later) is Verdict.OTHER
    assert open_value(memoryview(later + DATA), NAME, len(DATA)) is Verdict.OTHER


def test_a_code_that_is_not_known_is_no_damage() -> None:
    fields = bytearray(CODED_HEAD.pack()[:-8])
    struct.pack_into("<H", fields, 6, 2)
    assert open_bytes(seal(bytes(fields)) + CODED, len(LONG)) is Verdict.OTHER


@pytest.mark.parametrize(
    ("head", "data", "record_bytes", "found"),
    [
        (HEAD, DATA, 100, HEAD),
        (HEAD, DATA, 99, Verdict.OTHER),
        (HEAD, DATA[:-1], 100, Verdict.DAMAGED),
        (HEAD, DATA + b"x", 100, Verdict.DAMAGED),
        (HEAD, DATA[:-1] + b"x", 100, Verdict.DAMAGED),
        (RecordHead(RecordName(b"F" * 32, 3, 2, b"H" * 32), 100, HEAD.digest, b"P" * 32), DATA, 100, Verdict.DAMAGED),
        (RecordHead(NAME, 100, HEAD.digest + 1, b"P" * 32), DATA, 100, Verdict.DAMAGED),
    ],
)
def test_a_value_is_opened(head: RecordHead, data: bytes, record_bytes: int, found: object) -> None:
    opened = open_bytes(head.pack() + data, record_bytes)
    assert opened == ((found, data) if isinstance(found, RecordHead) else found)
    if record_bytes == head.record_bytes:
        assert check_record(head.pack(), memoryview(data), NAME) == found


@pytest.mark.parametrize(
    ("head", "coded", "record_bytes", "found"),
    [
        (CODED_HEAD, CODED, len(LONG), CODED_HEAD),
        (CODED_HEAD, CODED, len(LONG) + 1, Verdict.OTHER),
        (CODED_HEAD, CODED[:-1], len(LONG), Verdict.DAMAGED),
        (CODED_HEAD, CODED + b"x", len(LONG), Verdict.DAMAGED),
        (CODED_HEAD, LONG, len(LONG), Verdict.DAMAGED),
        (replace(CODED_HEAD, digest=CODED_HEAD.digest ^ 1), CODED, len(LONG), Verdict.DAMAGED),
        (replace(CODED_HEAD, name=replace(NAME, shard=2)), CODED, len(LONG), Verdict.DAMAGED),
        (replace(CODED_HEAD, coded_bytes=len(LONG)), LONG, len(LONG), Verdict.DAMAGED),
        (replace(CODED_HEAD, coded_bytes=0), CODED, len(LONG), Verdict.DAMAGED),
        (replace(CODED_HEAD, record_bytes=len(LONG) + 64), CODED, len(LONG) + 64, Verdict.DAMAGED),
    ],
)
def test_a_coded_value_is_opened(head: RecordHead, coded: bytes, record_bytes: int, found: object) -> None:
    opened = open_bytes(head.pack() + coded, record_bytes)
    assert opened == ((found, LONG) if isinstance(found, RecordHead) else found)
    assert isinstance(check_record(head.pack(), memoryview(coded), NAME), Verdict)


def test_no_bit_of_a_coded_value_may_differ() -> None:
    value = bytearray(CODED_HEAD.pack() + CODED)
    assert open_bytes(value, len(LONG)) == (CODED_HEAD, LONG)
    for bit in range(8 * len(value)):
        value[bit // 8] ^= 1 << bit % 8
        assert open_bytes(value, len(LONG)) is Verdict.DAMAGED, bit
        value[bit // 8] ^= 1 << bit % 8


def test_a_coded_value_is_decoded_where_it_is_wanted() -> None:
    room = memoryview(bytearray(len(LONG)))
    opened = open_value(memoryview(CODED_HEAD.pack() + CODED), NAME, len(LONG), room=room)
    assert isinstance(opened, OpenValue)
    assert opened.record is room
    assert room == LONG


def pack_sealed(data: bytes, coded: bytes | None = None) -> bytes:
    head, sealed = pack_value(NAME, data, digest_of(memoryview(data), NAME), b"P" * 32, coded=coded, keys=KEYS)
    assert len(head) + len(sealed) <= most_value_bytes(len(data), KEYS)
    return head + bytes(sealed)


@pytest.mark.parametrize(("data", "coded", "head"), [(DATA, None, HEAD), (LONG, CODED, CODED_HEAD)])
def test_a_sealed_value_is_opened(data: bytes, coded: bytes | None, head: RecordHead) -> None:
    value = memoryview(pack_sealed(data, coded))
    room = memoryview(bytearray(len(data)))
    for opened in (
        open_value(value, NAME, len(data), keys=KEYS),
        open_value(value, NAME, len(data), keys=KEYS, room=room),
    ):
        assert isinstance(opened, OpenValue)
        assert (opened.head, bytes(opened.record)) == (head, data)
    assert room == data
    said = read_head(value)
    assert isinstance(said, RecordHead)
    assert (said.is_sealed, said.digest, said.parent) == (True, KEYS.sealing, b"P" * 32)
    assert open_value(value, NAME, len(data) + 1, keys=KEYS) is Verdict.OTHER
    # A server without a key leaves it there, and one with another key takes its place.
    assert open_value(value, NAME, len(data)) is Verdict.OTHER
    assert open_value(value, NAME, len(data), keys=make_keys(2)) is Verdict.DAMAGED


def test_the_bytes_of_a_sealed_record_are_those_of_version_3() -> None:
    lengths = (100, 100 + native.SEAL_OVERHEAD_BYTES)
    fields = struct.pack("<4sHHIIIIQ", MAGIC, 3, 2, 3, 1, *lengths, KEYS.sealing)
    assert pack_sealed(DATA)[:HEAD_BYTES] == seal(fields + b"F" * 32 + b"H" * 32 + b"P" * 32)


def test_no_bit_of_a_sealed_value_may_differ() -> None:
    value = bytearray(pack_sealed(DATA))
    for bit in range(8 * len(value)):
        value[bit // 8] ^= 1 << bit % 8
        assert open_value(memoryview(value), NAME, len(DATA), keys=KEYS) is Verdict.DAMAGED, bit
        value[bit // 8] ^= 1 << bit % 8


def test_a_head_is_what_a_seal_is_bound_to() -> None:
    value = pack_sealed(DATA)
    head = read_head(value)
    assert isinstance(head, RecordHead)
    for changed in (
        replace(head, parent=b"Q" * 32),
        replace(head, digest=head.digest ^ 1),
        replace(head, coded_bytes=head.coded_bytes - 1),
        replace(head, is_sealed=False),
        replace(head, coded_bytes=0, is_sealed=False, digest=HEAD.digest),
        replace(head, name=replace(NAME, block_hash=b"I" * 32)),
    ):
        with_it = memoryview(changed.pack() + value[HEAD_BYTES:])
        assert open_value(with_it, NAME, len(DATA), keys=KEYS) is Verdict.DAMAGED
        assert open_value(with_it, changed.name, len(DATA), keys=KEYS) is Verdict.DAMAGED


@pytest.mark.parametrize(("head", "body", "length"), [(HEAD, DATA, len(DATA)), (CODED_HEAD, CODED, len(LONG))])
def test_a_value_that_is_not_sealed_is_damaged_where_there_are_keys(head: RecordHead, body: bytes, length: int) -> None:
    assert open_value(memoryview(head.pack() + body), NAME, length, keys=KEYS) is Verdict.DAMAGED


def test_keys_say_all_of_a_name_and_begin_alike() -> None:
    assert len(NAME.key) == KEY_BYTES == 72
    assert read_key(NAME.key) == NAME
    names = list(list_names(RecordNames(fingerprint=b"F" * 32, hashes=b"H" * 32 + b"I" * 32, group=3, shard=1)))
    assert names[0] == NAME
    assert names[1].block_hash == b"I" * 32
    assert names[1].key[:40] == NAME.key[:40]


def make_batch(count: int) -> tuple[RecordNames, np.ndarray, np.ndarray]:
    """Names, records and their digests."""
    random = np.random.default_rng(7)
    names = RecordNames(fingerprint=b"F" * 32, hashes=random.bytes(32 * count), group=3, shard=1)
    records = random.integers(0, 256, (count, len(DATA)), np.uint8)
    digests = [digest_of(record.data, name) for record, name in zip(records, list_names(names), strict=True)]
    return names, records, np.array(digests, np.uint64)


def test_a_batch_has_the_keys_of_its_records() -> None:
    names, _, _ = make_batch(3)
    assert list_keys(names) == [name.key for name in list_names(names)]
    assert list_keys(names.choose(np.array([0, 2]))) == [list_keys(names)[0], list_keys(names)[2]]


def test_digests_of_slots_are_those_of_their_records() -> None:
    names, records, digests = make_batch(5)
    slots = np.uint64(records.ctypes.data) + np.arange(5, dtype=np.uint64) * np.uint64(len(DATA))
    assert digest_slots(names, slots, len(DATA)).tolist() == digests.tolist()
    assert digest_slots(names.choose(np.arange(0)), slots[:0], len(DATA)).tolist() == []
    with pytest.raises(ValueError, match="slots must have 8 bytes and block_hashes 32"):
        digest_slots(names, slots[1:], len(DATA))


@pytest.mark.parametrize("has_parents", [True, False])
def test_heads_of_a_batch_are_those_of_its_records(has_parents: bool) -> None:
    names, _, digests = make_batch(4)
    parents = np.random.default_rng(8).bytes(4 * 32) if has_parents else b""
    heads = pack_heads(names, len(DATA), digests, parents)
    for at, name in enumerate(list_names(names)):
        parent = parents[at * 32 : at * 32 + 32] or bytes(32)
        assert heads[at].tobytes() == RecordHead(name, len(DATA), int(digests[at]), parent).pack()
    came = CameRecords(heads, digests)
    assert came.are(names, len(DATA)).all()
    assert came.parents.tobytes() == (parents or bytes(4 * 32))


def test_of_records_that_came_each_bit_of_their_heads_is_looked_at() -> None:
    names, _, digests = make_batch(1)
    heads = pack_heads(names, len(DATA), digests, b"P" * 32)
    for bit in range(8 * HEAD_BYTES):
        broken = heads.copy()
        broken[0, bit // 8] ^= 1 << bit % 8
        assert not CameRecords(broken, digests).are(names, len(DATA)).any(), bit
    assert not CameRecords(heads, digests).are(names, len(DATA) + 1).any()
    assert not CameRecords(heads, digests + np.uint64(1)).are(names, len(DATA)).any()
    assert not CameRecords(heads, digests).are(make_batch(2)[0].choose(np.array([1])), len(DATA)).any()
    coded = np.frombuffer(CODED_HEAD.pack(), np.uint8).reshape(1, -1)
    assert not CameRecords(coded, digests).are(names, len(LONG)).any()
