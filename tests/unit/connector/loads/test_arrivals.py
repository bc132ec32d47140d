"""Requests whose prompt another engine has computed: they wait for what it is saving, and not for ever."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.common.step_plan import StepPlan
from kvoffload.connector.loads.arrivals import LOOK_S
from kvoffload.connector.loads.judge import MIN_SAMPLES
from tests.kit.connector.measured import take
from tests.kit.connector.saving import DENSE, TWO_SIZES
from tests.kit.connector.scripted import STEP_S, Admission, ScriptedEngine
from tests.kit.connector.warm import leave_free, warm_engine

PROMPT = range(30)
WAIT_S = 2.0
"""The default of `arrival_deadline`."""


def saving_engine(groups: Any = DENSE, **options: Any) -> tuple[ScriptedEngine, StepPlan]:
    """Its first prompt is computed, gone from its own cache, and being saved."""
    engine = ScriptedEngine(*groups, **options)
    engine.connector.measures.clock = lambda: engine.now_s
    request = engine.arrive("first", PROMPT)
    engine.admit(request)
    plan = engine.step()
    engine.finish(request)
    engine.pool.evict_blocks({block.block_id for block in engine.pool.blocks if block.block_hash})
    take(engine)
    return engine, plan


def counted(engine: ScriptedEngine) -> Any:
    return take(engine).get("kvoffload_arrivals_total")


@pytest.mark.parametrize("groups", [DENSE, TWO_SIZES], ids=["dense", "two sizes"])
def test_what_is_on_its_way_is_waited_for_and_loaded(groups: Any) -> None:
    engine, plan = saving_engine(groups)
    hit = engine.parts.groups.align(len(PROMPT) - 1)
    request = engine.arrive("second", PROMPT, expect_tokens=hit)
    assert [engine.admit(request) for _ in range(3)] == [Admission(0, 0, is_known=False)] * 3
    assert engine.cache.asked == []
    engine.report(plan)
    assert engine.admit(request) == Admission(0, hit)
    assert counted(engine) == {"arrived": 1}
    load = engine.step()
    engine.report(load)
    engine.run(request)
    engine.step()
    engine.finish(request)
    engine.assert_at_rest()


def test_without_expecting_it_nothing_is_waited_for() -> None:
    engine, _ = saving_engine()
    assert engine.match(engine.arrive("second", PROMPT)) == 0
    assert counted(engine) is None


def test_what_does_not_come_is_computed_when_the_wait_is_over() -> None:
    engine, plan = saving_engine()
    request = engine.arrive("second", PROMPT, expect_tokens=28)
    waited_s = 0.0
    while engine.match(request) is None:
        engine.step()
        waited_s += STEP_S
    assert waited_s == WAIT_S
    assert engine.match(request) == 0
    assert counted(engine) == {"late": 1}
    engine.report(plan)
    assert engine.match(request) == 28, "what comes later is found as it would be by anybody"
    assert counted(engine) is None, "it is waited for once"


def test_a_save_that_failed_does_not_come_and_is_computed() -> None:
    engine, plan = saving_engine()
    request = engine.arrive("second", PROMPT, expect_tokens=28)
    engine.report(plan, bad_saves=True)
    assert engine.match(request) is None
    engine.now_s += WAIT_S
    assert engine.match(request) == 0
    assert counted(engine) == {"late": 1}


def test_of_what_does_not_come_whole_the_beginning_is_loaded() -> None:
    engine = warm_engine(DENSE, tokens=14)
    request = engine.arrive("second", PROMPT, expect_tokens=28)
    assert engine.match(request) is None
    engine.now_s += WAIT_S
    assert engine.match(request) == 12


@pytest.mark.parametrize("expected", [0, 3, 28, 30, 10**9])
def test_no_more_is_waited_for_than_the_request_can_use(expected: int) -> None:
    engine = warm_engine(DENSE)
    engine.cache.is_full = True
    assert engine.match(engine.arrive("second", PROMPT, expect_tokens=expected)) == 28


def test_what_the_engine_has_itself_is_not_waited_for() -> None:
    engine = ScriptedEngine(*DENSE)
    engine.serve("first", PROMPT)
    engine.cache.serve_anew()
    assert engine.match(engine.arrive("second", PROMPT, expect_tokens=28)) == 0


def test_a_wait_of_nothing_waits_for_nothing() -> None:
    engine, _ = saving_engine(extra={"arrival_deadline": "0s"})
    assert engine.match(engine.arrive("second", PROMPT, expect_tokens=28)) == 0
    assert counted(engine) == {"late": 1}


def test_without_a_server_nothing_can_come() -> None:
    engine, _ = saving_engine()
    engine.cache.is_served = False
    assert engine.match(engine.arrive("second", PROMPT, expect_tokens=28)) == 0


def test_a_request_that_is_not_to_be_loaded_does_not_wait() -> None:
    engine, _ = saving_engine()
    assert engine.match(engine.arrive("second", PROMPT, expect_tokens=28, skip_load=True)) == 0


def test_others_are_served_while_one_waits() -> None:
    engine, plan = saving_engine()
    waiting = engine.arrive("second", PROMPT, expect_tokens=28)
    assert engine.match(waiting) is None
    assert engine.match(engine.arrive("third", range(100, 130))) == 0
    engine.report(plan)
    assert engine.match(waiting) == 28


def test_a_request_that_ends_while_it_waits_leaves_nothing() -> None:
    engine, plan = saving_engine()
    request = engine.arrive("second", PROMPT, expect_tokens=28)
    assert engine.match(request) is None
    engine.finish(request)
    engine.report(plan)
    engine.assert_at_rest()


def test_slower_tiers_are_asked_for_it_again_and_again() -> None:
    engine, plan = saving_engine()
    engine.cache.has_tiers = True
    engine.cache.far.clear()
    request = engine.arrive("second", PROMPT, expect_tokens=28)
    assert engine.cache.prefetched == [(0, 28)]
    assert engine.match(request) is None
    assert engine.cache.prefetched == [(0, 28)], "not in every step"
    engine.now_s += LOOK_S
    assert engine.match(request) is None
    assert engine.cache.prefetched == [(0, 28)] * 2
    assert engine.cache.far == []
    engine.report(plan)
    assert engine.match(request) == 28


def test_what_was_waited_for_is_loaded_also_where_computing_it_is_faster() -> None:
    engine = warm_engine(DENSE)
    judge = engine.parts.judge
    for _ in range(MIN_SAMPLES):
        judge.note_load(1, 10.0)
        judge.note_prefill(1000, 1e-6)
    assert engine.match(engine.arrive("second", PROMPT)) == 0
    assert engine.match(engine.arrive("third", PROMPT, expect_tokens=28)) == 28


def test_it_waits_for_room_as_well() -> None:
    """An engine that computes no prompts does not know what computing takes: others would not wait."""
    engine = warm_engine(DENSE)
    held = leave_free(engine, 3)
    request = engine.arrive("second", PROMPT, expect_tokens=28)
    assert engine.match(request) is None
    engine.pool.free_blocks(held)  # type: ignore[arg-type]
    assert engine.match(request) == 28


def test_a_draft_models_last_block_has_to_be_there_too() -> None:
    engine, plan = saving_engine(drops_last_block=True)
    request = engine.arrive("second", PROMPT, expect_tokens=28)
    assert engine.match(request) is None
    engine.report(plan)
    assert engine.match(request) == 24
