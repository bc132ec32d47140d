"""Saves from their plan to their end: what is published, in which memory, after a reset, and when a request ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kit.connector.saving import MIXED, hashes_of, names_of, save_prompt

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.cache import ReservedSlots
from kvoffload.connector.common.step_plan import Place, StepPlan, WorkerReport
from kvoffload.native import finish_digests
from tests.kit.connector.engine_configs import full, recurrent, window
from tests.kit.connector.saving import DENSE, HYBRID, TWO_SIZES, make_engine, saved_blocks
from tests.kit.connector.scripted import DIGEST_BYTES, Admission, ScriptedEngine, list_moves

WINDOW = ((["c"], window(4, tokens=6)),)


# ---- what is published ----


def test_blocks_are_published_under_the_hashes_of_their_last_tokens_with_the_blocks_before_them() -> None:
    engine = make_engine(TWO_SIZES)
    engine.report(save_prompt(engine, "a", range(30)))
    hashes = hashes_of(engine, "a")
    assert [(one.name, one.parent) for one in engine.cache.published if one.group == 0] == [
        (hashes[1], bytes(32)),
        (hashes[3], hashes[1]),
        (hashes[5], hashes[3]),
    ]
    # The parent of a window's block is the first group's block that ends with it, if one does.
    assert [(one.name, one.parent) for one in engine.cache.published if one.group == 1] == [
        (hashes[at], hashes[at] if at % 2 else bytes(32)) for at in range(7)
    ]


@pytest.mark.parametrize("groups", [MIXED, MIXED[::-1], HYBRID])
def test_the_block_that_a_window_or_a_state_needs_is_published_before_it(groups: Any) -> None:
    """The cache takes one without its block for useless."""
    engine = make_engine(groups)
    engine.report(save_prompt(engine, "a", range(30)))
    (prefix,) = engine.parts.groups.prefixes
    told = [one.name for one in engine.cache.published if one.group == prefix]
    assert [one.group == prefix for one in engine.cache.published[: len(told)]] == [True] * len(told)
    ends = engine.cache.published[len(told) :]
    assert ends
    assert {one.parent for one in ends} <= set(told)


@pytest.mark.parametrize("ranks", [1, 2])
def test_digests_of_all_shards_are_published(ranks: int) -> None:
    engine = make_engine(TWO_SIZES, ranks=ranks)
    (save,) = save_prompt(engine, "a", range(30)).saves
    low = np.random.default_rng(1).integers(0, 2**63, (ranks, len(save.moves), 1), np.uint64)
    totals = np.concatenate([low, np.zeros_like(low)], axis=2).view(np.uint8)
    assert totals.shape[2] == DIGEST_BYTES
    for rank in range(ranks):
        assert engine.cache.published == []
        engine.hear(WorkerReport({save.job: 1}, digests={save.job: {rank: totals[rank].tobytes()}}))
    assert len(engine.cache.published) == ranks * len(save.moves)
    at = {move.address: number for number, move in enumerate(list_moves(save))}
    for one in engine.cache.published:
        record_bytes = engine.geometry.groups[one.group].record_bytes
        (digest,) = np.frombuffer(
            finish_digests(
                totals[one.shard, at[one.address - one.shard * record_bytes]].tobytes(),
                record_bytes,
                fingerprint=b"f" * 32,
                block_hashes=one.name,
                group=one.group,
                shard=one.shard,
            ),
            np.uint64,
        )
        assert one.digest == digest
    assert engine.cache.stats().readable == len(save.moves)


def test_ranks_that_hold_the_same_bytes_write_one_shard_and_all_are_waited_for() -> None:
    engine = make_engine(ranks=2, replicas=2)
    plan = save_prompt(engine, "a", range(30))
    engine.report(plan, ranks=1)
    assert (engine.pinned, engine.cache.stats().readable) == (7, 0)
    engine.report(plan, ranks=1)
    assert (engine.pinned, engine.cache.stats().readable) == (0, 7)
    assert {one.shard for one in engine.cache.published} == {0}


def test_a_request_that_wishes_no_save_saves_nothing() -> None:
    engine = make_engine(MIXED, retention_interval=0)
    assert save_prompt(engine, "a", range(30), skip_save=True).saves == ()
    engine.finish(engine.requests["a"])
    assert engine.step().saves == ()


def test_what_failed_is_saved_for_the_next_request() -> None:
    engine = make_engine()
    engine.report(save_prompt(engine, "a", range(30)), bad_saves=True)
    assert len(saved_blocks(save_prompt(engine, "b", range(30)))) == 7


# ---- where ----


def test_slots_that_not_every_rank_has_mapped_are_not_used() -> None:
    engine = make_engine(ranks=2)
    places = engine.places
    engine.hear(WorkerReport(places={1: ()}))
    request = engine.arrive("a", range(30))
    engine.admit(request)
    assert engine.step().saves == ()
    assert engine.cache.stats().reserved == 0
    engine.hear(WorkerReport(places={1: places}))
    engine.decode(request)
    engine.run(request, 1)
    assert saved_blocks(engine.step()) == engine.manager.get_block_ids("a")[0][:7]


def test_saves_to_two_memories_are_two_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may be followed by another while a step is planned."""
    engine = make_engine(TWO_SIZES)
    first = engine.cache.memory_id
    take = engine.cache.take

    def take_and_change(group: int, count: int) -> ReservedSlots:
        slots = take(group, count)
        if engine.cache.memory_id == first:
            engine.cache.serve_anew()
            engine.hear(WorkerReport(places={0: engine.places}))
        return slots

    monkeypatch.setattr(engine.cache, "take", take_and_change)
    plan = save_prompt(engine, "a", range(30))
    second = engine.cache.memory_id
    assert [save.place.memory_id for save in plan.saves] == [first, second]
    assert [len(save.moves) for save in plan.saves] == [3, 7]
    assert all(save.place in engine.places for save in plan.saves)
    assert plan.retired == ()
    engine.report(StepPlan(saves=plan.saves[1:]))
    assert engine.step().retired == ()
    engine.report(StepPlan(saves=plan.saves[:1]))
    # Blocks saved into the first server's memory will not be looked for.
    assert [one.memory_id for one in engine.cache.published] == [second] * 7
    assert engine.step().retired == (first,)
    assert engine.step().retired == ()
    engine.finish(engine.requests["a"])
    engine.assert_at_rest()


def test_a_former_memory_stays_while_something_is_loaded_from_it() -> None:
    engine = make_engine()
    engine.serve("first", range(30))
    engine.forget()
    engine.admit(engine.arrive("second", range(30)))
    first = Place(engine.cache.memory_id, engine.cache.session)
    engine.cache.serve_anew()
    plan = engine.step()
    assert ([load.place for load in plan.loads], plan.retired) == ([first], ())
    engine.report(plan)
    assert engine.step().retired == (first.memory_id,)


# ---- a reset ----


def test_a_reset_unpins_at_once_and_gives_slots_back_when_the_copy_has_ended() -> None:
    engine = make_engine()
    plan = save_prompt(engine, "a", range(30))
    assert engine.connector.reset_cache() is True
    assert engine.pinned == 0
    assert engine.cache.aborted == []  # a worker is still writing
    assert engine.connector.has_pending_push_work()
    engine.report(plan)
    assert engine.cache.published == []
    assert [len(slots) for slots in engine.cache.aborted] == [7]
    engine.finish(engine.requests["a"])
    engine.assert_at_rest()
    engine.forget()
    assert engine.match(engine.arrive("b", range(30))) == 0


def test_a_reset_drops_what_ended_requests_have_left_for_the_next_plan() -> None:
    engine = make_engine()
    engine.cache.slots_left = 0
    save_prompt(engine, "a", range(30))
    engine.cache.slots_left = None
    engine.finish(engine.requests["a"])
    assert engine.pinned == 7
    engine.connector.reset_cache()
    assert engine.pinned == 0
    assert engine.step().saves == ()
    engine.assert_at_rest()


def test_a_reset_twice_drops_a_save_once() -> None:
    engine = make_engine()
    plan = save_prompt(engine, "a", range(30))
    engine.connector.reset_cache()
    engine.connector.reset_cache()
    engine.report(plan, bad_saves=True)
    engine.finish(engine.requests["a"])
    engine.assert_at_rest()


def test_after_a_reset_all_blocks_have_other_names() -> None:
    engine = make_engine()
    engine.serve("a", range(30))
    engine.forget()
    engine.connector.reset_cache()
    assert engine.match(engine.arrive("b", range(30))) == 0
    engine.finish(engine.requests["b"])
    engine.serve("c", range(30))
    before, after = names_of(engine)[:7], names_of(engine)[7:]
    assert len(after) == 7
    assert not set(before) & set(after)
    engine.forget()
    engine.connector.reset_cache()
    engine.serve("d", range(30))
    assert len(set(names_of(engine))) == 21


def test_a_block_on_its_way_at_a_reset_is_saved_anew() -> None:
    engine = make_engine()
    save_prompt(engine, "a", range(30))
    engine.connector.reset_cache()
    engine.finish(engine.requests["a"])
    engine.forget()
    engine.connector.reset_cache()
    assert len(saved_blocks(save_prompt(engine, "b", range(30)))) == 7


def test_nothing_is_saved_or_found_while_the_engine_has_blocks_of_old_weights(caplog: pytest.LogCaptureFixture) -> None:
    """Its own hits would be saved under names of the new ones."""
    engine = make_engine()
    engine.serve("a", range(30))
    published = len(engine.cache.published)
    engine.connector.reset_cache()
    assert "reset while the engine's own cache was not" in caplog.text
    engine.serve("b", range(40))
    assert len(engine.cache.published) == published
    engine.forget()
    assert engine.match(engine.arrive("c", range(40))) == 0
    engine.finish(engine.requests["c"])
    engine.connector.reset_cache()
    engine.serve("d", range(40))
    assert len(engine.cache.published) == published + 10
    engine.assert_at_rest()


@pytest.mark.parametrize("groups", [DENSE, WINDOW, MIXED, HYBRID])
def test_who_runs_at_a_reset_saves_nothing_until_it_is_asked_about_again(groups: Any) -> None:
    """Its blocks are of the old weights."""
    engine = make_engine(groups)
    request = engine.arrive("a", range(30))
    engine.admit(request, chunk=8)
    engine.report(engine.step())
    engine.connector.reset_cache()
    published = len(engine.cache.published)
    while request.num_computed_tokens < request.num_tokens:
        engine.run(request, 8)
        assert engine.step(offers={"a": [(0, 3, 28)]}).saves == ()
    engine.preempt(request)
    engine.forget()
    engine.connector.reset_cache()
    assert engine.admit(request) == Admission(0, 0)
    engine.report(engine.step())
    assert len(engine.cache.published) > published
    engine.finish(request)
    engine.report(engine.step())
    engine.assert_at_rest()


def test_who_ends_after_a_reset_leaves_nothing() -> None:
    engine = make_engine(MIXED, retention_interval=0)
    request = engine.arrive("a", range(10))
    engine.admit(request)
    engine.report(engine.step())
    engine.connector.reset_cache()
    for _ in range(8):
        engine.decode(request)
        engine.run(request, 1)
        engine.step()
    engine.finish(request)
    assert engine.step().saves == ()
    engine.assert_at_rest()


# ---- the end of a request ----


def decode_and_finish(engine: ScriptedEngine, tokens: int) -> tuple[list[int], list[list[int]]]:
    """Blocks of the last group that are saved after its end, and its tables then."""
    request = engine.arrive("a", range(10))
    engine.admit(request)
    engine.report(engine.step())
    for _ in range(tokens):
        engine.decode(request)
        engine.run(request, 1)
        engine.report(engine.step())
    engine.decode(request)  # sampled, and never computed
    tables = [list(table) for table in engine.manager.get_block_ids("a")]
    engine.finish(request)
    plan = engine.step()
    saved = saved_blocks(plan, len(tables) - 1)
    engine.report(plan)
    engine.assert_at_rest()
    return saved, tables


@pytest.mark.parametrize("groups", [WINDOW, MIXED])
def test_the_last_window_is_saved_at_the_end(groups: Any) -> None:
    engine = make_engine(groups, retention_interval=0)
    # 10 tokens and 14 more: the window of 6 before token 24 begins in block 4.
    saved, tables = decode_and_finish(engine, 14)
    assert saved == tables[-1][4:6]
    engine.forget()
    longer = engine.arrive("b", [*range(10), *[7] * 20])
    assert engine.match(longer) == 24


def test_blocks_of_an_ended_request_are_pinned_until_they_are_saved() -> None:
    engine = make_engine()
    engine.cache.slots_left = 0
    save_prompt(engine, "a", range(30))
    engine.cache.slots_left = None
    table = engine.manager.get_block_ids("a")[0][:7]
    engine.finish(engine.requests["a"])
    assert [engine.pool.blocks[block].ref_cnt for block in table] == [1] * 7
    assert engine.connector.has_pending_push_work()
    plan = engine.step()
    assert saved_blocks(plan) == table
    engine.report(plan)
    engine.assert_at_rest()


def test_requests_that_share_blocks_and_end_together_give_each_block_back_once() -> None:
    engine = make_engine()
    engine.cache.slots_left = 0
    for name in "ab":
        save_prompt(engine, name, range(30))
    assert engine.manager.get_block_ids("a")[0][:7] == engine.manager.get_block_ids("b")[0][:7]
    for name in "ab":
        engine.finish(engine.requests[name])
    assert engine.pinned == 14
    assert engine.step().saves == ()
    free = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    assert len(free) == len(set(free)) == engine.pool.get_num_free_blocks() == engine.all_free
    assert engine.pinned == 0


def test_what_ended_requests_take_is_not_promised_to_the_window_of_another() -> None:
    """Half of a window cannot be loaded."""
    engine = make_engine(WINDOW, retention_interval=0)
    request = engine.arrive("a", range(10))
    engine.admit(request)
    engine.report(engine.step())
    for _ in range(14):
        engine.decode(request)
        engine.run(request, 1)
        engine.report(engine.step())
    engine.decode(request)
    engine.cache.slots_left = 0
    other = engine.arrive("b", range(100, 128))
    engine.admit(other)
    assert engine.step().saves == ()
    engine.finish(request)
    engine.cache.slots_left = 3
    engine.decode(other)
    engine.run(other, 1)
    plan = engine.step()
    assert len(saved_blocks(plan)) == 2, "the window that a has left"
    engine.report(plan)
    engine.finish(other)
    engine.report(engine.step())
    engine.assert_at_rest()


def test_an_aborted_load_leaves_nothing_to_save() -> None:
    """Its blocks do not hold yet what the engine counts as computed."""
    engine = make_engine()
    engine.serve("first", range(30))
    engine.forget()
    request = engine.arrive("second", range(30))
    engine.admit(request)
    plan = engine.step()
    engine.cache.local_cache.clear(0)  # these blocks are gone
    engine.finish(request)
    assert engine.pinned == 0
    assert engine.step().saves == ()
    engine.report(plan)
    engine.assert_at_rest()


# ---- states ----


def test_with_states_full_blocks_are_saved_up_to_the_last_state_that_was_handed_off() -> None:
    engine = make_engine(HYBRID)
    request = engine.arrive("a", range(30))
    engine.admit(request)
    assert engine.step(offers={}).saves == ()
    block = engine.manager.get_block_ids("a")[0][6]
    plan = engine.step(offers={"a": [(0, block, 16)]})
    assert saved_blocks(plan, 0) == [block]
    engine.report(plan)
    engine.run(request)
    plan = engine.step(offers={})
    assert saved_blocks(plan, 1) == engine.manager.get_block_ids("a")[1][:4]
    engine.report(plan)
    engine.finish(request)
    assert engine.step().saves == ()
    assert engine.match(engine.arrive("b", range(30))) in (0, 16)


def test_with_states_windows_are_saved_where_a_state_was_handed_off() -> None:
    engine = make_engine(((["r"], recurrent(4)), (["a"], full(4)), (["c"], window(4, tokens=6))), retention_interval=0)
    engine.serve("a", range(30))
    engine.forget()
    assert engine.match(engine.arrive("b", range(60))) == 28
    assert len(names_of(engine, 2)) == 2
