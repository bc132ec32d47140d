"""A rank's pages come back as they were, or not at all; offers are told as done in their order, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvoffload.errors import NativeError
from kvoffload.sglang import page_linker
from kvoffload.transfer import CopyDirection
from tests.kit.sglang.linked import Linked, link, make_keys, pages_of
from tests.kit.sglang.pools import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
    clear,
    copy_rows,
    fill,
    rows_of,
)

KEYS = make_keys(3)
PAGES = rows_of(1, 2, 3)
OTHER_PAGES = rows_of(7, 4, 5)


@pytest.fixture(params=[MHATokenToKVPool, MLATokenToKVPool])
def linked(request: pytest.FixtureRequest) -> Iterator[Linked]:
    pool = request.param()
    fill(pool, 1)
    linked = link(pool)
    yield linked
    linked.linker.close()
    assert not linked.cache.held


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_pages_come_back_to_other_pages_as_they_were(linked: Linked) -> None:
    saved = copy_rows(linked.pool, PAGES)
    assert linked.save(KEYS, PAGES)
    clear(linked.pool)
    assert linked.linker.lookup("r", KEYS) == [1, 2, 3]
    assert linked.load("r", KEYS, OTHER_PAGES)
    assert linked.linker.take_loaded() == (True,)
    assert equal(copy_rows(linked.pool, OTHER_PAGES), saved)
    others = sorted(set(range(linked.pool.rows)) - set(OTHER_PAGES))
    assert not any(rows.any() for rows in copy_rows(linked.pool, others))


def test_a_shorter_load_than_was_told_of_brings_as_much(linked: Linked) -> None:
    """The ranks agree on the shortest."""
    saved = copy_rows(linked.pool, rows_of(1, 2))
    linked.save(KEYS, PAGES)
    clear(linked.pool)
    assert linked.linker.lookup("r", KEYS) == [1, 2, 3]
    assert linked.load("r", KEYS[:2], rows_of(5, 6))
    assert equal(copy_rows(linked.pool, rows_of(5, 6)), saved)


def test_a_tail_is_found_by_its_own_keys(linked: Linked) -> None:
    linked.save(KEYS, PAGES)
    assert linked.linker.lookup("r", KEYS[1:]) == [1, 2]
    assert linked.linker.lookup("s", [*KEYS, *make_keys(2, seed=5)]) == [1, 2, 3]
    assert linked.linker.lookup("t", make_keys(2, seed=5)) == []
    assert linked.linker.lookup("u", []) == []


def test_memory_that_is_not_mapped_gives_no_hit_and_takes_no_save(linked: Linked) -> None:
    linked.save(KEYS, PAGES)
    linked.cache.is_mapped = False
    assert linked.linker.lookup("r", KEYS) == []
    assert not linked.save(make_keys(1, seed=3), rows_of(4))
    linked.cache.is_mapped = True
    linked.linker.lookup("r", KEYS)
    linked.cache.is_mapped = False
    assert not linked.load("r", KEYS, OTHER_PAGES)


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (make_keys(3, seed=1), OTHER_PAGES),
        (KEYS, OTHER_PAGES[:-1]),
        (KEYS, [row + 1 for row in OTHER_PAGES]),
        (KEYS, rows_of(0, 1, 2)),
        (KEYS, rows_of(1, 2, 99)),
        (["ab"], rows_of(1)),
    ],
    ids=["other keys", "too few rows", "no whole pages", "the padding page", "beyond the pool", "no key"],
)
def test_a_load_that_is_not_as_told_is_refused(linked: Linked, keys: list[str], rows: list[int]) -> None:
    linked.save(KEYS, PAGES)
    linked.linker.lookup("r", KEYS)
    before = copy_rows(linked.pool, list(range(linked.pool.rows)))
    assert not linked.load("r", keys, rows)
    assert equal(copy_rows(linked.pool, list(range(linked.pool.rows))), before)


def test_several_ranks_take_every_load_and_tell_of_it_after_the_forward() -> None:
    linked = link(MHATokenToKVPool(), ranks=2)
    assert linked.load("r", KEYS, OTHER_PAGES)
    linked.save(KEYS, PAGES)
    linked.linker.lookup("s", KEYS)
    assert linked.load("s", KEYS, OTHER_PAGES)
    assert linked.linker.take_loaded() == (False, True)
    linked.linker.close()


def test_a_record_that_is_not_what_was_saved_fails_its_load_and_is_forgotten() -> None:
    pool = MHATokenToKVPool()
    fill(pool, 1)
    linked = link(pool, verify_always=True)
    linked.save(KEYS, PAGES)
    linked.cache.record(bytes.fromhex(KEYS[1]))[5] ^= 1
    assert linked.linker.lookup("r", KEYS) == [1, 2, 3]
    assert not linked.load("r", KEYS, OTHER_PAGES)
    assert linked.linker.lookup("r", KEYS) == [1]
    assert linked.save(KEYS, PAGES)
    assert linked.linker.lookup("r", KEYS) == [1, 2, 3]
    assert linked.load("r", KEYS, OTHER_PAGES)
    linked.linker.close()


def test_what_is_kept_is_not_saved_again(linked: Linked) -> None:
    assert linked.save(KEYS[:2], rows_of(1, 2))
    assert linked.save(KEYS, PAGES)
    assert linked.save(KEYS, PAGES)
    assert [name.hex() for name in linked.cache.published] == KEYS


def test_as_much_is_saved_as_there_is_room_for_and_told_so(linked: Linked) -> None:
    linked.cache.slots_left = 2
    assert not linked.save(KEYS, PAGES)
    assert linked.linker.lookup("r", KEYS) == [1, 2]
    assert not linked.save(KEYS, PAGES)
    linked.cache.slots_left = 9
    assert linked.save(KEYS, PAGES)


def test_slots_are_asked_for_before_a_save_needs_them(linked: Linked) -> None:
    linked.linker.begin_step()
    assert (linked.cache.steps, linked.cache.asked_for_slots) == (1, 1)


def test_offers_are_told_as_done_in_their_order(linked: Linked) -> None:
    linked.linker.offload([pages_of(KEYS, PAGES)])
    linked.linker.offload([pages_of(KEYS, PAGES[:-1])])
    linked.linker.offload([pages_of(make_keys(1, seed=4), rows_of(6))])
    while linked.linker.count_done() < 3:
        pass
    assert [linked.linker.pop_done() for _ in range(3)] == [True, False, True]
    assert linked.linker.count_done() == 0
    assert linked.linker.faults == 1


class StuckEngine:
    """Takes plans of the directions that are `stuck`, and ends none of them."""

    def __init__(self, engine: Any, *stuck: CopyDirection) -> None:
        self._engine = engine
        self._stuck = stuck

    def submit(self, direction: CopyDirection, items: Any, **options: Any) -> int:
        return 77 if direction in self._stuck else self._engine.submit(direction, items, **options)

    def fence(self, timeout_s: float) -> bool:
        return False

    def poll(self) -> list[Any]:
        return list(self._engine.poll())

    def close(self, timeout_s: float = 0.0) -> None:
        self._engine.close()


def test_a_save_that_does_not_end_keeps_no_page_for_ever() -> None:
    now = [0.0]
    linked = link(MHATokenToKVPool(), clock=lambda: now[0], wrap=lambda engine: StuckEngine(engine, CopyDirection.SAVE))
    linked.linker.offload([pages_of(KEYS, PAGES)])
    assert linked.linker.count_done() == 0
    now[0] += page_linker.SAVE_WAIT_S
    assert linked.linker.count_done() == 1
    assert not linked.linker.pop_done()
    linked.linker.close()


def test_a_load_that_does_not_end_ends_the_engine() -> None:
    """Its rows would be given to others while it still writes to them."""
    linked = link(MHATokenToKVPool(), wrap=lambda engine: StuckEngine(engine, CopyDirection.LOAD))
    linked.save(KEYS, PAGES)
    linked.linker.lookup("r", KEYS)
    with pytest.raises(NativeError, match="did not end"):
        linked.load("r", KEYS, OTHER_PAGES)
    assert linked.linker.lookup("s", KEYS) == []


def test_a_mask_keeps_names_apart(linked: Linked) -> None:
    linked.save(KEYS, PAGES)
    linked.linker.reset(b"w" * 32)
    assert linked.linker.lookup("r", KEYS) == []
    assert linked.save(KEYS, PAGES)
    assert linked.linker.lookup("r", KEYS) == [1, 2, 3]
    linked.linker.reset(bytes(32))
    assert linked.linker.lookup("r", KEYS) == [1, 2, 3]


def test_after_weights_have_changed_unsaid_nothing_is_saved_or_found_until_a_reset(linked: Linked) -> None:
    linked.save(KEYS, PAGES)
    linked.linker.lookup("r", KEYS)
    linked.linker.distrust()
    linked.linker.distrust()
    assert linked.linker.lookup("r", KEYS) == []
    assert not linked.cache.held
    assert not linked.save(make_keys(1, seed=8), rows_of(6))
    assert linked.linker.faults == 1
    linked.linker.reset(bytes(32))
    assert linked.linker.lookup("r", KEYS) == [1, 2, 3]


def test_a_reset_forgets_what_was_told_and_ends_what_is_on_its_way(linked: Linked) -> None:
    linked.save(KEYS, PAGES)
    linked.linker.lookup("r", KEYS)
    linked.linker.offload([pages_of(make_keys(2, seed=6), rows_of(4, 5))])
    linked.linker.reset(bytes(32))
    assert not linked.cache.held
    assert linked.linker.count_done() == 0
    assert not linked.load("r", KEYS, OTHER_PAGES)
    assert linked.linker.lookup("r", make_keys(2, seed=6)) == [1, 2]


def test_after_the_end_there_are_misses(linked: Linked) -> None:
    linked.linker.close()
    assert linked.linker.lookup("r", KEYS) == []
    linked.linker.close()


WINDOW = 7
"""Two pages of it are behind a boundary."""
SWA = 1
LONG = make_keys(5, seed=11)


@pytest.fixture
def windowed() -> Iterator[Linked]:
    linked = link_windowed()
    yield linked
    linked.linker.close()
    assert not linked.cache.held


def link_windowed(**settings: Any) -> Linked:
    pool = SWAKVPool()
    fill(pool.full_kv_pool, 1)
    fill(pool.swa_kv_pool, 2)
    return link(pool, window=WINDOW, **settings)


def clear_both(pool: SWAKVPool) -> None:
    clear(pool.full_kv_pool)
    clear(pool.swa_kv_pool)


def test_a_window_comes_back_to_other_pages_of_its_own_pool(windowed: Linked) -> None:
    full, swa = windowed.pool.full_kv_pool, windowed.pool.swa_kv_pool
    saved = copy_rows(full, rows_of(1, 2, 3, 4, 5)), copy_rows(swa, rows_of(6, 2))
    assert windowed.save(LONG, rows_of(1, 2, 3, 4, 5), pages_of(LONG[3:], rows_of(6, 2), SWA))
    clear_both(windowed.pool)
    assert windowed.linker.lookup("r", LONG) == [5]
    assert windowed.load("r", LONG, rows_of(8, 7, 6, 5, 4), pages_of(LONG[3:], rows_of(1, 3), SWA))
    assert equal(copy_rows(full, rows_of(8, 7, 6, 5, 4)), saved[0])
    assert equal(copy_rows(swa, rows_of(1, 3)), saved[1])
    assert not any(rows.any() for rows in copy_rows(swa, rows_of(2, 4, 5, 6)))


def test_ranks_may_agree_on_a_shorter_length_whose_window_is_held_too() -> None:
    windowed = link_windowed(ranks=2)
    windowed.save(LONG[:2], rows_of(1, 2), pages_of(LONG[:2], rows_of(1, 2), SWA))
    windowed.save(LONG, rows_of(1, 2, 3, 4, 5), pages_of(LONG[3:], rows_of(4, 5), SWA))
    assert windowed.linker.lookup("r", LONG) == [1, 2, 5]
    assert len(windowed.cache.held) == 2
    assert windowed.load("r", LONG[:2], rows_of(6, 7), pages_of(LONG[:2], rows_of(3, 6), SWA))
    assert windowed.linker.take_loaded() == (True,)
    assert equal(
        copy_rows(windowed.pool.swa_kv_pool, rows_of(3, 6)), copy_rows(windowed.pool.swa_kv_pool, rows_of(1, 2))
    )
    windowed.linker.close()
    assert not windowed.cache.held


@pytest.mark.parametrize(
    "parts",
    [
        [pages_of(LONG, rows_of(8, 7, 6, 5, 4))],
        [pages_of(LONG, rows_of(8, 7, 6, 5, 4)), pages_of(LONG[4:], rows_of(3), SWA)],
        [pages_of(LONG, rows_of(8, 7, 6, 5, 4)), pages_of(LONG[2:4], rows_of(3, 4), SWA)],
        [pages_of(LONG[:4], rows_of(8, 7, 6, 5)), pages_of(LONG[2:4], rows_of(3, 4), SWA)],
        [pages_of(LONG, rows_of(8, 7, 6, 5, 4)), pages_of(LONG[3:], rows_of(7, 8), SWA)],
    ],
    ids=["no window", "half a window", "another window", "a length without a window", "beyond the pool"],
)
def test_a_load_without_its_window_is_refused(windowed: Linked, parts: list[Any]) -> None:
    windowed.save(LONG, rows_of(1, 2, 3, 4, 5), pages_of(LONG[3:], rows_of(4, 5), SWA))
    windowed.linker.lookup("r", LONG)
    clear_both(windowed.pool)
    assert not windowed.linker.load("r", parts)
    pools = (windowed.pool.full_kv_pool, windowed.pool.swa_kv_pool)
    assert not any(rows.any() for pool in pools for rows in copy_rows(pool, list(range(pool.rows))))


@pytest.mark.parametrize("group", [0, SWA])
def test_a_record_of_any_group_that_is_not_what_was_saved_fails_the_load(group: int) -> None:
    windowed = link_windowed(verify_always=True)
    offer = LONG, rows_of(1, 2, 3, 4, 5), pages_of(LONG[3:], rows_of(4, 5), SWA)
    windowed.save(*offer)
    windowed.cache.record(bytes.fromhex(LONG[4]), group)[5] ^= 1
    wanted = LONG, rows_of(8, 7, 6, 5, 4), pages_of(LONG[3:], rows_of(1, 3), SWA)
    assert windowed.linker.lookup("r", LONG) == [5]
    assert not windowed.load("r", *wanted)
    assert windowed.linker.lookup("r", LONG) == []
    fill(windowed.pool.full_kv_pool, 1)
    fill(windowed.pool.swa_kv_pool, 2)
    assert windowed.save(*offer)
    assert windowed.linker.lookup("r", LONG) == [5]
    assert windowed.load("r", *wanted)
    windowed.linker.close()


def test_a_state_comes_back_at_the_length_that_it_was_kept_of() -> None:
    pool = HybridLinearKVPool()
    states = pool.mamba_pool
    fill(pool.full_kv_pool, 1)
    fill(states, 2)
    linked = link(pool)
    saved = copy_rows(states, [6])
    linked.save(LONG[:3], rows_of(1, 2, 3), pages_of(LONG[2:3], [6], 1))
    linked.save(LONG, rows_of(1, 2, 3, 4, 5))
    clear(states)
    assert linked.linker.lookup("r", LONG) == [3]
    assert linked.load("r", LONG[:3], rows_of(8, 7, 6), pages_of(LONG[2:3], [2], 1))
    assert equal(copy_rows(states, [2]), saved)
    assert not any(rows.any() for rows in copy_rows(states, [0, 1, 3, 4, 5, 6, 7, 8, 9]))
    linked.linker.close()
