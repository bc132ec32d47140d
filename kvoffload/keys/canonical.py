"""One byte string for one plain value: the ground under every fingerprint and every extra key of a block.

    None        n                       list, tuple   l <items> e
    bool        t | f                   dict          d <key value, keys sorted by their encoding> e
    int         i <decimal> ;           float         r <8 bytes IEEE 754, big endian>
    str         s <UTF-8 length> : <UTF-8>            bytes   b <length> : <bytes>

Different values have different encodings (1, 1.0, True and "1" too), equal values have equal ones in every process, on
every machine and in every Python. NaN is refused, since it is not equal to itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Plain: TypeAlias = bool | int | float | str | bytes | Sequence["Plain"] | Mapping[str, "Plain"] | None

MAX_DEPTH = 32


def encode_canonical(value: Plain) -> bytes:
    """Raises TypeError for anything but plain values, ValueError for NaN and for nesting beyond MAX_DEPTH."""
    out = bytearray()
    _encode(value, out, 0)
    return bytes(out)


def _encode(value: Plain, out: bytearray, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    match value:
        case None:
            out += b"n"
        case bool():
            out += b"t" if value else b"f"
        case int():
            out += b"i%d;" % value
        case float():
            if math.isnan(value):
                raise ValueError("NaN has no canonical form")
            out += b"r" + struct.pack(">d", value)
        case str():
            data = value.encode()
            out += b"s%d:" % len(data) + data
        case bytes():
            out += b"b%d:" % len(value) + value
        case Mapping():
            _encode_mapping(value, out, depth)
        case Sequence():
            out += b"l"
            for item in value:
                _encode(item, out, depth + 1)
            out += b"e"
        case _:
            raise TypeError(f"{type(value).__name__} is not a plain value")


def _encode_mapping(value: Mapping[str, Plain], out: bytearray, depth: int) -> None:
    if not all(isinstance(key, str) for key in value):
        raise TypeError("a mapping's keys must be text")
    out += b"d"
    # Sorted by encoded bytes, not by text: Python compares code points, other languages compare UTF-16 units.
    for key in sorted(value, key=str.encode):
        _encode(key, out, depth + 1)
        _encode(value[key], out, depth + 1)
    out += b"e"
