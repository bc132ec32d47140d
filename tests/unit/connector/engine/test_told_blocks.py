"""Blocks are held while their parents have not been told."""

from __future__ import annotations

import pytest

from kvoffload.connector.engine import told_blocks
from kvoffload.connector.engine.told_blocks import Picture


def test_what_is_held_comes_with_what_it_follows() -> None:
    picture = Picture([], None)
    for name, parent in ((b"c", b"b"), (b"d", b"c"), (b"e", b"b"), (b"x", b"y")):
        picture.hold((0, name), parent)
    picture.hold((1, b"other"), b"b")
    walked = list(picture.walk_held(0, [b"a", b"b"]))
    assert sorted(walked) == [(b"c", b"b"), (b"d", b"c"), (b"e", b"b")]
    names = [name for name, _ in walked]
    assert names.index(b"d") == names.index(b"c") + 1, "a prompt's blocks are told in a row"
    for name in names:
        picture.release((0, name))
    assert list(picture.walk_held(0, [b"b"])) == []
    assert (set(picture.held), set(picture.awaited)) == ({(0, b"y"), (1, b"b")}, {(0, b"x"), (1, b"other")})


def test_a_block_is_held_for_one_other_alone() -> None:
    picture = Picture([], None)
    picture.hold((0, b"c"), b"a")
    picture.hold((0, b"c"), b"b")
    assert list(picture.walk_held(0, [b"a"])) == []
    assert list(picture.walk_held(0, [b"b"])) == [(b"c", b"b")]


def test_what_has_come_may_be_told_while_others_come() -> None:
    picture = Picture([], None)
    for at in range(10):
        picture.hold((0, b"%d" % (at + 1)), b"%d" % at)
    walk = picture.walk_held(0, [b"0"])
    for at in range(10):
        assert next(walk) == (b"%d" % (at + 1), b"%d" % at)
        picture.release((0, b"%d" % (at + 1)))
    assert list(walk) == []
    assert not picture.held


def test_what_is_held_is_forgotten_some_at_a_time() -> None:
    picture = Picture([], None)
    for at in range(5):
        picture.hold((0, b"%d" % at), b"p")
    assert picture.release_some(3)
    assert (len(picture.awaited), len(picture.held[0, b"p"])) == (2, 2)
    assert not picture.release_some(3)
    assert (picture.awaited, picture.held) == ({}, {})


def test_no_more_is_held_than_may_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_blocks, "MAX_TOLD", 3)
    picture = Picture([], None, told={(0, b"a"): True}, stale={(0, b"b"): True})
    picture.hold((0, b"c"), b"p")
    picture.hold((0, b"d"), b"p")
    assert list(picture.walk_held(0, [b"p"])) == [(b"c", b"p")]
    assert picture.has_room, "the block that they are held for is told"
