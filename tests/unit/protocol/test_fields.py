"""Kinds of fields: what they accept in both directions."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest

from kvoffload.protocol.faults import ErrorCode, FieldError
from kvoffload.protocol.fields import AsMany, Blob, Choice, FieldKind, Several, Text, Truth, Whole


class Colour(IntEnum):
    RED = 1
    BLUE = 4


BYTE = Whole(255, minimum=1)
PAIRS = Blob("pairs", 2, 3)
DIGEST = Blob("digest", 32, 1, minimum=1)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (BYTE, 1),
        (BYTE, 255),
        (Whole(2**64 - 1), 2**64 - 1),
        (Truth(), True),
        (Truth(), False),
        (Text(4), ""),
        (Text(4), "éé"),
        (PAIRS, b""),
        (PAIRS, bytes(6)),
        (DIGEST, bytes(32)),
        (Several(BYTE, 2), (1, 2)),
        (Several(BYTE, 2), ()),
    ],
)
def test_values_within_the_limits_pass_both_ways(kind: FieldKind, value: Any) -> None:
    assert kind.read(value) == kind.lower(value) == value


@pytest.mark.parametrize(
    ("kind", "value", "line"),
    [
        (BYTE, 0, ".x: 0, allowed: 1 to 255"),
        (BYTE, 256, ".x: 256, allowed: 1 to 255"),
        (BYTE, True, ".x: bool, allowed: 1 to 255"),
        (BYTE, 1.0, ".x: float, allowed: 1 to 255"),
        (BYTE, float("nan"), ".x: float, allowed: 1 to 255"),
        (BYTE, None, ".x: nothing, allowed: 1 to 255"),
        (Truth(), 1, ".x: int, allowed: true or false"),
        (Text(4), b"ab", ".x: bytes, allowed: one line of text, at most 4 bytes"),
        (Text(4), "abcde", ".x: 5 characters, allowed: one line of text, at most 4 bytes"),
        (Text(4), "ééé", ".x: 3 characters, allowed: one line of text, at most 4 bytes"),
        (Text(4), "a\n", ".x: text with control characters, allowed: one line of text, at most 4 bytes"),
        (Text(4), "\u2028", ".x: text with control characters, allowed: one line of text, at most 4 bytes"),
        (Text(4), "\x1b[m", ".x: text with control characters, allowed: one line of text, at most 4 bytes"),
        (PAIRS, "ab", ".x: str, allowed: pairs of 2 bytes each, 0 to 3"),
        (PAIRS, bytes(3), ".x: 3 bytes, allowed: pairs of 2 bytes each, 0 to 3"),
        (PAIRS, bytes(8), ".x: 8 bytes, allowed: pairs of 2 bytes each, 0 to 3"),
        (DIGEST, b"", ".x: 0 bytes, allowed: digest of 32 bytes"),
        (Choice(Colour), None, ".x: nothing, allowed: 1 RED, 4 BLUE"),
        (Several(BYTE, 2), (1, 2, 3), ".x: 3 items, allowed: at most 2 of: 1 to 255"),
        (Several(BYTE, 2), (1, 0), ".x[1]: 0, allowed: 1 to 255"),
        (Several(Several(BYTE, 2), 2), ((1,), (2, 0)), ".x[1][1]: 0, allowed: 1 to 255"),
        (Several(BYTE, 2), [1], ".x: list, allowed: at most 2 of: 1 to 255"),
    ],
)
def test_all_others_are_one_line_both_ways(kind: FieldKind, value: Any, line: str) -> None:
    for convert in (kind.read, kind.lower):
        with pytest.raises(FieldError) as caught:
            convert(value)
        assert caught.value.describe(".x") == line


def test_a_choice_is_a_number_on_the_wire() -> None:
    assert Choice(Colour).lower(Colour.BLUE) == 4
    assert type(Choice(Colour).lower(Colour.BLUE)) is int
    assert Choice(Colour).read(4) is Colour.BLUE
    for wrong in (2, True, "RED"):
        with pytest.raises(FieldError):
            Choice(Colour).read(wrong)
    with pytest.raises(FieldError):
        Choice(Colour).lower(4)


def test_too_long_is_told_from_wrong() -> None:
    for kind, value in ((Text(4), "abcde"), (PAIRS, bytes(8)), (Several(BYTE, 2), (1, 2, 3))):
        with pytest.raises(FieldError) as caught:
            kind.read(value)  # type: ignore[attr-defined]
        assert caught.value.code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (AsMany("other"), {3}, {0, 1, 2, 4, 6}),
        (AsMany("other", or_none=True), {0, 3}, {1, 2, 4, 6}),
        (AsMany("other", or_multiple=True), {0, 3, 6, 9}, {1, 2, 4, 5}),
    ],
)
def test_counts_beside_each_other(rule: AsMany, right: set[int], wrong: set[int]) -> None:
    for count in right:
        rule.check(count, 3)
    for count in wrong:
        with pytest.raises(FieldError, match=f"{count} values beside 3 of other"):
            rule.check(count, 3)


def test_no_multiple_of_nothing() -> None:
    AsMany("other", or_multiple=True).check(0, 0)
    with pytest.raises(FieldError):
        AsMany("other", or_multiple=True).check(1, 0)
