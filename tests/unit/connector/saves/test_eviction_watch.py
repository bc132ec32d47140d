"""The policy `on_evict`, over vLLM's own free queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from kvoffload.connector.common.step_plan import StepPlan
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.saves.eviction_watch import EvictionWatch
from kvoffload.connector.serving import ENDING_S, LEFT_WAIT_S
from tests.kit.connector.engine_configs import full, window
from tests.kit.connector.saving import DENSE, HYBRID, MIXED, make_engine, names_of, saved_blocks
from tests.kit.connector.scripted import STEP_S, Admission, ScriptedEngine

TWO = ((["a"], full(4)), (["c"], window(4, tokens=64)))
"""Two groups, of which the engine frees all blocks of one after those of the other."""


def watching(groups: object = DENSE, *, look_ahead: int = 256, **changes: Any) -> ScriptedEngine:
    engine = make_engine(groups, extra={"save_policy": "on_evict"}, **changes)
    watch_of(engine).look_ahead = look_ahead
    return engine


def watch_of(engine: ScriptedEngine) -> EvictionWatch:
    assert isinstance(engine.parts.policy, EvictionWatch)
    return engine.parts.policy


def free_order(engine: ScriptedEngine) -> list[int]:
    return [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]


def hold(block: KVCacheBlock, name: BlockHashWithGroupId | None, tokens: int | None) -> None:
    """It holds something else from now on."""
    assert name is not None
    block.reset_hash()
    block.set_block_hash(name, tokens)


def know_adapters(engine: ScriptedEngine) -> None:
    """Makes every adapter one that has not changed since its request came."""
    engine.side.masks.find = lambda request, settings: engine.side.masks.generation


def take_bare(engine: ScriptedEngine) -> Sequence[KVCacheBlock]:
    """Takes every block in which nothing is cached, so that the next one taken loses a cached block."""
    bare = [engine.pool.blocks[block] for block in free_order(engine) if engine.pool.blocks[block].block_hash is None]
    engine.pool.touch(bare)
    return bare


def fill(engine: ScriptedEngine, tokens: range = range(30)) -> list[bytes]:
    """A request whose blocks are the next that the engine takes; their hashes."""
    hashes = list(engine.arrive("a", tokens).block_hashes)
    engine.admit(engine.requests["a"])
    assert engine.step().saves == ()
    engine.finish(engine.requests["a"])
    take_bare(engine)
    return hashes


def test_nothing_is_saved_before_the_engine_is_about_to_take_it() -> None:
    engine = watching(look_ahead=4)
    request = engine.arrive("a", range(30))
    engine.admit(request)
    assert engine.step().saves == ()
    engine.preempt(request)
    assert engine.step().saves == (), "others are taken first"
    bare = take_bare(engine)
    engine.pool.free_blocks(bare[:3])
    order = free_order(engine)
    assert saved_blocks(engine.step()) == order[3:4]


def test_what_is_taken_next_is_saved_in_that_order_under_its_name_and_parent() -> None:
    engine = watching(look_ahead=4)
    hashes = fill(engine)
    before = free_order(engine)
    plan = engine.step()
    # The engine frees the deepest block first.
    assert saved_blocks(plan) == before[:4]
    assert [engine.pool.blocks[block].ref_cnt for block in before[:5]] == [1, 1, 1, 1, 0]
    engine.report(plan)
    assert names_of(engine) == hashes[:2:-1]
    assert [one.parent for one in engine.cache.published] == hashes[5:1:-1]


def test_what_is_saved_late_is_still_its_tenants() -> None:
    engine = watching()
    for name, wishes in (("a", {"tenant": "acme"}), ("b", {})):
        first = 100 * ord(name)
        engine.admit(engine.arrive(name, range(first, first + 9), **wishes))
        engine.report(engine.step())
        engine.finish(engine.requests[name])
    take_bare(engine)
    engine.report(engine.step())
    assert sorted(one.tenant for one in engine.cache.published) == ["", "", "acme", "acme"]


@pytest.mark.parametrize("groups", [DENSE, TWO, HYBRID])
def test_what_was_saved_is_taken_next_in_the_same_order(groups: object) -> None:
    engine = watching(groups)
    fill(engine)
    before = free_order(engine)
    plan = engine.step()
    assert plan.saves
    assert engine.pinned == len(before) - len(free_order(engine)) > 2
    engine.report(plan)
    assert free_order(engine) == before
    assert engine.pinned == 0


def test_everything_is_there_when_the_engine_has_lost_it() -> None:
    engine = watching(MIXED)
    fill(engine)
    engine.report(engine.step())
    hog = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    engine.pool.free_blocks(hog)
    assert engine.match(engine.arrive("b", range(30))) == 28


def test_a_block_that_is_being_saved_is_not_taken() -> None:
    engine = watching()
    fill(engine)
    plan = engine.step()
    assert engine.pool.get_num_free_blocks() == 0
    engine.report(plan)
    assert engine.pool.get_num_free_blocks() == 7


def test_blocks_in_use_are_not_saved() -> None:
    engine = watching()
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plans = [engine.step()]
    take_bare(engine)
    engine.report(engine.step())
    plans.append(engine.step())
    assert [plan.saves for plan in plans] == [(), ()]


def test_what_is_present_already_is_not_saved() -> None:
    engine = watching()
    hashes = fill(engine)
    engine.report(engine.step())
    watch_of(engine).look_again()
    assert engine.step().saves == ()
    assert len(names_of(engine)) == len(hashes)


def test_the_same_content_in_two_blocks_is_saved_once() -> None:
    engine = watching()
    requests = [engine.arrive(name, range(30)) for name in "ab"]
    for request in requests:
        engine.admit(request)
        if request is requests[0]:
            engine.pool.evict_blocks(set(engine.manager.get_block_ids("a")[0]))
    engine.manager.cache_blocks(requests[0], 28)
    assert engine.step().saves == ()
    for request in requests:
        engine.finish(request)
    assert len(saved_blocks(engine.step())) == 7


@pytest.mark.parametrize("lacks", ["hash", "whole", "name"])
def test_a_block_that_holds_no_whole_block_of_ours_is_not_saved(lacks: str) -> None:
    engine = watching()
    fill(engine)
    order = free_order(engine)
    block = engine.pool.blocks[order[0]]
    if lacks == "hash":
        engine.pool.evict_blocks({block.block_id})
    elif lacks == "whole":
        hold(block, block.block_hash, 26)
    else:
        watch_of(engine).settle(np.array(order[:1]))
    assert saved_blocks(engine.step()) == order[1:]


def test_a_block_that_holds_something_else_by_now_is_not_saved_under_its_old_name() -> None:
    engine = watching()
    fill(engine)
    order = free_order(engine)
    other = engine.pool.blocks[order[3]]
    hold(engine.pool.blocks[order[0]], other.block_hash, other.block_hash_num_tokens)
    assert saved_blocks(engine.step()) == order[1:]


def test_a_reset_forgets_the_names() -> None:
    engine = watching()
    fill(engine)
    engine.connector.reset_cache()
    assert engine.step().saves == ()


def test_after_a_reset_the_new_names_are_saved() -> None:
    engine = watching()
    engine.connector.reset_cache()
    hashes = fill(engine)
    engine.report(engine.step())
    assert len(names_of(engine)) == len(hashes)
    assert not set(names_of(engine)) & set(hashes)
    engine.pool.evict_blocks(set(free_order(engine)))
    engine.pool.free_blocks([block for block in engine.pool.blocks if block.ref_cnt and not block.is_null])
    assert engine.match(engine.arrive("b", range(30))) == 28


def test_the_queue_is_not_looked_at_again_while_its_head_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = watching()
    fill(engine)
    looked_at: list[KVCacheBlock] = []
    key_of = vllm_compat.full_block_key
    monkeypatch.setattr(vllm_compat, "full_block_key", lambda *given: looked_at.append(given[0]) or key_of(*given))
    engine.cache.slots_left = 3
    engine.report(engine.step())
    assert len(looked_at) == 7
    engine.cache.slots_left = 1
    engine.step()
    assert len(looked_at) == 11, "four are left, and there was no room for them"
    engine.parts.policy.look_again = lambda: None
    engine.cache.slots_left = 1
    engine.step()
    looked = len(looked_at)
    engine.cache.slots_left = 1
    engine.step()
    assert len(looked_at) == looked


@pytest.mark.parametrize("lacks", ["pins", "slots"])
def test_what_there_was_no_room_for_is_saved_as_soon_as_there_is(lacks: str) -> None:
    """Although the queue looks the same again: what was saved has returned to its head."""
    engine = watching()
    fill(engine)
    order = free_order(engine)
    if lacks == "pins":
        engine.parts.pins.limit = 4
    else:
        engine.cache.slots_left = 4
    plan = engine.step()
    assert saved_blocks(plan) == order[:4]
    engine.report(plan)
    assert free_order(engine) == order
    engine.cache.slots_left = None
    assert saved_blocks(engine.step()) == order[4:]


def test_what_a_fault_kept_from_being_saved_is_saved_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = watching()
    fill(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "lookup", lambda group, hashes: {}[group])
        assert engine.step().saves == ()
    assert engine.connector.faults == {"build_connector_meta": 1}
    assert len(saved_blocks(engine.step())) == 7


def test_windows_that_are_not_worth_saving_are_not_saved() -> None:
    """The engine keeps all of them here."""
    engine = watching(MIXED, retention_interval=None)
    engine.parts.worth.interval = 0
    hashes = fill(engine)
    engine.report(engine.step())
    assert names_of(engine, 0) == hashes[::-1]
    assert sorted(names_of(engine, 1)) == sorted(hashes[5:])


@pytest.mark.parametrize("boundary", [0, 16, 28])
def test_states_and_what_leads_to_them_are_saved_where_they_were_handed_off(boundary: int) -> None:
    engine = watching(HYBRID)
    hashes = list(engine.arrive("a", range(30)).block_hashes)
    engine.admit(engine.requests["a"])
    end = boundary // 4
    block = engine.manager.get_block_ids("a")[0][6]
    assert engine.step(offers={"a": [(0, block, boundary)]} if boundary else {}).saves == ()
    engine.finish(engine.requests["a"])
    take_bare(engine)
    engine.report(engine.step())
    # The engine keeps the state of the last boundary alone.
    assert names_of(engine, 0) == (hashes[6:7] if boundary == 28 else [])
    assert names_of(engine, 1) == hashes[:end][::-1]


def test_who_wishes_no_save_is_not_saved() -> None:
    engine = watching()
    request = engine.arrive("a", range(30), skip_save=True)
    engine.admit(request)
    engine.step()
    engine.finish(request)
    take_bare(engine)
    assert engine.step().saves == ()


def test_blocks_that_cannot_be_copied_are_not_tried_for_ever() -> None:
    engine = watching()
    fill(engine)
    plan = engine.step()
    assert saved_blocks(plan)
    engine.report(plan, bad_saves=True)
    assert engine.step().saves == ()
    assert not engine.connector.has_pending_push_work()


def test_what_an_adapter_computes_is_saved_at_once_as_its_content_may_change() -> None:
    engine = watching()
    request = engine.arrive("a", range(30))
    request.lora_request = object()  # type: ignore[assignment]
    know_adapters(engine)
    engine.admit(request)
    assert len(saved_blocks(engine.step())) == 7
    engine.connector.shutdown()


def test_what_is_being_saved_counts_as_looked_at() -> None:
    """It is not in the queue, and what stands behind it is taken next: not all of that may be on its way at once."""
    engine = watching(look_ahead=4)
    fill(engine)
    order = free_order(engine)
    plan = engine.step()
    assert saved_blocks(plan) == order[:4]
    assert engine.step().saves == ()
    engine.pool.get_new_blocks(1)
    assert engine.step().saves == ()
    engine.report(plan)
    assert free_order(engine)[:5] == [*order[:4], order[5]]
    engine.pool.get_new_blocks(1)
    assert saved_blocks(engine.step()) == order[5:6], "the fourth of those that are next; one was lost meanwhile"


# ---- auto ----


def automatic(groups: object = DENSE, **changes: Any) -> ScriptedEngine:
    return make_engine(groups, extra={"save_policy": "auto"}, **changes)


def fill_pool(engine: ScriptedEngine) -> None:
    """Makes the pool full: every further slot displaces a block."""
    engine.cache.is_full = True


def test_while_the_pool_has_room_blocks_are_saved_as_they_fill() -> None:
    """An engine that restarts, or another engine, then finds them, even if the pool is smaller than the engine's
    cache."""
    engine = automatic()
    engine.admit(engine.arrive("a", range(30)))
    assert len(saved_blocks(engine.step())) == 7


def test_when_the_pool_is_full_blocks_are_saved_when_the_engine_is_about_to_lose_them() -> None:
    engine = automatic()
    fill_pool(engine)
    hashes = fill(engine)
    engine.report(engine.step())
    assert sorted(names_of(engine)) == sorted(hashes)


def test_when_the_pool_is_full_what_is_used_a_second_time_is_saved_at_once() -> None:
    engine = automatic(num_blocks=512)
    fill_pool(engine)
    engine.parts.policy.look_ahead = 1
    assert [plan.saves for plan in engine.serve("first", range(30))] == [()]
    request = engine.arrive("second", [*range(16), *range(100, 130)])
    assert engine.admit(request) == Admission(16, 0)
    assert saved_blocks(engine.step()) == engine.manager.get_block_ids("second")[0][:4]


def end_without_room(engine: ScriptedEngine, lacks: str) -> tuple[StepPlan, list[bytes]]:
    """A request has ended, and two of its seven blocks are being saved."""
    if lacks == "pins":
        engine.parts.pins.limit = 2
    else:
        engine.cache.slots_left = 2
    hashes = list(engine.arrive("a", range(30)).block_hashes)
    engine.admit(engine.requests["a"])
    plan = engine.step()
    assert len(saved_blocks(plan)) == 2
    engine.finish(engine.requests["a"])
    return plan, hashes


def give_room(engine: ScriptedEngine) -> None:
    engine.cache.slots_left = None
    engine.parts.pins.limit = 16


@pytest.mark.parametrize("lacks", ["pins", "slots"])
def test_what_there_was_no_room_for_until_its_request_ended_is_saved_as_soon_as_there_is(lacks: str) -> None:
    """Such as the first request of all, which may end before slots are there; an idle engine steps on for it."""
    engine = automatic()
    plan, hashes = end_without_room(engine, lacks)
    engine.parts.pins.limit = min(engine.parts.pins.limit, 2)
    engine.report(plan)
    assert engine.connector.has_pending_push_work()
    give_room(engine)
    engine.report(engine.step())
    assert sorted(names_of(engine)) == sorted(hashes)
    assert not engine.connector.has_pending_push_work()


def test_an_idle_engine_does_not_wait_for_ever_for_slots_that_do_not_come() -> None:
    engine = automatic()
    engine.cache.slots_left = 0
    engine.serve("a", range(30))
    steps = 0
    while engine.connector.has_pending_push_work():
        assert engine.step().saves == ()
        steps += 1
    assert steps * STEP_S == pytest.approx(LEFT_WAIT_S, abs=2 * STEP_S)


@pytest.mark.parametrize("lacks", ["pins", "slots"])
def test_what_there_was_no_room_for_is_saved_before_the_engine_loses_it_when_the_pool_is_full(lacks: str) -> None:
    engine = automatic()
    plan, hashes = end_without_room(engine, lacks)
    fill_pool(engine)
    engine.report(plan)
    give_room(engine)
    take_bare(engine)
    engine.report(engine.step())
    engine.report(engine.step())
    assert sorted(names_of(engine)) == sorted(hashes)


def test_where_nothing_waits_to_be_saved_the_queue_is_not_looked_at() -> None:
    engine = automatic()
    engine.serve("a", range(30))
    assert not engine.parts.policy.is_watching


def test_an_engine_that_is_told_to_stop_saves_what_its_cache_still_holds_within_a_bound() -> None:
    engine = automatic()
    fill_pool(engine)
    engine.parts.policy.look_ahead = 1
    assert [plan.saves for plan in engine.serve("first", range(30))] == [()]
    assert not engine.connector.has_pending_push_work()
    engine.side.begin_ending()
    assert engine.connector.has_pending_push_work(), "or there would be no further step"
    plan = engine.step()
    assert len(saved_blocks(plan)) == 7
    engine.report(plan)
    assert not engine.connector.has_pending_push_work()
    assert len(names_of(engine)) == 7


def test_an_engine_that_is_told_to_stop_does_not_wait_for_what_cannot_be_saved() -> None:
    engine = automatic()
    fill_pool(engine)
    engine.cache.slots_left = 0
    engine.serve("first", range(30))
    engine.side.begin_ending()
    engine.side.begin_ending()
    steps = 0
    while engine.connector.has_pending_push_work():
        assert engine.step().saves == ()
        steps += 1
    assert steps * STEP_S == pytest.approx(ENDING_S)


def test_what_an_adapter_computed_and_found_no_room_is_dropped_and_counted() -> None:
    """Its content may change before there is room."""
    engine = automatic()
    engine.cache.slots_left = 2
    request = engine.arrive("a", range(30))
    request.lora_request = object()  # type: ignore[assignment]
    know_adapters(engine)
    engine.admit(request)
    plan = engine.step()
    engine.finish(request)
    engine.report(plan)
    assert engine.step().saves == ()
    assert not engine.parts.policy.is_watching
    assert engine.connector.measures.take().data["kvoffload_dropped_saves_total"] == {"no_slot": 5}
    engine.connector.shutdown()
