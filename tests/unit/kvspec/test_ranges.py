"""Padding and exclusions."""

from __future__ import annotations

import pytest

from kvoffload.errors import StrideError
from kvoffload.kvspec import Exclusion, Padding


@pytest.mark.parametrize(
    "wrong", [{"base": -1}, {"length": 0}, {"count": 0}, {"count": 2, "stride": 3}, {"count": 2, "stride": 0}]
)
def test_a_range_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    given = {"base": 0, "length": 4, **wrong}
    with pytest.raises(StrideError, match=r"padding of group g: base") as caught:
        Padding(allocation="kv", group="g", **given)
    assert caught.value.remedy
    with pytest.raises(StrideError, match=r"exclusion workspace: base"):
        Exclusion(allocation="kv", name="workspace", **given)


def test_ranges_are_named_for_messages() -> None:
    assert Padding(allocation="kv", base=0, length=1).label == "padding"
    assert Padding(allocation="kv", base=0, length=1, group="g").label == "padding of group g"
    assert Exclusion(allocation="kv", base=0, length=1, name="workspace").label == "exclusion workspace"
