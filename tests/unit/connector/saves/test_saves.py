"""Saves as vLLM lets them happen (contract tables 1.4, 1.7 and 1.8), through the facade, over its own block manager."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kit.connector.saving import HYBRID, TWO_SIZES, make_engine, saved_blocks

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.cache import Publication
from kvoffload.connector.common.step_plan import ONLY_A_FORWARD
from kvoffload.connector.saves.saves import MAX_STEPS_WAITED
from kvoffload.connector.saves.settings import REPORT_WAIT_S
from tests.kit.connector.engine_configs import window
from tests.kit.connector.local_client import MEMORY
from tests.kit.connector.scripted import STEP_S, Admission, Move, list_moves


def test_every_block_that_a_step_fills_is_saved_in_that_step() -> None:
    engine = make_engine()
    request = engine.arrive("a", range(30))
    engine.admit(request, chunk=10)
    assert saved_blocks(engine.step()) == engine.manager.get_block_ids("a")[0][:2]
    engine.run(request, 10)
    assert saved_blocks(engine.step()) == engine.manager.get_block_ids("a")[0][2:5]
    engine.run(request)
    assert saved_blocks(engine.step()) == engine.manager.get_block_ids("a")[0][5:7]


def test_blocks_that_decoding_fills_are_saved_too() -> None:
    engine = make_engine()
    request = engine.arrive("a", range(14))
    engine.admit(request)
    engine.step()
    fills = []
    for _ in range(6):
        engine.decode(request)
        assert engine.run(request, 1)
        fills.append(len(saved_blocks(engine.step())))
    # Tokens 14 to 19: the token at 15 fills the fourth block, the one at 19 the fifth.
    assert fills == [0, 1, 0, 0, 0, 1]


def test_each_group_is_saved_at_its_own_block_size() -> None:
    engine = make_engine(TWO_SIZES)
    engine.admit(engine.arrive("a", range(22)))
    plan = engine.step()
    tables = engine.manager.get_block_ids("a")
    assert saved_blocks(plan, 0) == tables[0][:2]
    assert saved_blocks(plan, 1) == [block for block in tables[1][:5] if block]


def test_draft_tokens_that_no_hash_covers_are_not_saved() -> None:
    engine = make_engine()
    request = engine.arrive("a", range(10))
    engine.admit(request)
    engine.step()
    engine.decode(request)
    assert engine.run(request, 1, drafts=4)
    assert engine.step().saves == ()


def test_a_saved_block_is_not_saved_again_for_another_request() -> None:
    engine = make_engine()
    engine.serve("a", range(30))
    second = engine.arrive("b", range(30))
    assert engine.admit(second) == Admission(local=28, external=0)
    assert engine.step().saves == ()


def test_a_block_on_its_way_is_not_saved_twice() -> None:
    engine = make_engine()
    engine.admit(engine.arrive("a", range(30)))
    assert len(saved_blocks(engine.step())) == 7
    engine.admit(engine.arrive("b", range(30)))
    assert engine.step().saves == ()


def test_source_blocks_are_pinned_from_the_plan_to_the_last_ranks_report() -> None:
    engine = make_engine(ranks=2)
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plan = engine.step()
    blocks = [engine.pool.blocks[block] for block in saved_blocks(plan)]
    assert [block.ref_cnt for block in blocks] == [2] * 7
    engine.finish(request)
    assert [block.ref_cnt for block in blocks] == [1] * 7
    engine.report(plan, ranks=1)
    assert [block.ref_cnt for block in blocks] == [1] * 7
    assert engine.match(engine.arrive("b", range(100, 130))) == 0
    engine.report(plan, ranks=1)
    assert [block.ref_cnt for block in blocks] == [0] * 7
    engine.finish(engine.requests["b"])
    engine.assert_at_rest()


def test_nothing_is_readable_before_every_rank_has_it() -> None:
    engine = make_engine(ranks=2)
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plan = engine.step()
    engine.report(plan, ranks=1)
    assert engine.cache.stats().readable == 0
    engine.report(plan, ranks=1)
    assert engine.cache.stats().readable == 7


def test_a_save_that_failed_on_any_rank_is_dropped_and_unpinned() -> None:
    engine = make_engine(ranks=2)
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plan = engine.step()
    engine.report(plan, ranks=1, bad_saves=True)
    engine.report(plan, ranks=1)
    assert engine.cache.published == []
    assert [len(slots) for slots in engine.cache.aborted] == [7]
    engine.finish(request)
    engine.assert_at_rest()


def test_pins_are_bounded_and_the_rest_is_saved_in_later_steps() -> None:
    engine = make_engine(num_blocks=32)
    engine.parts.pins.limit = 4
    request = engine.arrive("a", range(60))
    engine.admit(request)
    seen: list[int] = []
    for _ in range(8):
        plan = engine.step()
        assert engine.pinned <= 4
        seen += saved_blocks(plan)
        engine.report(plan)
        engine.decode(request)
        assert engine.run(request, 1)
    assert seen[:15] == engine.manager.get_block_ids("a")[0][:15]
    engine.finish(request)
    engine.step()
    engine.assert_at_rest()


def test_finish_with_saves_pending_keeps_pins_only() -> None:
    engine = make_engine()
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plan = engine.step()
    engine.finish(request)
    assert engine.pinned == 7
    assert engine.connector.has_pending_push_work()
    assert engine.connector.has_pending_block_frees()
    assert not engine.manager.reset_prefix_cache()
    engine.report(plan)
    assert engine.manager.reset_prefix_cache()
    engine.assert_at_rest()


def test_a_save_that_hangs_does_not_keep_the_engine_from_preempting() -> None:
    """The engine asks whether to wait for pins; the answer is yes for a bounded number of steps, whatever other saves
    do."""
    engine = make_engine(num_blocks=1024)
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plan = engine.step()
    engine.finish(request)
    for number in range(MAX_STEPS_WAITED):
        assert engine.connector.has_pending_block_frees()
        if number == MAX_STEPS_WAITED // 2:
            engine.serve("other", range(100, 130))
        else:
            engine.step()
    while engine.parts.saves.step < MAX_STEPS_WAITED + 1:
        engine.step()
    assert not engine.connector.has_pending_block_frees()
    assert engine.connector.has_pending_push_work(), "the answer is still awaited"
    engine.report(plan)
    engine.assert_at_rest()


def test_what_somebody_uses_does_not_come_free_when_its_save_ends() -> None:
    """Waiting for the save would only keep the engine from preempting a request."""
    engine = make_engine()
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plan = engine.step()
    assert engine.pinned == 7
    assert not engine.connector.has_pending_block_frees()
    engine.preempt(request)
    assert engine.connector.has_pending_block_frees()
    engine.report(plan)
    assert not engine.connector.has_pending_block_frees()
    engine.finish(request)
    engine.assert_at_rest()


def test_preemption_lets_saves_on_their_way_end() -> None:
    engine = make_engine()
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plan = engine.step()
    engine.preempt(request)
    hog = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    assert not {block.block_id for block in hog} & set(saved_blocks(plan))
    engine.pool.free_blocks(hog)
    engine.report(plan)
    engine.finish(request)
    engine.assert_at_rest()


def test_a_request_is_admitted_again_while_its_save_is_on_its_way() -> None:
    engine = make_engine()
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plan = engine.step()
    engine.preempt(request)
    assert engine.admit(request) == Admission(local=28, external=0)
    assert engine.step().saves == ()
    engine.report(plan)
    engine.finish(request)
    engine.assert_at_rest()


def test_a_preempted_request_saves_again_what_was_lost_meanwhile() -> None:
    engine = make_engine()
    request = engine.arrive("a", range(30))
    engine.admit(request)
    engine.report(engine.step())
    engine.preempt(request)
    engine.forget()
    engine.connector.reset_cache()
    assert engine.admit(request) == Admission(0, 0)
    assert len(saved_blocks(engine.step())) == 7


def test_the_same_blocks_are_saved_again_after_a_reset() -> None:
    engine = make_engine()
    engine.serve("a", range(30))
    engine.forget()
    engine.connector.reset_cache()
    engine.serve("b", range(30))
    engine.forget()
    assert engine.match(engine.arrive("c", range(30))) == 28


def test_null_blocks_are_skipped() -> None:
    engine = make_engine(((["c"], window(4, tokens=6)),))
    request = engine.arrive("a", range(60))
    engine.admit(request, chunk=20)
    plans = [engine.step()]
    while request.num_computed_tokens < 60:
        assert engine.run(request, 20)
        plans.append(engine.step())
    assert 0 in engine.manager.get_block_ids("a")[0]
    assert all(0 not in saved_blocks(plan) for plan in plans)
    engine.report(*plans)
    engine.finish(request)
    engine.assert_at_rest()


def test_recurrent_states_are_saved_only_where_the_engine_hands_them_off() -> None:
    engine = make_engine(HYBRID)
    request = engine.arrive("a", range(30))
    engine.admit(request)
    assert saved_blocks(engine.step(offers={}), 0) == []
    block = engine.manager.get_block_ids("a")[0][6]
    plan = engine.step(offers={"a": [(0, block, 28)]})
    assert saved_blocks(plan, 0) == [block]
    assert engine.pool.blocks[block].ref_cnt == 2


def test_a_state_for_which_there_was_no_slot_is_saved_by_the_next_plan() -> None:
    """The engine offers it once. The slots that it lacked are there by then, or it is given up."""
    engine = make_engine(HYBRID, extra={"save_policy": "eager"})
    for name, slots in (("a", None), ("b", 0)):
        begin = 100 * ord(name)
        engine.admit(engine.arrive(name, range(begin, begin + 30)))
        engine.report(engine.step(offers={}))
        engine.cache.slots_left = 0
        block = engine.manager.get_block_ids(name)[0][6]
        assert engine.step(offers={name: [(0, block, 28)]}).saves == ()
        assert engine.pool.blocks[block].ref_cnt == 2
        assert engine.connector.has_pending_push_work()
        engine.cache.slots_left = slots
        plan = engine.step(offers={})
        assert saved_blocks(plan, 0) == ([] if slots == 0 else [block])
        engine.report(plan)
        assert engine.pool.blocks[block].ref_cnt == 1
        engine.cache.slots_left = None
        engine.finish(engine.requests[name])
        engine.report(engine.step())
    engine.assert_at_rest()


def test_the_engines_own_hand_off_is_the_last_whole_block() -> None:
    engine = make_engine(HYBRID)
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plan = engine.step()
    assert saved_blocks(plan, 0) == [engine.manager.get_block_ids("a")[0][6]]


@pytest.mark.parametrize(
    "offer",
    [
        pytest.param((0, 5, 26), id="not at the end of a block"),
        pytest.param((0, 5, 32), id="beyond what is hashed"),
        pytest.param((7, 5, 28), id="of a group that is not stored"),
        pytest.param((0, 0, 28), id="in the null block"),
    ],
)
def test_offers_that_cannot_be_named_are_not_taken(offer: tuple[int, int, int]) -> None:
    engine = make_engine(HYBRID)
    engine.admit(engine.arrive("a", range(30)))
    engine.step(offers={})
    assert engine.step(offers={"a": [offer], "gone": [(0, 5, 28)]}).saves == ()


def test_a_state_that_was_restored_and_is_offered_again_is_not_saved_again() -> None:
    engine = make_engine(HYBRID)
    engine.serve("a", range(30))
    engine.forget()
    request = engine.arrive("b", range(30))
    assert engine.admit(request) == Admission(0, 28)
    engine.report(engine.step())
    block = engine.manager.get_block_ids("b")[0][6]
    assert engine.step(offers={"b": [(0, block, 28)]}).saves == ()


def test_states_are_pinned_before_full_blocks_take_all_pins() -> None:
    """A state is offered once; a full block can be saved in a later step."""
    engine = make_engine(HYBRID, num_blocks=16)
    engine.parts.pins.limit = 2
    engine.admit(engine.arrive("a", range(20)))
    plan = engine.step()
    assert [move.group for move in list_moves(*plan.saves)] == [0, 1]


def test_a_cache_without_room_refuses_and_goes_on() -> None:
    engine = make_engine()
    engine.cache.slots_left = 2
    request = engine.arrive("c", range(100, 130))
    engine.admit(request)
    plan = engine.step()
    assert saved_blocks(plan) == engine.manager.get_block_ids("c")[0][:2]
    engine.report(plan)
    engine.cache.slots_left = None
    engine.decode(request)
    engine.run(request, 1)
    assert saved_blocks(engine.step()) == engine.manager.get_block_ids("c")[0][2:7]


def test_a_full_cache_makes_room_by_itself() -> None:
    record = 256
    memory = replace(MEMORY, memory_bytes=16 * record, segment_bytes=16 * record, extent_bytes=4096)
    engine = make_engine(memory=memory, extra={"save_policy": "eager"})
    for number in range(5):
        engine.serve(str(number), range(100 * number, 100 * number + 30))
    assert engine.cache.stats().evicted > 0
    engine.forget()
    assert engine.match(engine.arrive("again", range(400, 430))) == 28
    engine.finish(engine.requests["again"])
    engine.assert_at_rest()


def test_a_job_names_every_block_once() -> None:
    engine = make_engine(TWO_SIZES)
    engine.admit(engine.arrive("a", range(60)))
    engine.admit(engine.arrive("b", range(60)))
    moves: list[Move] = list_moves(*engine.step().saves)
    assert len({move.address for move in moves}) == len(moves)
    assert len({(move.group, move.block) for move in moves}) == len(moves)


def test_a_fault_while_planning_gives_back_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was never sent is never reported: its pins and slots would be held for ever."""
    engine = make_engine()
    good, bad = engine.arrive("a", range(30)), engine.arrive("b", range(100, 130))
    engine.admit(good)
    engine.admit(bad)
    get_block_ids = engine.manager.get_block_ids
    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "get_block_ids", lambda name: {"a": get_block_ids("a")}[name])
        assert engine.step() == ONLY_A_FORWARD
    assert engine.connector.faults == {"build_connector_meta": 1}
    assert engine.pinned == 0
    assert engine.cache.stats().reserved == 0
    # In the next step they are looked at again.
    for request in (good, bad):
        engine.decode(request)
        engine.run(request, 1)
    assert len(saved_blocks(engine.step())) == 14


def test_a_fault_between_two_groups_gives_back_what_the_first_has_got(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(TWO_SIZES)
    request = engine.arrive("a", range(30))
    engine.admit(request)
    lookup = engine.cache.lookup
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "lookup", lambda group, hashes: lookup({0: 0}[group], hashes))
        assert engine.step() == ONLY_A_FORWARD
    assert engine.connector.faults == {"build_connector_meta": 1}
    assert engine.pinned == 0
    assert engine.cache.stats().reserved == 0
    engine.decode(request)
    engine.run(request, 1)
    assert saved_blocks(engine.step()) == engine.manager.get_block_ids("a")[0][:3]


def test_a_fault_does_not_make_who_decodes_be_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    request = engine.arrive("a", range(7))
    engine.admit(request)
    engine.report(engine.step())
    for is_bad in (True, False):
        engine.decode(request)
        engine.run(request, 1)
        with monkeypatch.context() as patch:
            if is_bad:
                patch.setattr(engine.manager, "get_block_ids", lambda name: {}[name])
            plan = engine.step()
        assert saved_blocks(plan) == ([] if is_bad else engine.manager.get_block_ids("a")[0][1:2])
    assert engine.connector.faults == {"build_connector_meta": 1}


def test_each_request_is_saved_for_its_tenant() -> None:
    engine = make_engine()
    for name, tenant in (("a", "acme"), ("b", ""), ("c", "other")):
        first = 100 * ord(name)
        engine.admit(engine.arrive(name, range(first, first + 9), **({"tenant": tenant} if tenant else {})))
    engine.report(engine.step())
    found: dict[str, int] = {}
    for one in engine.cache.published:
        found[one.tenant] = found.get(one.tenant, 0) + 1
    assert found == {"acme": 2, "": 2, "other": 2}


def test_what_one_step_saves_of_a_group_is_published_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether requests go on or have ended: a publication costs more than its blocks."""
    engine = make_engine(gathered_tokens=64)
    for name in "ab":
        request = engine.arrive(name, range(100 * ord(name), 100 * ord(name) + 9))
        engine.admit(request)
        engine.report(engine.step())
        for _ in range(5):
            engine.decode(request)
            engine.run(request, 1)
            engine.report(engine.step())
    assert len(engine.cache.published) == 4, "two prompts of two whole blocks"
    for name in "ab":
        engine.finish(engine.requests[name])
    engine.admit(engine.arrive("c", range(30)))
    told: list[int] = []
    publish = engine.cache.publish

    def count(publication: Publication) -> bool:
        told.append(len(publication.slots))
        return publish(publication)

    monkeypatch.setattr(engine.cache, "publish", count)
    plan = engine.step()
    assert engine.pinned == len(saved_blocks(plan)) == 1 + 1 + 7
    engine.report(plan)
    assert told == [1 + 1 + 7]
    engine.finish(engine.requests["c"])
    engine.assert_at_rest()


@pytest.mark.parametrize("is_bad", [False, True], ids=["lost", "failed-and-lost"])
def test_what_one_rank_never_reports_is_dropped_and_its_slots_wait_for_the_report(is_bad: bool) -> None:
    engine = make_engine(ranks=2)
    request = engine.arrive("a", range(30))
    engine.admit(request)
    plan = engine.step()
    engine.report(plan, ranks=1, bad_saves=is_bad)
    engine.finish(request)
    assert engine.pinned == 7
    engine.now_s = REPORT_WAIT_S - STEP_S
    engine.step()
    assert (engine.pinned, engine.connector.has_pending_push_work()) == (7, True)
    engine.step()
    assert (engine.pinned, engine.connector.has_pending_push_work()) == (0, False)
    assert engine.cache.stats().reserved == 7
    engine.report(plan, ranks=1)
    assert engine.cache.published == []
    engine.assert_at_rest()
    engine.serve("b", range(30))
    assert len(engine.cache.published) == 2 * 7
    engine.assert_at_rest()


def test_an_engine_does_not_step_for_ever_for_a_load_that_some_rank_never_reports() -> None:
    engine = make_engine(ranks=2)
    engine.serve("a", range(30))
    engine.forget()
    request = engine.arrive("b", range(30))
    admission = engine.admit(request)
    assert admission is not None
    assert admission.external == 28
    plan = engine.step()
    engine.finish(request)
    assert engine.connector.has_pending_push_work()
    engine.now_s += REPORT_WAIT_S
    assert not engine.connector.has_pending_push_work()
    # Ranks that do report it may still be copying: its blocks and its lease stay until then.
    assert engine.cache.stats().leases == 1
    engine.report(plan)
    engine.assert_at_rest()
