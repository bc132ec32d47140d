"""Shared values."""

from __future__ import annotations

import hashlib

from kvoffload.types import HASH_BYTES


def test_a_hash_is_as_long_as_a_sha256() -> None:
    assert hashlib.sha256().digest_size == HASH_BYTES
