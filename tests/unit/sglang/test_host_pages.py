"""Pages between a host pool and a cache, as HiCache's threads ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from kvoffload.errors import NativeError
from kvoffload.sglang import asked_prompts, host_pages
from kvoffload.sglang.host_pages import HostPages
from kvoffload.sglang.weights import WeightMask
from kvoffload.transfer import CopyDirection
from tests.kit.sglang.host_pools import MHATokenToKVPoolHost, fill_host
from tests.kit.sglang.linked import SessionCache, link, make_keys
from tests.kit.sglang.pools import PAGE, rows_of
from tests.kit.sglang.updater import make_updater_class

KEYS = make_keys(3)


class Stored:
    def __init__(self, *, layers: int = 1, width: int = 2, **settings: Any) -> None:
        self.pool = MHATokenToKVPoolHost("page_first_direct")
        fill_host(self.pool, 1)
        self.linked = link(self.pool, **settings)
        self.cache: SessionCache = self.linked.cache
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        weights = WeightMask(lambda: [self.model])
        weights.take()
        self.updates = weights.updates
        self.pages = HostPages(self.linked.linker, weights)

    def back_up(self, *pages: int) -> bool:
        return self.pages.back_up(KEYS[: len(pages)], np.array(rows_of(*pages)))

    def fetch(self, *pages: int) -> int:
        return self.pages.fetch(KEYS[: len(pages)], np.array(rows_of(*pages)))


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "SLOTS_WAIT_S", 0.01)


def test_what_was_backed_up_is_fetched_to_other_rows() -> None:
    stored = Stored()
    saved = stored.pool.rows(0, 1).clone()
    assert stored.pages.count(KEYS) == 0
    assert stored.back_up(0, 1)
    stored.pool.kv_buffer.zero_()
    assert stored.pages.count(KEYS) == 2
    assert stored.fetch(5, 6, 7) == 2
    assert torch.equal(stored.pool.rows(5, 6), saved)
    assert not stored.pool.rows(7).any()
    assert stored.cache.held == set()


def test_the_server_hears_of_pages_that_are_fetched_and_not_of_those_that_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = Stored()
    stored.back_up(0, 1)
    stored.pages.count(KEYS)
    stored.pages.count(make_keys(1, seed=7))
    monkeypatch.setattr(asked_prompts, "TELL_AFTER_S", 0.0)
    stored.pages.count(KEYS)
    assert stored.cache.told == []
    assert stored.fetch(5, 6, 7) == 2
    assert [(note.boundary, note.tokens) for note in stored.cache.told] == [(2 * PAGE, 3 * PAGE)]


def test_nothing_is_held_for_no_pages() -> None:
    stored = Stored()
    assert stored.pages.count([]) == stored.fetch() == 0
    assert stored.back_up()


def test_what_is_counted_is_not_held() -> None:
    stored = Stored()
    stored.back_up(0, 1)
    assert stored.pages.count(KEYS) == 2
    assert stored.cache.held == set()
    stored.pages.close()
    assert stored.cache.is_closed


def test_more_pages_than_slots_are_kept_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored()
    monkeypatch.setattr(SessionCache, "ready_slots", lambda _: [1])
    assert stored.back_up(0, 1, 2)
    assert stored.pages.count(KEYS) == 3


def test_without_slots_nothing_is_kept_and_nothing_hangs() -> None:
    stored = Stored()
    stored.cache.slots_left = 0
    assert not stored.back_up(0, 1)
    stored.cache.slots_left = 5
    assert stored.back_up(0, 1)
    # It is kept already: it needs no slots.
    stored.cache.slots_left = 0
    assert stored.back_up(0, 1)


def test_room_that_does_not_come_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, sleeps = Stored(), []
    monkeypatch.setattr(host_pages.time, "sleep", sleeps.append)
    stored.cache.slots_left = 0
    stored.back_up(0)
    assert sleeps
    sleeps.clear()
    stored.back_up(0)
    assert not sleeps
    stored.cache.slots_left = 1
    assert stored.back_up(0)
    stored.back_up(0, 1)
    assert sleeps


def test_records_that_are_not_what_was_saved_are_no_hit() -> None:
    stored = Stored(verify_always=True)
    stored.back_up(0, 1)
    stored.cache.record(bytes.fromhex(KEYS[1]))[:] = 7
    assert stored.fetch(5, 6) == 0
    assert stored.pages.count(KEYS) <= 1


def test_a_server_that_does_not_answer_is_a_miss() -> None:
    stored = Stored()
    stored.back_up(0)
    stored.cache.is_answering = False
    assert stored.fetch(5) == 0


def count(stored: Stored) -> int:
    return stored.pages.count(KEYS)


def fetch(stored: Stored) -> int:
    return stored.fetch(5)


def back_up(stored: Stored) -> int:
    return int(stored.back_up(1))


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("uses", list(permutations([count, fetch, back_up])), ids=lambda uses: uses[0].__name__)
@pytest.mark.parametrize("before", range(3))
def test_after_an_update_of_weights_nothing_is_saved_or_found(
    uses: Sequence[Callable[[Stored], int]], before: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever use comes first, and whatever was done before the update. Of one that the engine tells, nothing has to
    be seen."""
    stored = Stored()
    stored.back_up(0)
    for _ in range(before):
        assert stored.pages.count(KEYS) == 1
    if is_told:
        stored.updates.note()
    else:
        with torch.no_grad():
            stored.model[0].bias += 1
    assert [use(stored) for use in uses] == [0, 0, 0]
    assert len(stored.cache.published) == 1
    assert caplog.text.count("was not flushed") == 1


def in_new_thread(act: Callable[[], int]) -> int:
    """Acts in a new thread, as HiCache does after a flush, with which it restarts its threads."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(act).result()


@pytest.mark.parametrize("is_used_between", [False, True])
def test_after_a_flush_pages_of_the_new_weights_are_saved_and_found_and_no_others(is_used_between: bool) -> None:
    stored = Stored()
    stored.back_up(0)
    stored.updates.note()
    if is_used_between:
        assert stored.pages.count(KEYS) == 0
    assert in_new_thread(lambda: stored.pages.count(KEYS)) == 0
    assert in_new_thread(lambda: stored.pages.back_up(KEYS[:2], np.array(rows_of(3, 4))))
    assert in_new_thread(lambda: stored.fetch(5, 6)) == 2
    assert torch.equal(stored.pool.rows(5, 6), stored.pool.rows(3, 4))
    stored.updates.note()
    assert in_new_thread(lambda: stored.pages.count(KEYS)) == 0


def test_a_change_that_nobody_has_told_of_lasts_until_a_flush_too() -> None:
    stored = Stored()
    stored.back_up(0)
    with torch.no_grad():
        stored.model[0].weight += 1
    assert not stored.back_up(0)
    assert in_new_thread(lambda: stored.back_up(0))


def test_a_flush_while_somebody_may_still_write_to_the_weights_is_none() -> None:
    stored = Stored()
    updater = make_updater_class()()
    updater.begin_weight_update(None)
    stored.updates.note(updater)
    assert not in_new_thread(lambda: stored.back_up(0))
    updater.end_weight_update(None)
    assert in_new_thread(lambda: stored.back_up(0))


class LateEngine:
    """A load that it is given ends when it is closed for the third time."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._is_stuck = False
        self.closings = 0

    def submit(self, direction: CopyDirection, items: Any, **options: Any) -> int:
        self._is_stuck = direction is CopyDirection.LOAD
        return 77 if self._is_stuck else self._engine.submit(direction, items, **options)

    def fence(self, timeout_s: float) -> bool:
        return not self._is_stuck and self._engine.fence(timeout_s)

    def poll(self) -> list[Any]:
        return list(self._engine.poll())

    def close(self, timeout_s: float = 0.0) -> None:
        self.closings += 1
        if self.closings < 3:
            raise NativeError("a copy still runs")
        self._engine.close()


def test_rows_to_which_a_copy_still_writes_are_not_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines: list[LateEngine] = []

    def wrap(engine: Any) -> LateEngine:
        engines.append(LateEngine(engine))
        return engines[0]

    stored = Stored(wrap=wrap)
    stored.back_up(0)
    waits: list[float] = []
    monkeypatch.setattr(host_pages.time, "sleep", waits.append)
    assert stored.fetch(5) == 0
    assert (engines[0].closings, len(waits)) == (3, 1)
    assert "a copy still runs" in caplog.text
    assert stored.pages.count(KEYS) == stored.fetch(5) == 0
    assert not stored.back_up(1)
