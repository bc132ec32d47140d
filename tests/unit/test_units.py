"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.units import describe_size, format_duration, format_size, milliseconds, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 << 30),
        ("1.5TiB", 3 << 39),
        ("512 MiB", 512 << 20),
        ("2GB", 2_000_000_000),
        ("4gib", 4 << 30),
        ("17", 17),
        (17, 17),
        ("0", 0),
    ],
)
def test_sizes_are_read(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (24684092 << 10, "23.5GiB"),
        (128 << 20, "128MiB"),
        (1023 << 20, "1023MiB"),
        (3 << 39, "1.5TiB"),
    ],
)
def test_sizes_are_described(size_bytes: int, text: str) -> None:
    assert describe_size(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("12 parsecs", "unit 'parsecs'"),
        ("-1GiB", "not a size"),
        (-1, "negative"),
        ("1.5B", "whole number"),
        ("", "not a size"),
        ("1e9", "not a size"),
        (True, "not a size"),
        ("٣GiB", "not a size"),
        ("9" * 40, "not a size"),
    ],
)
def test_other_sizes_are_refused(text: str | int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("5s", 5.0), ("10 us", 1e-5), ("2min", 120.0), ("1h", 3600.0)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("5", "unit is missing"), (5, "unit is missing"), ("-5s", "not a duration"), ("5 weeks", "unit 'weeks'")],
)
def test_other_durations_are_refused(text: str | float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_duration(text)


@pytest.mark.parametrize(("text", "seconds"), [("100us", 0.0001), ("10ms", 0.01), ("3ms", 0.003), ("0.1ms", 0.0001)])
def test_a_bound_is_what_it_is_written_as(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.integers(0, 1 << 60))
def test_a_size_survives_the_round_trip(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.floats(1e-6, 1e6))
def test_a_duration_survives_the_round_trip(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, 0), (0.0001, 1), (1.5, 1500), (-3.0, 0), (1e12, 2**31 - 1), (float("inf"), 2**31 - 1)],
)
def test_milliseconds_are_rounded_up_and_can_be_counted(seconds: float, expected: int) -> None:
    assert milliseconds(seconds) == expected
