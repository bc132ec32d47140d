"""Loads as vLLM calls for them (contract tables 1.4, 1.6 and 1.8), through the facade, over its own block manager."""

from __future__ import annotations

import pytest

from tests.kit.connector.warm import DENSE, leave_free, load_apart, make_engine, warm_engine

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.common.step_plan import StepPlan
from tests.kit.connector.engine_configs import full, latent_window, mla, recurrent, ring
from tests.kit.connector.scripted import Admission, list_moves

HYBRID = ((["r"], recurrent(4)), (["a"], full(4)))
REPLAYED = ((["a"], mla(4)), (["w"], latent_window(4, tokens=8, bounded_replay=True)), (["k"], ring(4)))
"""Latents, a window of 8 tokens that the engine computes again after a hit, and a ring that it never shares."""


def test_a_hit_is_asynchronous_and_ends_before_the_last_token() -> None:
    engine = warm_engine()
    request = engine.arrive("second", range(30))
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (24, True)


def test_a_miss_is_zero_tokens_and_not_asynchronous() -> None:
    engine = warm_engine()
    request = engine.arrive("second", range(100, 130))
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize(("tokens", "external"), [(24, 16), (25, 24), (32, 24), (33, 32), (8, 0), (9, 8)])
def test_never_a_full_prompt(tokens: int, external: int) -> None:
    engine = warm_engine(tokens=40)
    assert engine.match(engine.arrive("second", range(tokens))) == external


@pytest.mark.parametrize(("tokens", "external"), [(24, 24), (25, 24), (7, 4), (4, 4), (3, 0)])
def test_a_full_prompt_if_that_is_wished(tokens: int, external: int) -> None:
    engine = warm_engine(DENSE, tokens=40, extra={"whole_prompts": True})
    request = engine.arrive("second", range(tokens))
    assert engine.match(request) == external
    if external:
        assert engine.admit(request) == Admission(0, external)
        (load,) = engine.step().loads
        assert len(load.moves) == external // 4


@pytest.mark.parametrize(("tokens", "external"), [(29, 28), (13, 12), (12, 0), (9, 0)])
def test_a_hit_is_longer_than_the_window_that_the_engine_computes_again(tokens: int, external: int) -> None:
    engine = warm_engine(REPLAYED, tokens=40)
    request = engine.arrive("second", range(tokens))
    assert engine.match(request) == external
    assert not engine.connector.has_pending_push_work()
    if external:
        assert engine.admit(request) == Admission(0, external)
        (load,) = engine.step().loads
        tables = engine.manager.get_block_ids("second")
        assert [(move.group, move.block) for move in list_moves(load)] == [
            (0, block) for block in tables[0][: tokens // 4]
        ]


def test_a_hit_of_ranks_that_share_the_context_ends_at_the_blocks_of_all_of_them() -> None:
    engine = warm_engine(DENSE, context_ranks=2, ranks=2)
    request = engine.arrive("second", range(30))
    assert engine.admit(request) == Admission(local=0, external=24)
    (load,) = engine.step().loads
    (table,) = engine.manager.get_block_ids("second")
    assert [(move.group, move.block) for move in list_moves(load)] == [(0, block) for block in table[:3]]


def test_matching_many_times_changes_nothing() -> None:
    engine = warm_engine()
    request = engine.arrive("second", range(30))
    before = engine.cache.stats()
    assert {engine.match(request) for _ in range(50)} == {24}
    assert engine.cache.stats() == before
    assert len(engine.cache.asked) == 1
    assert engine.step() == StepPlan()
    assert not engine.connector.has_pending_push_work()


def test_a_hit_is_loaded_into_exactly_the_blocks_that_were_allocated() -> None:
    engine = warm_engine()
    request = engine.arrive("second", range(30))
    assert engine.admit(request) == Admission(local=0, external=24)
    (load,) = engine.step().loads
    tables = engine.manager.get_block_ids("second")
    # The window of 6 before token 24 begins at token 19: in the group of blocks of 4, blocks 4 and 5.
    assert [(move.group, move.block) for move in list_moves(load)] == [
        *((0, block) for block in tables[0][:3]),
        *((1, block) for block in tables[1][4:6]),
    ]
    assert tables[1][:4] == [0, 0, 0, 0]
    assert engine.step().loads == ()
    engine.report(finished=["second"])
    assert engine.run(request)
    engine.report(engine.step())
    engine.finish(request)
    engine.assert_at_rest()


def test_every_null_position_is_left_alone() -> None:
    engine = warm_engine()
    engine.admit(engine.arrive("second", range(30)))
    (load,) = engine.step().loads
    assert 0 not in [move.block for move in list_moves(load)]


def test_only_what_the_engine_lacks_is_loaded() -> None:
    engine = make_engine(DENSE)
    engine.serve("first", range(30))
    engine.forget()
    engine.serve("short", range(10))  # the engine itself has 8 tokens of it now
    request = engine.arrive("second", range(30))
    assert engine.admit(request) == Admission(local=8, external=20)
    (load,) = engine.step().loads
    assert [move.block for move in list_moves(load)] == engine.manager.get_block_ids("second")[0][2:7]


def test_an_allocation_that_fails_after_a_match_leaks_nothing() -> None:
    engine = warm_engine(DENSE)
    request = engine.arrive("second", range(30))
    before = engine.cache.stats()
    for _ in range(3):
        assert engine.match(request) == 28
        hog = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 1)
        assert engine.admit(request) in (None, Admission(0, 0))
        engine.pool.free_blocks(hog)
    assert engine.cache.stats() == before
    assert engine.step().loads == ()
    engine.finish(request)
    engine.assert_at_rest()


def test_an_answer_that_the_engine_does_not_take_leaks_nothing() -> None:
    """As with `skip_reading_prefix_cache`: matched, then allocated without external tokens."""
    engine = warm_engine(DENSE)
    request = engine.arrive("second", range(30))
    assert engine.match(request) == 28
    assert engine.manager.allocate_slots(request, 30) is not None
    engine.connector.update_state_after_alloc(request, engine.manager.get_blocks("second"), 0)
    assert engine.step().loads == ()
    engine.finish(request)
    engine.assert_at_rest()


def test_records_of_a_load_on_its_way_are_not_overwritten() -> None:
    engine = warm_engine(DENSE)
    engine.admit(engine.arrive("second", range(30)))
    plan = engine.step()
    loaded = {move.address for move in list_moves(*plan.loads)}
    slots = engine.cache.take(0, 1_000_000)  # as hard as eviction can be
    assert len(loaded) == 7
    assert not loaded & set(slots.addresses.tolist())
    engine.report(plan)
    assert loaded == set(engine.cache.take(0, 1_000_000).addresses.tolist())


def test_an_abort_while_loading_keeps_the_lease_until_the_report() -> None:
    engine = warm_engine()
    request = engine.arrive("second", range(30))
    engine.admit(request)
    plan = engine.step()
    engine.finish(request)
    assert engine.cache.stats().leases == 1
    assert engine.connector.has_pending_push_work()
    engine.report(plan)
    engine.assert_at_rest()


def test_an_abort_between_allocation_and_plan_still_sends_the_load() -> None:
    """The engine waits for the report of this request before it frees the blocks."""
    engine = warm_engine()
    request = engine.arrive("second", range(30))
    engine.admit(request)
    engine.finish(request)
    plan = engine.step()
    assert [load.request_id for load in plan.loads] == ["second"]
    engine.report(plan)
    engine.assert_at_rest()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load_is_forgotten_before_anybody_asks_again(policy: str) -> None:
    """The request has ended before the report of its failure comes, if the policy is `fail`."""
    engine = warm_engine()
    request = engine.arrive("second", range(30))
    engine.admit(request)
    plan = engine.step()
    engine.report(plan, failed=["second"], policy=policy)
    other = engine.arrive("third", range(30))
    assert engine.match(other) == 0
    if policy == "recompute":
        engine.finish(request)
    engine.finish(other)
    engine.assert_at_rest()
    assert engine.parts.restores.failed == set()


def test_a_request_whose_load_failed_is_never_loaded_again() -> None:
    """Its blocks may have been saved again by then: without this rule a bad device would make it fail for ever."""
    engine = warm_engine(DENSE)
    request = engine.arrive("second", range(30))
    engine.admit(request)
    engine.report(engine.step(), failed=["second"])
    engine.serve("saver", range(30))
    engine.forget()
    assert engine.match(engine.arrive("third", range(30))) == 28
    assert engine.match(request) == 0
    assert engine.admit(request) == Admission(0, 0)


def test_a_recomputed_request_saves_what_was_lost() -> None:
    engine = warm_engine(DENSE)
    request = engine.arrive("second", range(30))
    engine.admit(request)
    engine.report(engine.step(), failed=["second"])
    assert engine.admit(request) == Admission(0, 0)
    plan = engine.step()
    assert sum(len(save.moves) for save in plan.saves) > 0
    engine.report(plan)
    engine.finish(request)
    engine.assert_at_rest()


def test_a_reported_hit_that_cannot_be_planned_fails_and_is_recomputed() -> None:
    engine = warm_engine(DENSE)
    request = engine.arrive("second", range(30))
    assert engine.match(request) == 28
    assert engine.manager.allocate_slots(request, 0, num_external_computed_tokens=28, delay_cache_blocks=True)
    table = engine.manager.get_block_ids("second")
    engine.side.plan_load(request, ([0, *table[0][1:]],), 28)
    engine.loading["second"] = request
    assert engine.cache.stats().leases == 0
    plan = engine.step()
    assert (plan.loads, plan.doomed) == ((), ("second",))
    assert engine.connector.has_pending_push_work()
    assert engine.step().doomed == ()
    engine.report(plan)
    assert engine.match(request) == 0
    engine.finish(request)
    engine.assert_at_rest()


def test_a_preempted_request_restores_what_it_had_decoded() -> None:
    engine = make_engine(DENSE)
    request = engine.arrive("a", range(14))
    engine.admit(request)
    engine.report(engine.step())
    for _ in range(5):
        engine.decode(request)
        assert engine.run(request, 1)
        engine.report(engine.step())
    engine.preempt(request)
    engine.forget()
    assert engine.admit(request) == Admission(local=0, external=16)  # 19 tokens, 14 of them prompt
    engine.report(engine.step())
    assert engine.run(request)
    engine.report(engine.step())
    engine.finish(request)
    engine.assert_at_rest()


def test_an_answer_grows_with_the_request() -> None:
    engine = warm_engine(DENSE, tokens=40)
    request = engine.arrive("second", range(8))
    assert engine.match(request) == 4
    for token in range(8, 20):
        engine.decode(request, token)
    assert engine.match(request) == 16


def test_reset_with_a_load_on_its_way_lets_it_end() -> None:
    engine = warm_engine()
    request = engine.arrive("second", range(30))
    engine.admit(request)
    plan = engine.step()
    assert engine.connector.reset_cache() is True
    assert engine.match(engine.arrive("third", range(30))) == 0
    engine.report(plan, failed=["second"])  # a worker may have found its record gone
    engine.finish(request)
    engine.finish(engine.requests["third"])
    engine.assert_at_rest()


def test_two_requests_load_the_same_records_at_once() -> None:
    engine = load_apart(warm_engine(DENSE))
    for name in ("second", "third"):
        engine.admit(engine.arrive(name, range(30)))
    plan = engine.step()
    first, second = plan.loads
    ours, theirs = list_moves(first), list_moves(second)
    assert [move.address for move in ours] == [move.address for move in theirs]
    assert not {move.block for move in ours} & {move.block for move in theirs}
    engine.report(finished=["second"])
    assert engine.cache.stats().leases == 1
    engine.report(finished=["third"])
    assert engine.cache.stats().leases == 0


def test_a_recurrent_group_hits_at_a_saved_boundary_only() -> None:
    engine = make_engine(HYBRID)
    engine.serve("first", range(30))
    engine.forget()
    # The engine hands off the state at the last whole block before the end of a prompt.
    assert engine.match(engine.arrive("longer", range(60))) == 28
    assert engine.match(engine.arrive("shorter", range(28))) == 0


def test_a_recurrent_state_is_loaded_into_the_last_block_before_the_boundary() -> None:
    engine = make_engine(HYBRID)
    engine.serve("first", range(30))
    engine.forget()
    request = engine.arrive("second", range(40))
    assert engine.admit(request) == Admission(local=0, external=28)
    (load,) = engine.step().loads
    tables = engine.manager.get_block_ids("second")
    assert tables[0][:6] == [0] * 6
    assert [move.block for move in list_moves(load) if move.group == 0] == [tables[0][6]]


def test_the_guard_refuses_a_hit_whose_whole_prompt_would_not_fit() -> None:
    """vLLM counts null blocks before a window as held; its reservation alone lets loaded requests take all blocks."""
    engine = warm_engine(tokens=40)
    request = engine.arrive("second", range(48))
    # Seven blocks of 8 tokens, and five of 4: from the window before token 40 to the end, and one to spare each.
    hog = leave_free(engine, 11)
    assert engine.match(request) == 0
    engine.pool.free_blocks(hog)
    leave_free(engine, 12)
    assert engine.match(request) == 40


def test_the_guard_counts_loaded_requests_until_they_run() -> None:
    """Every admitted request can get its last block: loaded requests never hold all blocks between them."""
    engine = make_engine()
    prompts = [range(100 * number, 100 * number + 48) for number in range(4)]
    for number, prompt in enumerate(prompts):
        engine.serve(f"first{number}", prompt[:40])
    engine.forget()
    leave_free(engine, 30)
    admitted = []
    for number, prompt in enumerate(prompts):
        request = engine.arrive(f"r{number}", prompt)
        if engine.match(request):
            assert engine.admit(request) == Admission(0, 40)
            admitted.append(request)
    assert len(admitted) == 2
    engine.report(engine.step())
    for request in admitted:
        assert engine.run(request)
    engine.report(engine.step())
    for request in admitted:
        engine.finish(request)
    assert engine.parts.restores.admission.reserved == ()


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_a_load_that_comes_to_nothing_reserves_nothing(end: str) -> None:
    engine = load_apart(warm_engine(tokens=40))
    first, second = (engine.arrive(name, range(48)) for name in ("first", "other"))
    leave_free(engine, 12)
    engine.admit(first)
    plan = engine.step()
    assert engine.match(second) == 0
    if end == "abort":
        engine.finish(first)
        engine.report(plan)
        assert engine.match(second) == 40
    else:
        engine.report(plan, failed=["first"])
        assert engine.parts.restores.admission.reserved == ()


def test_two_blocks_are_enough_to_restore_one() -> None:
    engine = make_engine(DENSE, num_blocks=4)
    engine.serve("first", range(6))
    engine.forget()
    request = engine.arrive("second", range(6))
    assert engine.admit(request) == Admission(0, 4)
    engine.report(engine.step())
    assert engine.run(request)
    engine.report(engine.step())
    engine.finish(request)
    engine.assert_at_rest()
