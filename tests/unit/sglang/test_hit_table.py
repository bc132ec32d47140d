"""Pages promised to requests are leased until the requests load them, end, or are not heard of any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffload.protocol import Miss
from kvoffload.sglang import hit_table
from kvoffload.sglang.asked_prompts import TELL_AFTER_S
from tests.kit.sglang.linked import Linked, link, make_keys, pages_of
from tests.kit.sglang.pools import PAGE, MHATokenToKVPool, SWAKVPool, rows_of

KEYS = make_keys(3)
PAGES = rows_of(1, 2, 3)
OTHER_PAGES = rows_of(7, 4, 5)
WINDOW = 7
"""Two pages of it are behind a boundary."""
SWA = 1
LONG = make_keys(5, seed=11)


@pytest.fixture
def linked() -> Iterator[Linked]:
    linked = link(MHATokenToKVPool())
    yield linked
    linked.linker.close()
    assert not linked.cache.held


@pytest.fixture
def windowed() -> Iterator[Linked]:
    linked = link(SWAKVPool(), window=WINDOW)
    yield linked
    linked.linker.close()
    assert not linked.cache.held


def test_what_was_told_of_is_leased_until_it_is_loaded_or_the_request_has_ended(linked: Linked) -> None:
    linked.save(KEYS, PAGES)
    for rid in ("a", "b", "c"):
        linked.linker.lookup(rid, KEYS)
    assert len(linked.cache.held) == 3
    linked.linker.lookup("a", KEYS)
    assert len(linked.cache.held) == 3
    linked.load("a", KEYS, OTHER_PAGES)
    assert not linked.linker.cancel_load("b")
    assert len(linked.cache.held) == 1
    assert linked.linker.cancel_load("a")
    assert linked.linker.take_loaded() == ()


def test_a_hit_that_nobody_loads_is_given_back() -> None:
    now = [0.0]
    linked = link(MHATokenToKVPool(), clock=lambda: now[0])
    linked.save(KEYS, PAGES)
    linked.linker.lookup("a", KEYS)
    now[0] += hit_table.HELD_S
    linked.linker.lookup("b", make_keys(1, seed=9))
    assert not linked.cache.held
    assert not linked.load("a", KEYS, OTHER_PAGES)
    for number in range(2 * hit_table.MAX_HELD):
        linked.linker.lookup(str(number), KEYS)
    assert len(linked.cache.held) == hit_table.MAX_HELD
    linked.linker.close()


def test_without_an_answer_in_time_there_is_no_hit(linked: Linked) -> None:
    linked.save(KEYS, PAGES)
    linked.cache.is_answering = False
    assert linked.linker.lookup("r", KEYS) == []
    assert not linked.cache.held


def test_a_request_that_asks_again_keeps_its_lease(linked: Linked) -> None:
    linked.save(KEYS, PAGES)
    linked.linker.lookup("r", KEYS)
    (lease,) = linked.cache.held
    assert linked.linker.lookup("r", KEYS) == [1, 2, 3]
    assert linked.cache.held == {lease}
    assert linked.linker.lookup("r", KEYS[1:]) == [1, 2]
    assert lease not in linked.cache.held


def test_every_length_at_which_its_window_is_there_is_told(windowed: Linked) -> None:
    assert windowed.save(LONG[:2], rows_of(1, 2), pages_of(LONG[:2], rows_of(1, 2), SWA))
    assert windowed.linker.lookup("r", LONG) == [1, 2]
    # A node whose window the engine has let go of comes without it.
    assert windowed.save(LONG, rows_of(1, 2, 3, 4, 5))
    assert windowed.linker.lookup("r", LONG) == [1, 2]
    assert windowed.save(LONG[4:], rows_of(5), pages_of(LONG[4:], rows_of(5), SWA))
    assert windowed.linker.lookup("r", LONG) == [1, 2]
    assert windowed.save(LONG[3:4], rows_of(4), pages_of(LONG[3:4], rows_of(4), SWA))
    assert windowed.linker.lookup("r", LONG) == [5]
    assert windowed.linker.lookup("tail", LONG[3:]) == [1, 2]


def test_a_request_that_asks_again_finds_a_window_that_has_come(windowed: Linked) -> None:
    windowed.save(LONG[:2], rows_of(1, 2), pages_of(LONG[:2], rows_of(1, 2), SWA))
    windowed.save(LONG, rows_of(1, 2, 3, 4, 5))
    assert windowed.linker.lookup("r", LONG) == [1, 2]
    (lease,) = windowed.cache.held
    assert windowed.linker.lookup("r", LONG) == [1, 2]
    assert windowed.cache.held == {lease}
    windowed.save(LONG[3:], rows_of(4, 5), pages_of(LONG[3:], rows_of(4, 5), SWA))
    assert windowed.linker.lookup("r", LONG) == [5]


def test_what_is_below_memory_is_asked_for_and_found_by_a_request_that_waits() -> None:
    now = [0.0]
    linked = link(MHATokenToKVPool(), clock=lambda: now[0])
    linked.save(KEYS[:1], rows_of(1))
    assert linked.linker.lookup("r", KEYS) == [1]
    assert linked.cache.prefetched == []
    linked.cache.has_tiers = True
    assert linked.linker.lookup("r", KEYS) == [1]
    assert linked.linker.lookup("r", KEYS) == [1]
    (ask,) = linked.cache.prefetched
    assert (bytes(ask.chain), ask.local) == (bytes.fromhex("".join(KEYS)), PAGE)
    now[0] += hit_table.LOOK_BELOW_S
    linked.linker.lookup("r", KEYS)
    assert len(linked.cache.prefetched) == 2
    # They have come meanwhile.
    linked.save(KEYS, PAGES)
    now[0] += hit_table.LOOK_BELOW_S
    assert linked.linker.lookup("r", KEYS) == [1, 2, 3]
    assert len(linked.cache.prefetched) == 2
    linked.linker.close()


def test_slower_tiers_are_asked_for_no_more_requests_than_are_remembered() -> None:
    linked = link(MHATokenToKVPool())
    linked.cache.has_tiers = True
    for number in range(2 * hit_table.MAX_HELD):
        linked.linker.lookup(str(number), KEYS)
    assert len(linked.cache.prefetched) == 2 * hit_table.MAX_HELD
    linked.linker.lookup("0", KEYS)
    assert len(linked.cache.prefetched) == 2 * hit_table.MAX_HELD + 1
    linked.linker.close()


def test_the_server_is_told_once_of_each_prompt_and_what_came_of_it() -> None:
    now = [0.0]
    linked = link(MHATokenToKVPool(), clock=lambda: now[0])
    linked.save(KEYS[:2], rows_of(1, 2))
    linked.linker.lookup("loaded", KEYS)
    # It waits for room.
    now[0] += 0.75 * TELL_AFTER_S
    linked.linker.lookup("loaded", KEYS)
    now[0] += 0.75 * TELL_AFTER_S
    linked.linker.begin_step()
    linked.load("loaded", KEYS[:2], rows_of(4, 5))
    linked.linker.lookup("computed", make_keys(2, seed=7))
    linked.linker.lookup("failed", KEYS)
    linked.load("failed", make_keys(2, seed=8), rows_of(4, 5))
    linked.cache.is_answering = False
    linked.linker.lookup("slow", KEYS)
    linked.cache.is_answering, linked.cache.is_served = True, False
    linked.linker.lookup("not served", make_keys(1, seed=9))
    linked.linker.begin_step()
    assert len(linked.cache.told) == 2
    now[0] += TELL_AFTER_S
    linked.linker.begin_step()
    told = [(note.tokens, note.boundary, note.miss) for note in linked.cache.told]
    assert told == [
        (3 * PAGE, 2 * PAGE, Miss.NEVER_SEEN),
        (3 * PAGE, 0, Miss.REFUSED),
        (2 * PAGE, 0, Miss.NEVER_SEEN),
        (3 * PAGE, 0, Miss.SLOW_TO_ANSWER),
        (1 * PAGE, 0, Miss.NOT_SERVED),
    ]
    linked.linker.close()


def test_the_log_says_once_in_ten_minutes_why_stored_prompts_were_computed(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    linked = link(MHATokenToKVPool(), clock=lambda: now[0])
    linked.save(KEYS, PAGES)
    linked.linker.lookup("found", KEYS)
    linked.linker.lookup("never saved", make_keys(2, seed=7))
    linked.cache.is_answering = False
    linked.linker.lookup("first", KEYS)
    linked.cache.is_answering, linked.cache.is_served, linked.cache.fault = True, False, "it has ended"
    linked.linker.lookup("second", make_keys(1, seed=9))
    now[0] += TELL_AFTER_S
    linked.linker.begin_step()
    (line,) = caplog.messages
    assert line.startswith("kvoffload: prompts were computed although they are stored, or may be (slow_to_answer 1), ")
    assert line.endswith("; settings: acquire_deadline, step_budget")
    linked.linker.close()
    (_, line) = caplog.messages
    assert line == (
        "kvoffload: prompts were computed although they are stored, or may be (not_served 1), the last one by request "
        "second: the cache server does not serve this engine at the moment (it has ended); settings: server"
    )
