"""Tokens of blocks that were saved lately."""

from __future__ import annotations

import random

import numpy as np

from kvoffload.connector.engine.saved_tokens import SavedRun, SavedTokens
from tests.kit.cache.cache_model import make_chain

NAMES = [make_chain(1, 40)[at : at + 32] for at in range(0, 40 * 32, 32)]


def note(saved: SavedTokens, first: int, end: int, offset: int = 0) -> None:
    saved.note(SavedRun(b"".join(NAMES[first:end]), np.arange(offset + 4 * first, offset + 4 * end)))


def find(saved: SavedTokens, *places: int) -> tuple[int, list[int]]:
    return read(saved.find(b"".join(NAMES[at] for at in places), 0))


def read(run: SavedRun | None) -> tuple[int, list[int]]:
    return (0, []) if run is None else (len(run.names) // 32, run.tokens.tolist())


def test_what_follows_a_block_is_found_with_it() -> None:
    saved = SavedTokens(4)
    note(saved, 2, 8)
    for _ in range(2):
        assert find(saved, 3, 4, 6) == (2, list(range(12, 20)))
    assert find(saved, 1) == (0, [])
    assert [saved.knows(NAMES[at]) for at in (1, 2, 7, 8)] == [False, True, True, False]
    assert [saved.count_known(NAMES[first:end]) for first, end in ((1, 3), (3, 6), (6, 40))] == [0, 3, 2]
    assert read(saved.find(b"".join(NAMES[4:9]), 1)) == (3, list(range(20, 32)))


def test_a_name_with_the_same_beginning_is_another() -> None:
    saved = SavedTokens(4)
    note(saved, 0, 1)
    assert saved.find(NAMES[0][:8] + bytes(24), 0) is None
    assert not saved.knows(NAMES[0][:8] + bytes(24))
    assert find(saved, 0, 5) == (1, [0, 1, 2, 3])


def test_what_is_offered_again_is_known_by_its_last_word() -> None:
    saved = SavedTokens(4)
    note(saved, 0, 4)
    note(saved, 2, 6, offset=1000)
    assert [find(saved, at)[1][0] for at in range(6)] == [0, 4, 1008, 1012, 1016, 1020]


def test_a_part_of_a_run_has_its_own_parent_and_keys() -> None:
    saved = SavedTokens(4)
    keys = [("s",), None, ("image", 3), None]
    saved.note(SavedRun(b"".join(NAMES[:4]), np.arange(16), b"p", extra_keys=keys, about={"session_id": "a"}))
    first, rest = saved.find(NAMES[0], 0), saved.find(b"".join(NAMES[2:4]), 0)
    assert first is not None
    assert rest is not None
    assert (first.parent, first.extra_keys, first.about) == (b"p", [("s",)], {"session_id": "a"})
    assert (rest.parent, rest.extra_keys, rest.about) == (NAMES[1], [("image", 3), None], {"session_id": "a"})


def test_the_oldest_are_forgotten_however_often_they_are_offered() -> None:
    saved = SavedTokens(4, limit=10)
    for _ in range(50):
        note(saved, 0, 3)
    assert saved.held_blocks == 9
    note(saved, 10, 20)
    assert find(saved, 0) == (0, [])
    assert find(saved, 19) == (1, [76, 77, 78, 79])
    note(saved, 20, 40)
    assert saved.held_blocks == 0


def test_whatever_comes_the_tokens_are_those_of_the_names() -> None:
    chance = random.Random(5)
    saved = SavedTokens(4, limit=25)
    for _ in range(2000):
        if chance.random() < 0.3:
            first = chance.randrange(40)
            note(saved, first, min(first + chance.randrange(1, 8), 40))
        at = chance.randrange(40)
        asked = [*range(at, min(at + chance.randrange(1, 6), 40)), chance.randrange(40)]
        count, tokens = find(saved, *asked)
        assert tokens == [4 * one + token for one in asked[:count] for token in range(4)]
        assert saved.held_blocks <= 25
