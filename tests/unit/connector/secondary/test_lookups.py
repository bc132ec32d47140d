"""Answers to requests about chunks: at once if memory has them, after a look-up if a slower tier might."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvoffload.cache import Ask
from kvoffload.client import TierWait
from kvoffload.connector.secondary import lookups as tier_lookups
from kvoffload.connector.secondary.lookups import TierLookups
from kvoffload.connector.secondary.transfers import TransferSettings
from tests.kit.connector.tiers import TOKENS, names_of

FULL, WINDOW = 0, 1


class TieredCache:
    """Questions are answered when a test says so."""

    is_served = True
    has_tiers = True

    def __init__(self) -> None:
        self.memory: set[bytes] = set()
        self.asked: list[list[bytes]] = []
        self.far: list[TierWait | None] = []
        self.answered: set[int] = set()
        self.cancelled: list[int] = []

    def lookup(self, group: int, hashes: bytes) -> Any:
        return np.array([hashes[at : at + 32] in self.memory for at in range(0, len(hashes), 32)])

    def start_acquire(self, ask: Ask, *, far: TierWait | None) -> int:
        chain = bytes(ask.chain)
        assert ask.limit == len(chain) // 32 * TOKENS
        self.asked.append([chain[at : at + 32] for at in range(0, len(chain), 32)])
        self.far.append(far)
        return len(self.asked) - 1

    def poll(self, pending: int) -> bool | None:
        return True if pending in self.answered else None

    def cancel(self, pending: int) -> None:
        self.cancelled.append(pending)


@pytest.fixture
def cache() -> TieredCache:
    return TieredCache()


def make_lookups(cache: Any, *, wait_s: float = 1.5) -> TierLookups:
    settings = TransferSettings(fingerprint=bytes(32), record_bytes=64, block_tokens=TOKENS, promote_wait_s=wait_s)
    return TierLookups(cache, settings, prefix_groups={FULL})


def step(lookups: TierLookups, request: str, names: list[bytes], *, group: int = FULL) -> list[bool | None]:
    lookups.harvest()
    found = [lookups.look(request, group, name) for name in names]
    lookups.send()
    return found


def test_what_is_in_memory_is_known_at_once(cache: TieredCache) -> None:
    (name,) = names_of(1)
    cache.memory.add(name)
    assert step(make_lookups(cache), "r", [name]) == [True]
    assert cache.asked == []


@pytest.mark.parametrize("wait_s", [0.0, 1.5])
def test_without_anything_below_the_rest_is_a_miss(cache: TieredCache, wait_s: float) -> None:
    cache.has_tiers = wait_s == 0.0
    assert step(make_lookups(cache, wait_s=wait_s), "r", names_of(1, 2)) == [False, False]
    assert cache.asked == []


def test_what_lies_below_is_asked_for_once_and_found_when_it_came_up(cache: TieredCache) -> None:
    lookups, names = make_lookups(cache), names_of(*range(4))
    assert step(lookups, "r", names) == [None] * 4
    assert step(lookups, "r", names) == [None] * 4
    assert cache.asked == [names]
    assert cache.far == [TierWait(wait_s=1.5)]
    cache.memory.update(names[:3])
    cache.answered.add(0)
    assert step(lookups, "r", names) == [True, True, True, False]
    assert (cache.cancelled, lookups.questions) == ([0], 0)
    assert step(lookups, "r", names) == [True, True, True, False]
    assert len(cache.asked) == 1


def test_chunks_of_windows_are_asked_for_one_by_one(cache: TieredCache) -> None:
    """From the end of a prompt on, of which the cache may have nothing."""
    lookups, names, windows = make_lookups(cache), names_of("full"), names_of(*range(100))
    lookups.look("r", FULL, names[0])
    assert step(lookups, "r", windows, group=WINDOW) == [None] * 100
    assert cache.asked == [names[:1], *([name] for name in windows[: tier_lookups.WINDOW_LIMIT])]
    cache.memory.update(windows[30:32])
    cache.answered.update(range(len(cache.asked)))
    expected = [place in (30, 31) for place in range(100)]
    assert step(lookups, "r", windows, group=WINDOW) == expected
    assert lookups.questions == 0


def test_a_server_that_is_away_makes_all_of_it_misses(cache: TieredCache) -> None:
    lookups, names = make_lookups(cache), names_of(1, 2)
    cache.memory.add(names[0])
    assert step(lookups, "r", names) == [True, None]
    cache.is_served = False
    assert step(lookups, "r", names) == [False, False]


def test_a_load_that_failed_is_not_tried_again_by_its_request(cache: TieredCache) -> None:
    lookups, names = make_lookups(cache), names_of(1, 2)
    cache.memory.update(names)
    assert step(lookups, "r", names) == [True, True]
    lookups.note_lost("r", names[1:])
    assert step(lookups, "r", names) == [True, False]
    assert step(lookups, "another", names) == [True, True]


def test_requests_that_ended_leave_nothing(cache: TieredCache) -> None:
    lookups, names = make_lookups(cache), names_of(1)
    step(lookups, "r", names)
    lookups.forget("r")
    assert (cache.cancelled, lookups.questions) == ([0], 0)
    lookups.note_lost("r", names)
    assert lookups.requests == 0


def test_after_a_reset_everything_is_asked_anew(cache: TieredCache) -> None:
    lookups, names = make_lookups(cache), names_of(1)
    step(lookups, "r", names)
    lookups.clear()
    assert (cache.cancelled, lookups.questions) == ([0], 0)
    assert step(lookups, "r", names) == [None]


def test_questions_are_bounded_and_those_beyond_are_misses(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_lookups, "QUESTION_LIMIT", 2)
    lookups = make_lookups(cache)
    for request in ("a", "b", "c"):
        assert step(lookups, request, names_of(request)) == [None]
    assert (lookups.questions, len(cache.asked)) == (2, 2)
    assert step(lookups, "c", names_of("c")) == [False]
    assert step(lookups, "a", names_of("a")) == [None]
