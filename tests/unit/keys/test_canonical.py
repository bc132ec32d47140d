"""One byte string for one plain value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.keys.canonical import MAX_DEPTH, Plain, encode_canonical

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, b"n"),
        (True, b"t"),
        (-12, b"i-12;"),
        (1.5, b"r\x3f\xf8\x00\x00\x00\x00\x00\x00"),
        ("ä", b"s2:\xc3\xa4"),
        (b"\x00", b"b1:\x00"),
        ([1, [2]], b"li1;li2;ee"),
        ({"b": 1, "a": None}, b"ds1:ans1:bi1;e"),
    ],
)
def test_the_encoding_is_the_documented_one(value: Plain, encoded: bytes) -> None:
    assert encode_canonical(value) == encoded


def typed(value: Plain) -> object:
    """Equality that tells 1 from True from 1.0 and 0.0 from -0.0."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [typed(item) for item in value]
    return type(value).__name__, repr(value)


@given(plain_values, plain_values)
def test_encodings_are_equal_exactly_when_values_are(one: Plain, other: Plain) -> None:
    assert (encode_canonical(one) == encode_canonical(other)) == (typed(one) == typed(other))


@given(st.dictionaries(st.text(), st.integers()))
def test_the_order_of_insertion_does_not_matter(value: dict[str, int]) -> None:
    assert encode_canonical(dict(reversed(value.items()))) == encode_canonical(value)


def test_what_has_no_canonical_form_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        encode_canonical([float("nan")])
    with pytest.raises(TypeError, match="set"):
        encode_canonical({1, 2})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keys must be text"):
        encode_canonical({1: 2})  # type: ignore[dict-item]
    deep: Plain = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(ValueError, match="nested"):
        encode_canonical(deep)
