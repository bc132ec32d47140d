"""The seal of records through its Python door, and a sealed record as docs/format.md defines it."""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Any

import pytest

from kvoffload import native
from tests.kit.tiers.seals import make_keys

KEY = bytes(range(96, 128))
NAME: dict[str, Any] = {
    "fingerprint": bytes(range(32)),
    "block_hash": bytes(range(32, 64)),
    "group": 3,
    "shard": 1,
    "parent": bytes(range(64, 96)),
}
RECORD = bytes(251 - at % 251 for at in range(17))
DIGEST = 0x2D31E5CC5F445757
SEALED = bytes.fromhex(
    "808182838485868788898a8b8c8d8e8f84d26991447f5f3a4ec0bb0084b2a244a4cc9cce89dbefebabe6f277d594"
    "2d7a0ffcaba69037253b19cfe99fb2bb45ba5c"
)
"""Made with another implementation of AES-GCM."""


def test_the_number_of_a_key_is_what_the_page_says() -> None:
    derived = hmac.digest(KEY, b"kvoffload number of a key", hashlib.sha256)
    keys = native.SealKeys([KEY, bytes(32)])
    assert keys.sealing == struct.unpack("<Q", derived[:8])[0]
    assert keys.has(keys.sealing)
    assert keys.has(native.SealKeys([bytes(32)]).sealing)
    assert not keys.has(0)


def test_the_record_of_the_page_opens() -> None:
    keys, room = native.SealKeys([KEY]), bytearray(17)
    assert keys.open(SEALED, room, number=keys.sealing, **NAME) == DIGEST
    assert room == RECORD


def test_what_is_sealed_opens_under_its_name_alone() -> None:
    keys, room = make_keys(1), bytearray(17)
    sealed = keys.seal(RECORD, is_coded=False, digest=DIGEST, record_bytes=17, **NAME)
    assert len(sealed) == len(RECORD) + native.SEAL_OVERHEAD_BYTES
    assert keys.open(sealed, room, number=keys.sealing, **NAME) == DIGEST
    for changed in ({"group": 4}, {"shard": 0}, {"block_hash": bytes(32)}, {"parent": bytes(32)}):
        assert keys.open(sealed, room, number=keys.sealing, **NAME | changed) is None
    assert keys.open(sealed, bytearray(18), number=keys.sealing, **NAME) is None
    assert keys.open(sealed[:40], room, number=keys.sealing, **NAME) is None
    assert keys.open(sealed, room, number=make_keys(2).sealing, **NAME) is None
    assert make_keys(2).open(sealed, room, number=keys.sealing, **NAME) is None


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one key"):
        native.SealKeys([])
    with pytest.raises(ValueError, match="32 bytes"):
        native.SealKeys([b"short"])
    with pytest.raises(ValueError, match="32 bytes"):
        make_keys(1).seal(RECORD, is_coded=False, digest=1, record_bytes=17, **NAME | {"parent": b""})
