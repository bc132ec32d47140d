"""The codec through its Python door, and coded records as docs/format.md defines them, by a codec in plain Python."""

from __future__ import annotations

import os
import re
import signal
import struct
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import native

VECTORS = (Path(__file__).parents[1] / "golden" / "record-vectors.txt").read_text()
PARTS = 2048
LOWEST_STATE = 1 << 15
LANES = 32
UNIT_BYTES = {1: 2, 2: 2, 3: 4}


def split_unit(kind: int, unit: bytes) -> tuple[int, bytes]:
    """Its symbol and its rest."""
    if kind == 2:
        first, second = unit
        rest = first & 7 | first >> 7 << 3 | (second & 7 | second >> 7 << 3) << 4
        return first >> 3 & 15 | (second >> 3 & 15) << 4, bytes([rest])
    (upper,) = struct.unpack("<H", unit[-2:])
    return upper >> 7 & 255, bytes([upper & 127 | upper >> 15 << 7]) + unit[:-2]


def join_unit(kind: int, symbol: int, rest: bytes) -> bytes:
    if kind == 2:
        halves = ((symbol & 15, rest[0] & 15), (symbol >> 4, rest[0] >> 4))
        return bytes(upper << 3 | lower & 7 | lower >> 3 << 7 for upper, lower in halves)
    return rest[1:] + struct.pack("<H", symbol << 7 | rest[0] & 127 | rest[0] >> 7 << 15)


def raise_symbol(kind: int, symbol: int, height: int, sign: int = 1) -> int:
    if kind == 2:
        return (symbol + sign * height) % 16 | ((symbol >> 4) + sign * (height >> 4)) % 16 << 4
    return (symbol + sign * height) % 256


def read_heights(kind: int, data: bytes, columns: int) -> list[int]:
    if kind == 2:
        return list(data)
    return [data[0] - 128 + (data[1 + at // 2] >> at % 2 * 4 & 15) for at in range(columns)]


def heights_size(kind: int, columns: int) -> int:
    return 0 if columns == 0 else columns if kind == 2 else 1 + columns // 2


def chunk_units(columns: int) -> int:
    return 65_536 // (64 * columns) * 64 * columns if columns else 65_536


def list_parts(table: dict[int, int]) -> list[tuple[int, int, int]]:
    """Lists of each of the 2048 its symbol, that symbol's parts and where they begin."""
    listed: list[tuple[int, int, int]] = []
    for symbol, parts in sorted(table.items()):
        listed += [(symbol, parts, len(listed))] * parts
    return listed


def decode_by_page(coded: bytes) -> bytes:
    """The page, read as a decoder."""
    version, kind, groups, zeros, length = struct.unpack_from("<BBB5sQ", coded)
    assert (version, zeros) == (1, bytes(5))
    left, at, record = length // UNIT_BYTES[kind] // LANES * LANES, 16, b""
    while left:
        units = min(chunk_units(LANES * groups), left)
        (said,) = struct.unpack_from("<I", coded, at)
        body = coded[at + 4 : at + 4 + said % 2**31]
        record += body if said >> 31 else decode_chunk(body, kind, LANES * groups, units)
        at += 4 + len(body)
        left -= units
    return record + coded[at:]


def decode_chunk(body: bytes, kind: int, columns: int, units: int) -> bytes:
    width = UNIT_BYTES[kind] - 1
    rests = [body[i : i + 1] + body[units + (width - 1) * i : units + (width - 1) * (i + 1)] for i in range(units)]
    at, size = units * width, heights_size(kind, columns)
    heights: list[int] = []
    for _ in range(0, units if columns else 0, 64 * columns or 1):
        heights += read_heights(kind, body[at : at + size], columns) * 64
        at += size
    table = {}
    first, last = body[at : at + 2]
    at += 2
    for symbol in range(first, last + 1):
        long = body[at] >= 128
        table[symbol] = (body[at] - 128) * 256 + body[at + 1] if long else body[at]
        at += 2 if long else 1
    assert sum(table.values()) == PARTS
    listed = list_parts(table)
    states = list(struct.unpack_from(f"<{LANES}I", body, at))
    words = iter(struct.unpack(f"<{(len(body) - at - 4 * LANES) // 2}H", body[at + 4 * LANES :]))
    decoded = []
    for i, rest in enumerate(rests):
        x = states[i % LANES]
        symbol, parts, start = listed[x % PARTS]
        x = parts * (x // PARTS) + x % PARTS - start
        states[i % LANES] = x if x >= LOWEST_STATE else x * 65_536 + next(words)
        decoded.append(join_unit(kind, raise_symbol(kind, symbol, heights[i] if columns else 0), rest))
    assert states == [LOWEST_STATE] * LANES
    assert next(words, None) is None
    return b"".join(decoded)


def code_by_page(record: bytes, kind: int, heights: bytes, *, is_plain: bool = False) -> bytes:
    """A code of it that the page permits, short or not. `heights`: a strip's as they are written, the same in each."""
    size = UNIT_BYTES[kind]
    columns = len(heights) if kind == 2 else max(2 * (len(heights) - 1), 0)
    units = len(record) // size // LANES * LANES
    coded = struct.pack("<BBB5sQ", 1, kind, columns // LANES, bytes(5), len(record))
    for begin in range(0, units, chunk_units(columns)):
        part = record[begin * size : min(begin + chunk_units(columns), units) * size]
        body = part if is_plain else code_chunk(part, kind, columns, heights)
        coded += struct.pack("<I", len(body) | is_plain << 31) + body
    return coded + record[units * size :]


def code_chunk(part: bytes, kind: int, columns: int, heights: bytes) -> bytes:
    size = UNIT_BYTES[kind]
    pairs = [split_unit(kind, part[at : at + size]) for at in range(0, len(part), size)]
    every = read_heights(kind, heights, columns) or [0]
    symbols = [raise_symbol(kind, symbol, every[i % len(every)], -1) for i, (symbol, _) in enumerate(pairs)]
    table = share_parts(Counter(symbols))
    starts = {symbol: start for symbol, _, start in list_parts(table)}
    states, words = [LOWEST_STATE] * LANES, []
    for i in reversed(range(len(symbols))):
        x, parts = states[i % LANES], table[symbols[i]]
        if x >= parts << 20:
            words.append(x % 65_536)
            x //= 65_536
        states[i % LANES] = x // parts * PARTS + x % parts + starts[symbols[i]]
    strips = -(-len(symbols) // (64 * columns)) if columns else 0
    body = b"".join(rest[:1] for _, rest in pairs) + b"".join(rest[1:] for _, rest in pairs) + heights * strips
    body += bytes([min(table), max(table)])
    for symbol in range(min(table), max(table) + 1):
        parts = table.get(symbol, 0)
        body += bytes([parts]) if parts < 128 else bytes([128 + parts // 256, parts % 256])
    return body + struct.pack(f"<{LANES}I{len(words)}H", *states, *reversed(words))


def share_parts(counts: Counter[int]) -> dict[int, int]:
    """Shares parts out as they are, but for rounding; two symbols at least, as none may have all."""
    if len(counts) == 1:
        (only,) = counts
        return {only: PARTS - 1, (only + 1) % 256: 1}
    table = {symbol: max(count * PARTS // counts.total(), 1) for symbol, count in counts.items()}
    table[max(table, key=table.__getitem__)] += PARTS - sum(table.values())
    return table


def make_record(seed: int, numbers: int) -> bytes:
    """Makes a record in bfloat16, of a normal distribution."""
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

    def test_a_forked_child_is_told_whose_it_is_and_ends(self) -> None:
        encoder = native.BackgroundEncoder()
        assert encoder.encode(make_record(1, 50_000)), "its thread has begun"
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # one that waits for the thread is killed
            code = 2
            try:
                encoder.encode(make_record(1, 50_000))
            except ValueError as fault:
                code = 0 if "belongs to the process that made it" in str(fault) else 1
            # A thread of its own may have the place of the one that it has not.
            may_end = threading.Event()
            threading.Thread(target=may_end.wait).start()
            del encoder
            may_end.set()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert encoder.encode(make_record(1, 50_000))

    def test_its_path_is_named(self) -> None:
        assert native.codec_path() in ("avx512", "avx2", "portable")


def read_vectors() -> list[tuple[str, bytes, bytes]]:
    """Of each one its heading, the record and the coded record."""
    text = VECTORS.partition("## Test vectors of coded records\n")[2].partition("\n## ")[0]
    found = re.findall(r"^### (.+?)\n.*?^```text\nrecord\n(.+?)\ncoded\n(.+?)\n```", text, re.MULTILINE | re.DOTALL)
    return [(heading, bytes.fromhex(record), bytes.fromhex(coded)) for heading, record, coded in found]


class TestPage:
    @pytest.mark.parametrize(("heading", "record", "coded"), read_vectors())
    def test_vectors(self, heading: str, record: bytes, coded: bytes) -> None:
        assert decode(coded, len(record)) == record, heading
        assert decode_by_page(coded) == record, heading

    def test_vectors_have_all_kinds_of_units_and_of_chunks(self) -> None:
        coded = [coded for _, _, coded in read_vectors()]
        assert {one[1] for one in coded} == {1, 2, 3}
        assert {one[2] > 0 for one in coded} == {one[19] >> 7 > 0 for one in coded} == {True, False}

    def test_the_first_vector_is_what_is_written(self) -> None:
        _, record, coded = read_vectors()[0]
        assert native.RecordEncoder().encode(record) == coded

    @given(
        record=st.binary(max_size=900),
        kind=st.sampled_from([1, 2, 3]),
        groups=st.integers(0, 2),
        seed=st.integers(0, 2**32),
        is_plain=st.booleans(),
    )
    def test_whatever_the_page_permits_is_decoded(
        self, record: bytes, kind: int, groups: int, seed: int, is_plain: bool
    ) -> None:
        heights = np.random.default_rng(seed).bytes(heights_size(kind, LANES * groups))
        coded = code_by_page(record, kind, heights, is_plain=is_plain)
        assert decode_by_page(coded) == record
        assert decode(coded, len(record)) == record

    @pytest.mark.parametrize(("kind", "bits"), [(1, 16), (2, 8), (3, 32)])
    def test_what_is_coded_is_what_the_page_says(self, kind: int, bits: int) -> None:
        """Several chunks in columns, one of them kept as it is; the last strip is not whole; bytes are left over."""
        length = 300_003
        drawn = np.random.default_rng(bits).normal(size=length).astype(np.float32)
        drawn *= np.float32(2) ** (np.arange(length) * 7 % 96 // 8 % 5).astype(np.float32)
        words = drawn.view(np.uint32)
        eight = (words >> 24 & 0x80 | (words >> 20) - (120 << 3) & 0x7F).astype(np.uint8)
        made = bytearray({8: eight, 16: (words >> 16).astype(np.uint16), 32: words}[bits].tobytes() + b"\7")
        noise = slice(65_536 * UNIT_BYTES[kind], 2 * 65_536 * UNIT_BYTES[kind])
        made[noise] = np.random.default_rng(kind).bytes(len(made[noise]))
        coded = native.RecordEncoder().encode(made)
        assert coded is not None
        assert (coded[1], coded[2] > 0) == (kind, True)
        assert decode_by_page(coded) == made
