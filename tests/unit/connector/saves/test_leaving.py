"""The engine is about to preempt a request: what it has decoded is saved first, and loaded when it comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.request import Request

from tests.kit.connector.engine_configs import full, window
from tests.kit.connector.saving import DENSE, HYBRID, make_engine, names_of, saved_blocks
from tests.kit.connector.scripted import Admission, ScriptedEngine

WINDOWS = ((["a"], full(4)), (["c"], window(4, tokens=8)))


def seldom_looking(groups: object = DENSE, **changes: Any) -> ScriptedEngine:
    """Looks at requests that decode as rarely as an engine does."""
    return make_engine(groups, round_steps=64, gathered_tokens=256, **changes)


def run_request(engine: ScriptedEngine, name: str = "a", *, prompt: range = range(10), decoded: int = 9) -> Request:
    """Runs a request until it has so many tokens more, all of them computed; saves of its prompt have ended."""
    request = engine.arrive(name, prompt)
    assert engine.admit(request) is not None
    engine.report(engine.step())
    decode(engine, request, decoded)
    return request


def decode(engine: ScriptedEngine, request: Request, tokens: int) -> None:
    for _ in range(tokens):
        engine.decode(request)
        assert engine.run(request, 1)
        engine.report(engine.step())


@pytest.mark.parametrize("policy", ["eager", "on_evict", "second_use"])
def test_blocks_of_a_request_are_saved_before_the_engine_takes_them_away(policy: str) -> None:
    engine = seldom_looking(extra={"save_policy": policy})
    request = run_request(engine)
    assert engine.connector.has_pending_block_frees()
    plan = engine.step()
    table = engine.manager.get_block_ids("a")[0]
    assert saved_blocks(plan) == table[2 if policy == "eager" else 0 : 4]
    assert not engine.connector.has_pending_block_frees(), "the request holds all of them itself"
    engine.preempt(request)
    hog = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    assert not {block.block_id for block in hog} & set(saved_blocks(plan))
    assert engine.connector.has_pending_block_frees()
    engine.pool.free_blocks(hog)
    engine.report(plan)
    engine.forget()
    assert engine.admit(request) == Admission(local=0, external=16)
    engine.report(engine.step())
    assert engine.run(request)
    engine.report(engine.step())
    engine.finish(request)
    engine.report(engine.step())
    engine.assert_at_rest()


def test_windows_are_saved_where_the_request_stands() -> None:
    engine = seldom_looking(WINDOWS)
    request = run_request(engine, decoded=7)
    assert engine.connector.has_pending_block_frees()
    engine.report(engine.step())
    engine.preempt(request)
    engine.forget()
    assert engine.admit(request) == Admission(local=0, external=16)


def test_blocks_beyond_the_last_state_are_of_no_use() -> None:
    engine = seldom_looking(HYBRID)
    run_request(engine)
    assert not engine.connector.has_pending_block_frees()


def test_the_engine_waits_once_for_each_full_block() -> None:
    engine = seldom_looking()
    request = run_request(engine)
    assert engine.connector.has_pending_block_frees()
    engine.report(engine.step())
    assert not engine.connector.has_pending_block_frees()
    decode(engine, request, 1)
    assert engine.connector.has_pending_block_frees()
    assert len(saved_blocks(engine.step())) == 1


def test_the_engine_does_not_wait_if_all_is_saved() -> None:
    engine = seldom_looking()
    run_request(engine, prompt=range(8), decoded=2)
    assert not engine.connector.has_pending_block_frees()


def test_the_engine_does_not_wait_for_a_request_that_is_not_saved() -> None:
    engine = seldom_looking()
    request = engine.arrive("a", range(10), skip_save=True)
    engine.admit(request)
    engine.step()
    assert not engine.connector.has_pending_block_frees()


@pytest.mark.parametrize("by_priority", [False, True])
def test_the_request_that_is_preempted_first_is_saved_first(by_priority: bool) -> None:
    engine = seldom_looking()
    engine.side.settings = replace(engine.side.settings, by_priority=by_priority)
    requests = [run_request(engine, name, prompt=range(at, at + 10)) for name, at in (("a", 0), ("b", 100), ("c", 200))]
    for request, priority in zip(requests, (0, 2, 1), strict=True):
        request.priority = priority
    assert engine.connector.has_pending_block_frees()
    victim = "b" if by_priority else "c"
    assert saved_blocks(engine.step()) == engine.manager.get_block_ids(victim)[0][2:4]
    engine.preempt(engine.requests[victim])
    # The last one that still has blocks is next, whenever the preempted one comes back.
    assert engine.admit(engine.requests[victim]) is not None


def test_a_request_that_waits_for_its_blocks_is_not_saved() -> None:
    engine = seldom_looking()
    request = run_request(engine)
    engine.preempt(request)
    assert not engine.connector.has_pending_block_frees()


def test_a_request_that_ends_before_the_plan_is_saved_as_any_that_ends() -> None:
    engine = seldom_looking()
    request = run_request(engine)
    assert engine.connector.has_pending_block_frees()
    engine.finish(request)
    plan = engine.step()
    assert len(saved_blocks(plan)) == 2
    engine.report(plan)
    engine.assert_at_rest()


def test_blocks_without_room_are_saved_when_there_is_some() -> None:
    engine = seldom_looking()
    request = run_request(engine)
    engine.parts.pins.limit = 1
    assert engine.connector.has_pending_block_frees()
    plan = engine.step()
    table = engine.manager.get_block_ids("a")[0]
    assert saved_blocks(plan) == table[2:3]
    engine.report(plan)
    engine.parts.pins.limit = 8
    decode(engine, request, 1)
    engine.finish(request)
    engine.report(engine.step())
    assert len(names_of(engine)) == 5
