"""The codec through its Python door: what is coded comes back, whoever else codes meanwhile; damage does not."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvoffload import native


def make_record(seed: int, numbers: int) -> bytes:
    """In bfloat16, of a normal distribution."""
    drawn = np.random.default_rng(seed).normal(size=numbers).astype(np.float32)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def decode(coded: bytes, length: int) -> bytes | None:
    record = bytearray(length)
    return bytes(record) if native.decode_record(coded, record) else None


class TestCodec:
    @pytest.mark.parametrize("numbers", [2000, 65_536, 200_001])
    def test_what_is_coded_comes_back(self, numbers: int) -> None:
        record = make_record(1, numbers)
        coded = native.RecordEncoder().encode(record)
        assert coded is not None
        assert len(coded) <= 0.95 * len(record)
        assert decode(coded, len(record)) == record

    def test_what_would_not_be_shorter_is_kept_as_it_is(self) -> None:
        encoder = native.RecordEncoder()
        assert encoder.encode(np.random.default_rng(2).bytes(100_000)) is None
        assert encoder.encode(b"") is None

    def test_what_is_damaged_does_not_come_back(self) -> None:
        record = make_record(3, 4000)
        coded = native.RecordEncoder().encode(record)
        assert coded is not None
        assert decode(coded[:-1], len(record)) is None
        assert decode(coded + b"\0", len(record)) is None
        assert decode(coded, len(record) + 1) is None
        assert decode(b"\2" + coded[1:], len(record)) is None
        assert decode(b"", 0) is None

    def test_it_writes_only_where_it_may(self) -> None:
        record = make_record(4, 4000)
        coded = native.RecordEncoder().encode(record)
        assert coded is not None
        with pytest.raises(BufferError):
            native.decode_record(coded, bytes(len(record)))
        with pytest.raises(TypeError):
            native.decode_record(coded, None)  # type: ignore[arg-type]

    def test_threads_that_share_an_encoder_take_turns(self) -> None:
        encoder, records = native.RecordEncoder(), [make_record(seed, 50_000 + seed) for seed in range(4)]
        wrong: list[int] = []

        def code(at: int) -> None:
            for _ in range(20):
                coded = encoder.encode(records[at])
                if coded is None or decode(coded, len(records[at])) != records[at]:
                    wrong.append(at)

        threads = [threading.Thread(target=code, args=(at,)) for at in range(len(records))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_its_path_is_named(self) -> None:
        assert native.codec_path() in ("avx512", "avx2", "portable")
