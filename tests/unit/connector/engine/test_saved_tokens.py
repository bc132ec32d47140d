"""Tokens of blocks that were saved lately."""

from __future__ import annotations

import random

from kvoffload.connector.engine.saved_tokens import SavedTokens
from tests.kit.cache.cache_model import make_chain

NAMES = [make_chain(1, 40)[at : at + 32] for at in range(0, 40 * 32, 32)]


def note(saved: SavedTokens, first: int, end: int, offset: int = 0) -> None:
    saved.note(b"".join(NAMES[first:end]), list(range(offset + 4 * first, offset + 4 * end)))


def test_each_is_told_once() -> None:
    saved = SavedTokens(4)
    note(saved, 2, 5)
    assert saved.take(NAMES[3]) == [12, 13, 14, 15]
    assert saved.take(NAMES[3]) is None
    assert saved.take(NAMES[1]) is None
    assert [saved.take(NAMES[at]) for at in (4, 2)] == [[16, 17, 18, 19], [8, 9, 10, 11]]
    assert (saved._runs, saved._places, saved._blocks) == ({}, {}, 0)


def test_a_name_with_the_same_beginning_is_another() -> None:
    saved = SavedTokens(4)
    note(saved, 0, 1)
    assert saved.take(NAMES[0][:8] + bytes(24)) is None
    assert saved.take(NAMES[0]) == [0, 1, 2, 3]


def test_what_is_offered_again_is_known_by_its_last_word() -> None:
    saved = SavedTokens(4)
    note(saved, 0, 4)
    note(saved, 2, 6, offset=1000)
    assert [saved.take(NAMES[at])[0] for at in range(6)] == [0, 4, 1008, 1012, 1016, 1020]  # type: ignore[index]


def test_the_oldest_are_forgotten_however_often_they_are_offered() -> None:
    saved = SavedTokens(4, limit=10)
    for _ in range(50):
        note(saved, 0, 3)
    assert (saved._blocks, len(saved._places)) == (9, 3)
    note(saved, 10, 20)
    assert saved.take(NAMES[0]) is None
    assert saved.take(NAMES[19]) == [76, 77, 78, 79]
    note(saved, 20, 40)
    assert not saved._runs


def test_whatever_comes_the_tokens_are_those_of_the_name() -> None:
    chance = random.Random(5)
    saved = SavedTokens(4, limit=25)
    for _ in range(2000):
        if chance.random() < 0.3:
            first = chance.randrange(40)
            note(saved, first, min(first + chance.randrange(1, 8), 40))
        at = chance.randrange(40)
        assert saved.take(NAMES[at]) in (None, list(range(4 * at, 4 * at + 4)))
        assert saved._blocks == sum(len(run.words) for run in saved._runs.values()) <= 25
        assert len(saved._places) <= saved._blocks
