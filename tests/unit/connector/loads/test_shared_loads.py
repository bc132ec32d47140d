"""Requests with one prefix: one of them loads it, and the others wait for that load, as long as it is worth it."""

from __future__ import annotations

import pytest

from tests.kit.connector.warm import DENSE, TWO_SIZES, load_apart, make_engine, note_misses, warm_engine

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.request import Request

from kvoffload.connector.loads.shared_loads import LEAST_WAIT_S, MAX_LOADS
from kvoffload.protocol import Miss
from tests.kit.connector.engine_configs import full, recurrent
from tests.kit.connector.scripted import Admission, ScriptedEngine, list_moves

HYBRID = ((["r"], recurrent(4)), (["a"], full(4)))
WAITS = Admission(0, 0, is_known=False)


def load_first(engine: ScriptedEngine, tokens: range = range(30)) -> Request:
    """Begins the load of one request, which the others may wait for."""
    request = engine.arrive("loading", tokens)
    admission = engine.admit(request)
    assert admission is not None
    assert admission.external
    return request


def end(engine: ScriptedEngine) -> None:
    """Ends all requests that have blocks, after a step, and forgets the others."""
    for request in list(engine.requests.values()):
        if 0 < request.num_computed_tokens < request.num_tokens:
            engine.run(request)
    engine.report(engine.step())
    for request in list(engine.requests.values()):
        engine.finish(request)
    engine.assert_at_rest()
    assert engine.parts.restores.shared.waiting == 0


# ---- one load for all ----


@pytest.mark.parametrize("groups", [DENSE, TWO_SIZES], ids=["dense", "window"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_with_one_prefix_load_it_once(groups: object, ranks: int) -> None:
    engine = warm_engine(groups, ranks=ranks)
    first = load_first(engine)
    others = [engine.arrive(f"other{number}", range(30)) for number in range(3)]
    assert [engine.admit(request) for request in others] == [WAITS] * 3
    plan = engine.step()
    assert [load.request_id for load in plan.loads] == ["loading"]
    hit = first.num_computed_tokens
    assert [engine.admit(request) for request in others] == [WAITS] * 3
    engine.report(plan)
    for request in others:
        assert engine.admit(request) == Admission(local=hit, external=0)
    end(engine)


def test_requests_that_begin_from_a_state_load_it_each() -> None:
    """vLLM lets one request in a step begin from a state that it has."""
    engine = warm_engine(HYBRID)
    load_first(engine)
    admission = engine.admit(engine.arrive("other", range(30)))
    assert admission is not None
    assert admission.is_known
    assert admission.external


def test_a_request_that_waits_asks_the_server_nothing() -> None:
    engine = warm_engine(DENSE)
    load_first(engine)
    engine.cache.asked.clear()
    engine.cache.is_served = False  # what arrives is not asked for early
    other = engine.arrive("other", range(100, 130))
    engine.finish(other)
    engine.cache.is_served = True
    requests = [engine.arrive(f"other{number}", range(30)) for number in range(40)]
    early = len(engine.cache.asked)
    assert [engine.match(request) for request in requests] == [None] * 40
    assert len(engine.cache.asked) == early


def test_a_request_is_not_a_miss_because_of_a_late_answer_to_it() -> None:
    engine = warm_engine(DENSE)
    load_first(engine)
    engine.cache.holds_answers = True
    noted = note_misses(engine)
    other = engine.arrive("other", range(30))
    assert engine.match(other) is None
    engine.cache.answer(is_lost=True)
    assert engine.match(other) is None
    engine.report(engine.step())
    assert engine.admit(other) == Admission(local=28, external=0)
    assert Miss.SLOW_TO_ANSWER not in [reason for _, reason in noted]


def test_the_rest_of_a_longer_hit_is_loaded_after_the_wait() -> None:
    engine = warm_engine(DENSE, tokens=60)
    load_first(engine)
    other = engine.arrive("other", range(60))
    assert engine.admit(other) == WAITS
    engine.report(engine.step())
    assert engine.admit(other) == Admission(local=28, external=28)
    (load,) = engine.step().loads
    assert len(list_moves(load)) == 7


def test_prompts_that_part_share_what_is_before() -> None:
    engine = warm_engine(DENSE)
    load_first(engine)
    other = engine.arrive("other", [*range(21), *range(100, 120)])
    assert engine.admit(other) == WAITS
    engine.report(engine.step())
    assert engine.admit(other) == Admission(local=20, external=0)


def test_a_window_is_of_no_use_where_prompts_part() -> None:
    engine = warm_engine(TWO_SIZES)
    load_first(engine)
    other = engine.arrive("other", [*range(21), *range(100, 120)])
    admission = engine.admit(other)
    assert admission is not None
    assert admission.is_known
    assert admission.external < 20


def test_other_prompts_are_not_waited_for() -> None:
    engine = make_engine(DENSE)
    engine.serve("first", range(30))
    engine.serve("second", range(100, 130))
    engine.forget()
    load_first(engine)
    assert engine.admit(engine.arrive("other", range(100, 130))) == Admission(0, 28)


def test_blocks_that_a_drafter_drops_are_loaded_by_each_request() -> None:
    engine = ScriptedEngine(*DENSE, drafts=1, drops_last_block=True)
    engine.serve("first", range(30))
    engine.forget()
    first = load_first(engine)
    other = engine.arrive("other", range(30))
    assert engine.admit(other) == WAITS
    engine.report(engine.step())
    admission = engine.admit(other)
    assert admission is not None
    assert admission.is_known
    assert admission.local + admission.external <= first.num_computed_tokens
    assert admission.local >= first.num_computed_tokens - 4


# ---- when it is not worth it ----


def test_a_much_longer_hit_is_loaded_at_once() -> None:
    engine = warm_engine(DENSE, tokens=200, num_blocks=1024)
    load_first(engine)
    assert engine.admit(engine.arrive("other", range(200))) == Admission(0, 196)


def test_a_small_part_of_a_long_load_is_loaded_once_by_itself() -> None:
    engine = warm_engine(DENSE, tokens=200, num_blocks=1024)
    load_first(engine, range(200))
    assert engine.admit(engine.arrive("short", range(30))) == Admission(0, 28)
    assert engine.admit(engine.arrive("as short", range(30))) == WAITS


def test_nothing_is_waited_for_that_the_engine_has_itself() -> None:
    engine = make_engine(DENSE)
    engine.serve("first", range(60))
    engine.forget()
    engine.serve("short", range(30), skip_load=True)
    load_first(engine, range(60))
    assert engine.admit(engine.arrive("other", range(30))) == Admission(local=28, external=0)


def test_an_engine_without_a_prefix_cache_keeps_nothing_to_wait_for() -> None:
    engine = load_apart(warm_engine(DENSE))
    load_first(engine)
    assert engine.admit(engine.arrive("other", range(30))) == Admission(0, 28)


def test_a_request_that_loads_nothing_does_not_wait() -> None:
    engine = warm_engine(DENSE)
    load_first(engine)
    assert engine.admit(engine.arrive("other", range(30), skip_load=True)) == Admission(0, 0)


# ---- loads that come to nothing ----


def test_after_an_abort_the_next_one_loads_and_the_others_wait_for_it() -> None:
    engine = warm_engine(DENSE)
    first = load_first(engine)
    second, third = (engine.arrive(name, range(30)) for name in ("second", "third"))
    assert engine.admit(second) == engine.admit(third) == WAITS
    plan = engine.step()
    engine.finish(first)
    assert engine.admit(second) == Admission(0, 28)
    assert engine.admit(third) == WAITS
    engine.report(plan)
    assert engine.admit(third) == WAITS
    engine.report(engine.step())
    assert engine.admit(third) == Admission(local=28, external=0)
    end(engine)


def test_after_a_failure_the_others_do_not_use_its_entries() -> None:
    engine = warm_engine(DENSE)
    first = load_first(engine)
    others = [engine.arrive(name, range(30)) for name in ("second", "third")]
    assert [engine.admit(request) for request in others] == [WAITS] * 2
    engine.report(engine.step(), failed=["loading"])
    assert engine.cache.stats().leases == 0
    assert engine.match(others[0]) == 0
    assert engine.match(others[1]) == 0
    assert engine.admit(first) == Admission(0, 0)
    end(engine)


def test_a_load_that_could_not_be_planned_is_not_waited_for() -> None:
    engine = warm_engine(DENSE)
    request = engine.arrive("loading", range(30))
    assert engine.match(request) == 28
    engine.side.doom_load(request)
    assert engine.match(engine.arrive("other", range(30))) == 28


def test_after_a_preemption_the_next_one_loads_what_the_engine_lost() -> None:
    engine = warm_engine(DENSE)
    first = load_first(engine)
    second, third = (engine.arrive(name, range(30)) for name in ("second", "third"))
    assert engine.admit(second) == engine.admit(third) == WAITS
    engine.report(engine.step())
    engine.preempt(first)
    engine.forget()
    assert engine.admit(second) == Admission(0, 28)
    assert engine.admit(third) == WAITS
    assert engine.admit(first) == WAITS
    engine.report(engine.step())
    assert engine.admit(third) == Admission(local=28, external=0)


def test_a_request_waits_for_so_many_loads_that_bring_it_nothing() -> None:
    engine = warm_engine(DENSE)
    other = engine.arrive("other", range(30))
    for number in range(MAX_LOADS):
        leader = engine.arrive(f"leader{number}", range(30))
        assert engine.admit(leader) == Admission(0, 28)
        assert engine.admit(other) == WAITS
        plan = engine.step()
        engine.finish(leader)
        engine.report(plan)
    assert engine.admit(engine.arrive("last", range(30))) == Admission(0, 28)
    assert engine.admit(other) == Admission(0, 28)


# ---- how long ----


@pytest.mark.parametrize(("token_s", "wait_s"), [(0.0, LEAST_WAIT_S), (LEAST_WAIT_S, 28 * LEAST_WAIT_S)])
def test_a_request_waits_for_a_bounded_time_and_then_loads_itself(token_s: float, wait_s: float) -> None:
    engine = warm_engine(DENSE)
    engine.parts.judge.token_ns = round(token_s * 1e9)
    load_first(engine)
    other = engine.arrive("other", range(30))
    assert engine.admit(other) == WAITS
    engine.now_s += 0.9 * wait_s
    assert engine.admit(other) == WAITS
    engine.now_s += 0.2 * wait_s
    assert engine.admit(other) == Admission(0, 28)
    assert engine.admit(engine.arrive("third", range(30))) == WAITS, "it may wait as long"


def test_the_engine_steps_on_while_requests_wait() -> None:
    engine = warm_engine(DENSE)
    load_first(engine)
    other = engine.arrive("other", range(30))
    assert engine.admit(other) == WAITS
    engine.step()
    assert engine.connector.has_pending_push_work()
    engine.finish(other)
    assert engine.parts.restores.shared.waiting == 0


def test_a_request_may_wait_again_after_it_has_run() -> None:
    engine = warm_engine(DENSE)
    load_first(engine)
    other = engine.arrive("other", range(30))
    assert engine.admit(other) == WAITS
    engine.now_s += 2 * LEAST_WAIT_S
    assert engine.admit(other) == Admission(0, 28)
    engine.report(engine.step())
    assert engine.run(other)
    engine.report(engine.step())
    assert engine.parts.restores.shared.waiting == 0
