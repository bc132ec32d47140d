"""One dataclass as an array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from kvoffload.protocol import AcquireEntries, Bye
from kvoffload.protocol.faults import FieldError
from kvoffload.protocol.fields import U16, AsMany, Blob, Name, Several
from kvoffload.protocol.shape import Shape, name_of

Pairs = Annotated[bytes, Blob("pairs", 2, 9)]


@dataclass(frozen=True, kw_only=True)
class Row:
    at: Annotated[U16, "where"]
    name: Annotated[Name, "what"] = "none"


@dataclass(frozen=True, kw_only=True)
class Table:
    pairs: Annotated[Pairs, "values"]
    more: Annotated[Pairs, AsMany("pairs", or_none=True), "beside them"] = b""
    rows: Annotated[tuple[Row, ...], Several(Shape(Row), 3), "lines"] = ()


SHAPE = Shape(Table)
FULL = Table(pairs=b"abcd", more=b"efgh", rows=(Row(at=1), Row(at=2, name="two")))
LOWERED = (b"abcd", b"efgh", ((1, "none"), (2, "two")))


def test_it_goes_there_and_back() -> None:
    assert SHAPE.lower(FULL) == LOWERED
    assert SHAPE.read(LOWERED) == FULL


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((b"ab",), Table(pairs=b"ab")),
        ((b"ab", b"cd"), Table(pairs=b"ab", more=b"cd")),
        ((*LOWERED, 7, None), FULL),
        ((b"", b"", ((1,), (2, "two", 3.0))), Table(pairs=b"", rows=(Row(at=1), Row(at=2, name="two")))),
    ],
)
def test_missing_fields_take_defaults_and_unknown_ones_are_ignored(items: Any, expected: Table) -> None:
    assert SHAPE.read(items) == expected


@pytest.mark.parametrize(
    ("items", "line"),
    [
        ([b"ab"], "table: list, allowed: table"),
        ((), "table: 0 fields, allowed: at least 1"),
        ((1,), "table.pairs: int, allowed: pairs of 2 bytes each, 0 to 9"),
        ((b"ab", b"cdef"), "table.more: 2 values beside 1 of pairs, allowed: as many as `pairs`, or none"),
        ((b"", b"", ((1,), (-1,))), "table.rows[1].at: -1, allowed: 0 to 2^16 - 1"),
        ((b"", b"", ((1,), 2)), "table.rows[1]: int, allowed: row"),
        ((b"", b"", ((),)), "table.rows[0]: 0 fields, allowed: at least 1"),
    ],
)
def test_a_wrong_item_is_named(items: Any, line: str) -> None:
    with pytest.raises(FieldError) as caught:
        SHAPE.read(items)
    assert caught.value.describe("table") == line


def test_another_record_is_not_lowered() -> None:
    with pytest.raises(FieldError):
        SHAPE.lower(Row(at=1))


def test_a_name_is_the_class_in_small_letters() -> None:
    assert [name_of(kind) for kind in (Bye, AcquireEntries)] == ["bye", "acquire_entries"]
