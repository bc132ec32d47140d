"""Tokens of blocks that were saved lately."""

from __future__ import annotations

import random

from kvoffload.connector.engine.saved_tokens import SavedRun, SavedTokens
from tests.kit.cache.cache_model import make_chain

NAMES = [make_chain(1, 40)[at : at + 32] for at in range(0, 40 * 32, 32)]


def note(saved: SavedTokens, first: int, end: int, offset: int = 0) -> None:
    saved.note(SavedRun(b"".join(NAMES[first:end]), list(range(offset + 4 * first, offset + 4 * end))))


def take(saved: SavedTokens, *places: int) -> tuple[int, list[int]]:
    return read(saved.take(b"".join(NAMES[at] for at in places), 0))


def read(run: SavedRun | None) -> tuple[int, list[int]]:
    return (0, []) if run is None else (len(run.names) // 32, run.tokens)


def test_each_is_told_once_and_what_follows_with_it() -> None:
    saved = SavedTokens(4)
    note(saved, 2, 8)
    assert take(saved, 3, 4, 6) == (2, list(range(12, 20)))
    assert take(saved, 3) == take(saved, 1) == (0, [])
    assert read(saved.take(b"".join(NAMES[4:9]), 1)) == (3, list(range(20, 32)))
    assert take(saved, 2, 3) == (2, list(range(8, 16)))
    assert (saved.held_blocks, saved.untold_blocks) == (0, 0)


def test_a_name_with_the_same_beginning_is_another() -> None:
    saved = SavedTokens(4)
    note(saved, 0, 1)
    assert saved.take(NAMES[0][:8] + bytes(24), 0) is None
    assert take(saved, 0, 5) == (1, [0, 1, 2, 3])


def test_what_is_offered_again_is_known_by_its_last_word() -> None:
    saved = SavedTokens(4)
    note(saved, 0, 4)
    note(saved, 2, 6, offset=1000)
    assert [take(saved, at)[1][0] for at in range(6)] == [0, 4, 1008, 1012, 1016, 1020]


def test_a_part_of_a_run_has_its_own_parent_and_keys() -> None:
    saved = SavedTokens(4)
    keys = [("s",), None, ("image", 3), None]
    saved.note(SavedRun(b"".join(NAMES[:4]), list(range(16)), b"p", extra_keys=keys, about={"session_id": "a"}))
    first, rest = saved.take(NAMES[0], 0), saved.take(b"".join(NAMES[2:4]), 0)
    assert first is not None
    assert rest is not None
    assert (first.parent, first.extra_keys, first.about) == (b"p", [("s",)], {"session_id": "a"})
    assert (rest.parent, rest.extra_keys, rest.about) == (NAMES[1], [("image", 3), None], {"session_id": "a"})


def test_the_oldest_are_forgotten_however_often_they_are_offered() -> None:
    saved = SavedTokens(4, limit=10)
    for _ in range(50):
        note(saved, 0, 3)
    assert (saved.held_blocks, saved.untold_blocks) == (9, 3)
    note(saved, 10, 20)
    assert take(saved, 0) == (0, [])
    assert take(saved, 19) == (1, [76, 77, 78, 79])
    note(saved, 20, 40)
    assert (saved.held_blocks, saved.untold_blocks) == (0, 0)


def test_whatever_comes_the_tokens_are_those_of_the_names() -> None:
    chance = random.Random(5)
    saved = SavedTokens(4, limit=25)
    for _ in range(2000):
        if chance.random() < 0.3:
            first = chance.randrange(40)
            note(saved, first, min(first + chance.randrange(1, 8), 40))
        at = chance.randrange(40)
        asked = [*range(at, min(at + chance.randrange(1, 6), 40)), chance.randrange(40)]
        count, tokens = take(saved, *asked)
        assert tokens == [4 * one + token for one in asked[:count] for token in range(4)]
        assert saved.untold_blocks <= saved.held_blocks <= 25
    # A run as long as the limit displaces all others, and nothing is left when it was told.
    note(saved, 0, 25)
    assert take(saved, *range(25))[0] == len(range(25))
    assert (saved.held_blocks, saved.untold_blocks) == (0, 0)
