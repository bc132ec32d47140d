"""Compares the codec with zstd and zlib on the same bytes: how much shorter records become, and how fast one core is.

Each record is coded by itself, as a tier does it. All codes take turns on the same records, and the best of several
rounds counts. Times are processor time of this thread, so other users of the machine matter little. The limit is a
copy of the same bytes. One JSON line for each kind of record; ratios and times are of all its records together.

Records are those of `benchmarks/kv_records.py`, which are made where the folder has none: half a minute.

Run: python -m benchmarks.codec FOLDER [MODEL_FOLDER]
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

from benchmarks.kv_records import TEXTS, make_missing, parse_folders
from kvoffload import native
from kvoffload.units import MIB, SIZE_UNITS

ROUNDS = 5
SAMPLE_BYTES = 32 * MIB
"""So much is taken of each kind, in records that are spread over its files."""
KINDS: Mapping[str, Sequence[str]] = {
    "text_bf16": [f"{text}_bf16" for text in TEXTS],
    "text_fp8": [f"{text}_fp8" for text in TEXTS],
    "random_weights_bf16": ["random_weights_bf16"],
    "states_fp32": ["states_fp32"],
    "scales_fp32": ["scales_fp32"],
    "random_bytes": ["random_bytes"],
}
"""Files of `benchmarks/kv_records.py`; none in fp16, which were made of bfloat16 and so have three bits of zeros."""


@dataclass(frozen=True)
class Code:
    """`encode` answers None where a record is kept as it is. `decode` fills memory of the record's length."""

    encode: Callable[[memoryview], bytes | None]
    decode: Callable[[bytes, memoryview], object]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """This is what one code made of one kind of records. `decode_bytes_s` is None where all are kept as they are."""

    ratio: float
    encode_bytes_s: float
    decode_bytes_s: float | None

    def as_json(self) -> dict[str, float | None]:
        decode = self.decode_bytes_s
        return {
            "ratio": round(self.ratio, 3),
            "encode_gb_s": round(self.encode_bytes_s / SIZE_UNITS["GB"], 3),
            "decode_gb_s": None if decode is None else round(decode / SIZE_UNITS["GB"], 3),
        }


def make_codes() -> dict[str, Code]:
    """Returns the codes by name; `copy` is the limit."""
    unpack = zstandard.ZstdDecompressor()

    def fill(data: bytes, target: memoryview) -> None:
        target[:] = data

    def unpack_zstd(coded: bytes, target: memoryview) -> None:
        unpack.stream_reader(coded).readinto(target)

    return {
        "kvoffload": Code(native.RecordEncoder().encode, native.decode_record),
        "zstd-1": Code(zstandard.ZstdCompressor(level=1).compress, unpack_zstd),
        "zstd-3": Code(zstandard.ZstdCompressor(level=3).compress, unpack_zstd),
        "zlib-1": Code(
            lambda record: zlib.compress(record, 1), lambda coded, target: fill(zlib.decompress(coded), target)
        ),
        "copy": Code(bytes, fill),
    }


def measure(records: Sequence[memoryview], codes: Mapping[str, Code], *, rounds: int = ROUNDS) -> dict[str, Figures]:
    """Returns figures by the code's name. What does not come back as it was is a RuntimeError."""
    before = sum(map(len, records))
    after: dict[str, int] = {}
    coded_bytes: dict[str, int] = {}
    encode_s, decode_s = dict.fromkeys(codes, math.inf), dict.fromkeys(codes, math.inf)
    target = memoryview(bytearray(max(map(len, records))))
    for _ in range(rounds):
        for name, code in codes.items():
            begun_s = time.thread_time()
            coded = [code.encode(record) for record in records]
            encode_s[name] = min(encode_s[name], time.thread_time() - begun_s)
            after[name] = sum(len(record if one is None else one) for record, one in zip(records, coded, strict=True))
            coded_bytes[name] = 0
            taken_s = 0.0
            for record, one in zip(records, coded, strict=True):
                if one is None:
                    continue
                coded_bytes[name] += len(record)
                begun_s = time.thread_time()
                code.decode(one, target[: len(record)])
                taken_s += time.thread_time() - begun_s
                if target[: len(record)] != record:
                    raise RuntimeError(f"{name}: a record did not come back as it was")
            decode_s[name] = min(decode_s[name], taken_s)
    return {
        name: Figures(
            ratio=before / after[name],
            encode_bytes_s=before / encode_s[name],
            decode_bytes_s=coded_bytes[name] / decode_s[name] if coded_bytes[name] else None,
        )
        for name in codes
    }


def read_records(folder: Path, kind: str, *, sample_bytes: int = SAMPLE_BYTES) -> list[memoryview]:
    """Returns about so many bytes of records, from all files of a kind."""
    listing = json.loads((folder / "records.json").read_text(encoding="utf-8"))
    records: list[memoryview] = []
    for name in KINDS[kind]:
        size, data = listing[name]["record_bytes"], memoryview((folder / listing[name]["file"]).read_bytes())
        records += [data[at : at + size] for at in range(0, len(data), size)]
    step = max(sum(map(len, records)) // sample_bytes, 1)
    return records[::step]


def main() -> None:
    given = parse_folders(__doc__)
    make_missing(given.records, given.model)
    for kind in KINDS:
        records = read_records(given.records, kind)
        found = measure(records, make_codes())
        line = {
            "kind": kind,
            "records": len(records),
            "record_bytes": len(records[0]),
            "path": native.codec_path(),
            **{name: figures.as_json() for name, figures in found.items()},
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
