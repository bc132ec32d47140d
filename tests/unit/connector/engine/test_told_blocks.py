"""What is held of the blocks that nobody can place yet."""

from __future__ import annotations

import pytest

from kvoffload.connector.engine import told_blocks
from kvoffload.connector.engine.told_blocks import Picture


def test_what_is_held_comes_with_what_it_follows() -> None:
    picture = Picture([], None)
    for name, parent in ((b"c", b"b"), (b"d", b"c"), (b"e", b"b"), (b"x", b"y")):
        picture.hold((0, name), parent)
    picture.hold((1, b"other"), b"b")
    names, parents = picture.list_held(0, [b"a", b"b"])
    assert sorted(zip(names, parents, strict=True)) == [(b"c", b"b"), (b"d", b"c"), (b"e", b"b")]
    assert names.index(b"d") == names.index(b"c") + 1, "a prompt's blocks are told in a row"
    for name in names:
        picture.release((0, name))
    assert picture.list_held(0, [b"b"]) == ([], [])
    assert (set(picture.held), set(picture.awaited)) == ({(0, b"y"), (1, b"b")}, {(0, b"x"), (1, b"other")})


def test_a_block_is_held_for_one_other_alone() -> None:
    picture = Picture([], None)
    picture.hold((0, b"c"), b"a")
    picture.hold((0, b"c"), b"b")
    assert picture.list_held(0, [b"a"]) == ([], [])
    assert picture.list_held(0, [b"b"]) == ([b"c"], [b"b"])


def test_no_more_is_held_than_may_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_blocks, "MAX_TOLD", 3)
    picture = Picture([], None, told={(0, b"a"): True}, stale={(0, b"b"): True})
    picture.hold((0, b"c"), b"p")
    assert picture.is_full
    picture.hold((0, b"d"), b"p")
    assert picture.list_held(0, [b"p"]) == ([b"c"], [b"p"])
