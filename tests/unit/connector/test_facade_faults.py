"""A fault on the scheduler side: a miss that is counted, and no request waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvoffload.connector.common.orders import NodeOrders
from kvoffload.connector.common.step_plan import StepPlan
from tests.kit.connector.scripted import Admission, ScriptedEngine
from tests.kit.connector.workers_of_facades import make_worker, run_step, warm_engine


def break_side(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def fail(*given: object, **named: object) -> None:
        raise RuntimeError("a bug")

    for name in names:
        monkeypatch.setattr(engine.side, name, fail)


def test_faults_in_hooks_are_misses_and_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = warm_engine()
    request = engine.arrive("b", range(30))
    break_side(engine, monkeypatch, "add_request", "match", "plan_step", "end_transfers", "end_request")
    connector = engine.connector
    for _ in range(3):
        connector.on_new_request(request)
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        assert connector.build_connector_meta(SchedulerOutput.make_empty()) == StepPlan()
        connector.update_connector_output(KVConnectorOutput())
        assert connector.request_finished_all_groups(request, ([],)) == (False, None)
    assert connector.faults == dict.fromkeys(
        [
            "on_new_request",
            "get_num_new_matched_tokens",
            "build_connector_meta",
            "update_connector_output",
            "request_finished_all_groups",
        ],
        3,
    )
    assert len([record for record in caplog.records if "a bug" in record.getMessage()]) == 5


def test_a_plan_that_fails_still_sends_the_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their requests wait for a report and for nothing else."""
    engine = warm_engine()
    engine.admit(engine.arrive("b", range(30)))
    with monkeypatch.context() as patch:
        break_side(engine, patch, "plan_step")
        plan = engine.step()
    assert [load.request_id for load in plan.loads] == ["b"]
    assert len(plan.loads[0].moves) == 7
    assert engine.step().loads == ()
    engine.report(plan)
    assert engine.connector.faults == {"build_connector_meta": 1}


@pytest.mark.parametrize("step_fails", [False, True])
def test_a_load_whose_planning_fails_is_sent_to_fail(monkeypatch: pytest.MonkeyPatch, step_fails: bool) -> None:
    engine = warm_engine()
    request = engine.arrive("b", range(30))
    with monkeypatch.context() as patch:
        break_side(engine, patch, "plan_load", *(["plan_step"] if step_fails else []))
        assert engine.admit(request) == Admission(0, 28)
        plan = engine.step()
    assert (plan.loads, plan.doomed) == ((), ("b",))
    engine.report(plan)
    assert engine.match(request) == 0
    assert engine.admit(request) == Admission(0, 0)
    engine.report(engine.step())
    engine.finish(request)
    assert engine.pool.get_num_free_blocks() == engine.all_free
    assert engine.connector.faults["update_state_after_alloc"] == 1


def test_a_fault_in_what_is_noted_for_saves_costs_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = warm_engine()
    request = engine.arrive("b", range(30))
    break_side(engine, monkeypatch, "admit")
    assert engine.admit(request) == Admission(0, 28)
    plan = engine.step()
    assert ([load.request_id for load in plan.loads], plan.doomed) == (["b"], ())
    assert engine.connector.faults == {"update_state_after_alloc": 1}
    engine.report(plan)


def test_a_fault_while_events_are_made_is_none_of_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM goes through them after the hook has returned."""

    def fail_late() -> Iterator[object]:
        yield "an event"
        raise RuntimeError("a bug")

    engine = warm_engine()
    monkeypatch.setattr(engine.side, "take_events", fail_late)
    assert list(engine.connector.take_events()) == []
    assert engine.connector.faults == {"take_events": 1}


def test_a_fault_while_gauges_are_taken_is_no_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = warm_engine()
    break_side(engine, monkeypatch, "note_gauges")
    assert engine.connector.get_kv_connector_stats() is None
    assert engine.connector.faults == {"get_kv_connector_stats": 1}


def test_a_reset_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes False alone for a failure."""
    engine = warm_engine()
    assert engine.connector.reset_cache() is True
    break_side(engine, monkeypatch, "clear")
    assert engine.connector.reset_cache() is False
    assert engine.connector.faults == {"reset_cache": 1}


def test_a_fault_inside_planning_a_load_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = warm_engine()
    request = engine.arrive("b", range(30))
    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.restores.admission, "reserve", lambda *given, **named: {}[0])
        engine.admit(request)
    plan = engine.step()
    assert (plan.loads, plan.doomed) == ((), ("b",))
    engine.report(plan)
    engine.finish(request)
    assert engine.cache.stats().leases == 0


def test_orders_of_a_node_that_cannot_be_obeyed_cost_the_workers_step_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = make_worker().connector
    assert connector.worker_side is not None
    obeyed: list[object] = []
    monkeypatch.setattr(connector.worker_side, "obey", obeyed.append)
    plan = StepPlan(nodes={0: NodeOrders(over=(1,))}, doomed=("a",))
    assert run_step(connector, plan).failed_recving == {"a"}
    assert obeyed == [plan.nodes]
    monkeypatch.setattr(connector.worker_side, "obey", obeyed.index)
    assert run_step(connector, StepPlan(nodes={1: NodeOrders()}, doomed=("b",))).failed_recving == {"b"}
    assert connector.faults == {"bind_connector_metadata": 1}
    connector.shutdown()
