"""The record digest: docs/format.md, a reference in plain Python and the native core say the same."""

from __future__ import annotations

import random
import re
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import native

VECTORS = (Path(__file__).parents[1] / "golden" / "record-vectors.txt").read_text()
PRIME = 2**64 + 13
ENVELOPE_AT = 2**63
NAME = {"fingerprint": bytes(range(32)), "block_hash": bytes(range(32, 64)), "group": 0, "shard": 0}


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def word_key(j: int) -> int:
    return mix((0x243F6A8885A308D3 + j * 0x9E3779B97F4A7C15) % 2**64) & 0x0FFFFFFF0FFFFFFF


def chunk_multiplier(c: int) -> int:
    return mix((0xB7E151628AED2A6A + c * 0x9E3779B97F4A7C15) % 2**64)


def digest_run(run: bytes, offset: int = 0) -> int:
    """Digests by the definition: whole words of the record, with zeros for the bytes that the run does not have."""
    padded = bytes(offset % 8) + run + bytes(-(offset + len(run)) % 8)
    words: tuple[int, ...] = struct.unpack(f"<{len(padded) // 8}Q", padded)
    keyed = ((i, w) for i, w in enumerate(words, offset // 8) if w)
    return sum(w * word_key(i % 512) * chunk_multiplier(i // 512) for i, w in keyed) % PRIME


def finish_digest(
    total: int, record_bytes: int, *, fingerprint: bytes, block_hash: bytes, group: int, shard: int
) -> int:
    envelope = fingerprint + block_hash + struct.pack("<IIQQ", group, shard, record_bytes, 1)
    return mix((total + digest_run(envelope, ENVELOPE_AT)) % PRIME % 2**64) or 1


def make_record(length: int) -> bytes:
    """The pattern of the vectors."""
    return (bytes(range(251, 0, -1)) * (length // 251 + 1))[:length]


def read_table(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without code marks."""
    text = VECTORS.partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = [re.sub("`", "", line).strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 2, heading
    return [[cell.strip() for cell in row] for row in rows[2:]]


def number(cell: str) -> int:
    return 1 << int(cell[2:]) if cell.startswith("2^") else int(cell, 0)


class TestVectors:
    @pytest.mark.parametrize("row", read_table("Factors"))
    def test_factors(self, row: list[str]) -> None:
        what, index, value = row
        assert {"K": word_key, "M": chunk_multiplier}[what](number(index)) == number(value)

    @pytest.mark.parametrize("row", read_table("Records"))
    def test_records(self, row: list[str]) -> None:
        length, total, digest = map(number, row)
        record = make_record(length)
        assert digest_run(record) == native.digest_run(record) == total
        assert finish_digest(total, length, **NAME) == digest  # type: ignore[arg-type]
        assert native.digest_record(record, **NAME) == digest  # type: ignore[arg-type]

    def test_runs(self) -> None:
        *runs, last = read_table("Runs of one record")
        record, total = make_record(10_000), 0
        for row in runs:
            offset, length, part = map(number, row)
            run = record[offset : offset + length]
            assert digest_run(run, offset) == native.digest_run(run, offset) == part
            total += part
        assert [last[0], number(last[1]), number(last[2])] == ["all", len(record), total % PRIME]
        assert sum(number(row[1]) for row in runs) == len(record)
        assert native.digest_run(record) == total % PRIME
        assert native.finish_digest(total, len(record), **NAME) == native.digest_record(record, **NAME)  # type: ignore[arg-type]

    @pytest.mark.parametrize("row", read_table("Names"))
    def test_names(self, row: list[str]) -> None:
        name = {
            "fingerprint": bytes.fromhex(row[0]) * 32,
            "block_hash": bytes.fromhex(row[1]) * 32,
            "group": number(row[2]),
            "shard": number(row[3]),
        }
        record = make_record(17)
        assert finish_digest(digest_run(record), 17, **name) == number(row[4])  # type: ignore[arg-type]
        assert native.digest_record(record, **name) == number(row[4])  # type: ignore[arg-type]


class TestDigest:
    @given(
        record=st.binary(max_size=9000),
        offset=st.one_of(st.integers(0, 10_000), st.integers(0, 2**63 - 9000)),
        fingerprint=st.binary(min_size=32, max_size=32),
        block_hash=st.binary(min_size=32, max_size=32),
        group=st.integers(0, 2**32 - 1),
        shard=st.integers(0, 2**32 - 1),
    )
    def test_equals_the_definition(
        self, record: bytes, offset: int, fingerprint: bytes, block_hash: bytes, group: int, shard: int
    ) -> None:
        assert native.digest_run(record, offset) == digest_run(record, offset)
        name = {"fingerprint": fingerprint, "block_hash": block_hash, "group": group, "shard": shard}
        expected = finish_digest(digest_run(record), len(record), **name)  # type: ignore[arg-type]
        assert native.digest_record(record, **name) == expected  # type: ignore[arg-type]

    @given(total=st.integers(-(2**130), 2**130))
    def test_a_total_is_taken_modulo_the_prime(self, total: int) -> None:
        assert native.finish_digest(total, 7, **NAME) == finish_digest(total, 7, **NAME)  # type: ignore[arg-type]

    def test_no_record_has_the_digest_that_means_none(self) -> None:
        total = native.NO_DIGEST - digest_run(
            NAME["fingerprint"] + NAME["block_hash"] + struct.pack("<IIQQ", 0, 0, 5, 1),  # type: ignore[operator]
            ENVELOPE_AT,
        )
        assert native.finish_digest(total, 5, **NAME) == 1  # type: ignore[arg-type]

    @given(st.lists(st.binary(min_size=40, max_size=40), max_size=6))
    def test_records_in_a_row(self, records: list[bytes]) -> None:
        hashes = [bytes([i]) * 32 for i in range(len(records))]
        name = {"fingerprint": bytes(32), "group": 1, "shard": 2}
        digests = native.digest_records(b"".join(records), 40, block_hashes=b"".join(hashes), **name)  # type: ignore[arg-type]
        expected = [native.digest_record(r, block_hash=h, **name) for r, h in zip(records, hashes, strict=True)]  # type: ignore[arg-type]
        assert np.frombuffer(digests, np.uint64).tolist() == expected

    def test_threads_digest_at_once(self) -> None:
        record = random.Random(1).randbytes(1 << 20)
        expected, results = native.digest_run(record), []
        threads = [threading.Thread(target=lambda: results.append(native.digest_run(record))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected] * 4

    def test_read_bytes_reads_them_all(self) -> None:
        assert native.read_bytes(bytes(1000)) == 0
        assert native.read_bytes(bytes(999) + b"\x01") == 1 << 56

    def test_the_path_is_named(self) -> None:
        features = set(native.capabilities().cpu_features)
        expected = "avx512" if "avx512f" in features else "avx2" if "avx2" in features else "portable"
        assert native.digest_path() == expected

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"fingerprint": b"short"}, "fingerprint must have 32 bytes, not 5"),
            ({"block_hash": b""}, "block_hash must have 32 bytes, not 0"),
            ({"group": -1}, "group must be 0 to 2**32 - 1, not -1"),
            ({"shard": 2**32}, "shard must be 0 to 2**32 - 1, not 4294967296"),
        ],
    )
    def test_a_bad_name_is_a_value_error_that_says_so(self, change: dict[str, object], words: str) -> None:
        name: dict[str, object] = {**NAME, **change}
        with pytest.raises(ValueError, match=re.escape(words)):
            native.digest_record(b"abc", **name)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=re.escape(words)):
            native.finish_digest(0, 3, **name)  # type: ignore[arg-type]

    def test_bad_sizes_are_value_errors(self) -> None:
        with pytest.raises(ValueError, match="longer than"):
            native.digest_run(b"abc", 2**63 - 2)
        with pytest.raises(ValueError, match="longer than"):
            native.finish_digest(0, 2**63 + 1, **NAME)  # type: ignore[arg-type]
        rest = {"fingerprint": bytes(32), "group": 0, "shard": 0}
        for data, size, hashes in [(b"abcd", 3, bytes(32)), (b"abcd", 2**63, bytes(64)), (b"a", 0, bytes(32))]:
            with pytest.raises(ValueError, match="for each of"):
                native.digest_records(data, size, block_hashes=hashes, **rest)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="32 bytes for each record"):
            native.digest_records(b"", 3, block_hashes=bytes(31), **rest)  # type: ignore[arg-type]

    def test_totals_are_finished_together(self) -> None:
        records = [make_record(5000)] * 3 + [bytes(5000)]
        hashes = [bytes([index] * 32) for index in range(len(records))]
        totals = np.array([divmod(native.digest_run(record), 2**64)[::-1] for record in records], np.uint64)
        rest = {"fingerprint": bytes(range(32)), "group": 2, "shard": 3}
        batch = native.finish_digests(totals.data, 5000, block_hashes=b"".join(hashes), **rest)  # type: ignore[arg-type]
        assert struct.unpack("=4Q", batch) == tuple(
            native.digest_record(record, block_hash=block_hash, **rest)  # type: ignore[arg-type]
            for record, block_hash in zip(records, hashes, strict=True)
        )
        for wrong in (bytes(15), bytes(32)):
            with pytest.raises(ValueError, match="16 bytes and block_hashes 32"):
                native.finish_digests(wrong, 5000, block_hashes=bytes(32), **rest)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="longer than"):
            native.finish_digests(bytes(16), 2**63 + 1, block_hashes=bytes(32), **rest)  # type: ignore[arg-type]

    def test_what_is_no_buffer_is_refused(self) -> None:
        with pytest.raises(TypeError):
            native.digest_run("text")  # type: ignore[arg-type]
        with pytest.raises(BufferError):
            native.digest_run(memoryview(b"abcdef")[::2])
