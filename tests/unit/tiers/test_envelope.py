"""A record and its head: what is read back is what was packed, or it is damaged."""

from __future__ import annotations

import struct

import pytest

from kvoffload import native
from kvoffload.tiers.base import RecordNames
from kvoffload.tiers.envelope import (
    HEAD_BYTES,
    KEY_BYTES,
    MAGIC,
    RecordHead,
    RecordName,
    Verdict,
    check_record,
    digest_of,
    list_names,
    open_value,
    read_head,
    read_key,
)

NAME = RecordName(b"F" * 32, 3, 1, b"H" * 32)
DATA = bytes(range(100))
HEAD = RecordHead(NAME, len(DATA), digest_of(memoryview(DATA), NAME), b"P" * 32)


def test_a_head_is_read_as_it_was_packed() -> None:
    packed = HEAD.pack()
    assert len(packed) == HEAD_BYTES == 136
    assert read_head(packed) == HEAD
    assert read_head(memoryview(packed + DATA)) == HEAD


def test_its_bytes_are_those_of_version_1() -> None:
    fields = struct.pack("<4sHHIIQQ", MAGIC, 1, 0, 3, 1, 100, HEAD.digest) + b"F" * 32 + b"H" * 32 + b"P" * 32
    assert HEAD.pack() == fields + struct.pack("<Q", native.digest_run(fields))


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
    struct.pack_into("<H", fields, 4, 2)
    later = bytes(fields) + struct.pack("<Q", native.digest_run(bytes(fields)))
    assert read_head(later) is Verdict.OTHER
    assert open_value(memoryview(later + DATA), NAME, len(DATA)) is Verdict.OTHER


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
    assert open_value(memoryview(head.pack() + data), NAME, record_bytes) == found
    if record_bytes == head.record_bytes:
        assert check_record(head.pack(), memoryview(data), NAME) == found


def test_keys_say_all_of_a_name_and_begin_alike() -> None:
    assert len(NAME.key) == KEY_BYTES == 72
    assert read_key(NAME.key) == NAME
    names = list(list_names(RecordNames(fingerprint=b"F" * 32, hashes=b"H" * 32 + b"I" * 32, group=3, shard=1)))
    assert names[0] == NAME
    assert names[1].block_hash == b"I" * 32
    assert names[1].key[:40] == NAME.key[:40]
