"""Sizes and durations as people write them: `64GiB`, `250ms`. Reading and writing round-trip."""

from __future__ import annotations

import math
import re
from decimal import Decimal

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

SIZE_UNITS = {
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

SIZE_FORM = "a number of bytes or a size such as 512MiB, 64GiB or 1.5TiB"

_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes of `64GiB`, `1.5TiB` or a plain whole number. ValueError says what is wrong."""
    if isinstance(text, bool):
        raise ValueError("not a size")
    if isinstance(text, int):
        return _whole_bytes(text, str(text))
    number, unit = _split(text, "size")
    by_lower = {name.lower(): factor for name, factor in SIZE_UNITS.items()}
    if unit and unit.lower() not in by_lower:
        raise ValueError(f"unit {unit!r} is not one of {', '.join(SIZE_UNITS)}")
    return _whole_bytes(number * by_lower[unit.lower() or "b"], text)


def parse_duration(text: str | float) -> float:
    """Seconds of `250ms` or `5s`. A bare number is refused: it could mean seconds or milliseconds."""
    if not isinstance(text, str):
        raise ValueError("the unit is missing")
    number, unit = _split(text, "duration")
    if unit not in DURATION_UNITS:
        raise ValueError(f"unit {unit!r} is not one of {', '.join(DURATION_UNITS)}" if unit else "the unit is missing")
    factor = DURATION_UNITS[unit]
    # Divided, as 100 times a millionth is a little less than 100 millionths, and would be below a bound of that.
    return float(number) * factor if factor >= 1 else float(number) / round(1 / factor)


def milliseconds(seconds: float) -> int:
    """Rounds up, so that a short wait is not none; one without an end is the longest that the native core can count."""
    return math.ceil(min(max(seconds * 1000, 0), 2**31 - 1))


def format_size(size_bytes: int) -> str:
    """The shortest exact spelling: 64GiB, 1536MiB, 1000B."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        factor = SIZE_UNITS[name]
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{name}"
    return f"{size_bytes}B"


def describe_size(size_bytes: float) -> str:
    """Three digits and a unit, for people: 23.5GiB, 128MiB. `parse_size` may read another number."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        count = size_bytes / SIZE_UNITS[name]
        if count >= 1:
            return f"{count:.3g}{name}" if count < 1000 else f"{count:.0f}{name}"
    return f"{size_bytes:.0f}B"


def format_duration(seconds: float) -> str:
    """The largest unit that leaves a number of at least 1: 50ms, 1.5s."""
    for name in ("h", "min", "s", "ms"):
        if seconds >= DURATION_UNITS[name]:
            return f"{seconds / DURATION_UNITS[name]:.10g}{name}"
    return f"{seconds / 1e-6:.10g}us"


def _split(text: str, what: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a {what}")
    return Decimal(match.group(1)), match.group(2)


def _whole_bytes(value: Decimal | int, text: str) -> int:
    if value < 0:
        raise ValueError("negative")
    if value != int(value):
        raise ValueError(f"{text} is not a whole number of bytes")
    return int(value)
