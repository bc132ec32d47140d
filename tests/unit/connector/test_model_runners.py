"""A worker's hooks as vLLM's model runners call them: their own code where it runs without a GPU, else in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvoffload.connector import worker_side
from kvoffload.connector.common.step_plan import NOTHING_TO_DO, ONLY_A_FORWARD, StepPlan
from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.connector.worker_side import IDLE_WAIT_S
from tests.kit.connector.engine_configs import make_vllm_config
from tests.kit.connector.workers import Move, replace_engine
from tests.kit.connector.workers_of_facades import Worker, load_plan, make_worker, save_job, warm_engine
from tests.kit.transfer.stand_ins import HeldEngine, MarkingEngine

ENGINE_CONFIG: Any = make_vllm_config()
ENGINE_CONFIG.parallel_config.data_parallel_size = 1
ENGINE_CONFIG.parallel_config.use_sequence_parallel_moe = False
ENGINE_CONFIG.compilation_config.fast_moe_cold_start = False
ENGINE_CONFIG.compilation_config.static_all_moe_layers = []


class Runner(Protocol):
    """`forward` is what the model does when it is launched."""

    def __init__(self, worker: Worker) -> None: ...
    def step(self, output: SchedulerOutput, forward: Callable[[], None]) -> None: ...


class RunnerV1:
    """gpu_model_runner.py around `maybe_get_kv_connector_output`."""

    defers_saves = False

    def __init__(self, worker: Worker) -> None:
        pass

    def step(self, output: SchedulerOutput, forward: Callable[[], None]) -> None:
        if not output.total_num_scheduled_tokens:
            KVConnectorModelRunnerMixin.kv_connector_no_forward(output, ENGINE_CONFIG)
            return
        with (
            set_forward_context({}, ENGINE_CONFIG),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output, defer_finalize=self.defers_saves),
        ):
            forward()
        if self.defers_saves:
            KVConnectorModelRunnerMixin.finalize_kv_connector()


class DraftingRunnerV1(RunnerV1):
    """A runner that decodes speculatively: it asks for results before the draft model runs."""

    defers_saves = True


class RunnerV2:
    """gpu/model_runner.py around its `ActiveKVConnector`. It has no metadata in the context that loads begin in."""

    def __init__(self, worker: Worker) -> None:
        self._hooks = ActiveKVConnector(ENGINE_CONFIG, worker.tensors)

    def step(self, output: SchedulerOutput, forward: Callable[[], None]) -> None:
        if not output.total_num_scheduled_tokens:
            self._hooks.no_forward(output)
            return
        batch: Any = SimpleNamespace(idx_mapping=None, req_ids=["a"], num_tokens=output.total_num_scheduled_tokens)
        with set_forward_context({}, ENGINE_CONFIG):
            self._hooks.pre_forward(output, batch)
            forward()
        self._hooks.finish_forward()
        self._hooks.post_forward(set())


class DraftingRunnerV2:
    """vLLM 0.33 with a speculator: loads and results before the draft model's forward, saves after it."""

    def __init__(self, worker: Worker) -> None:
        self._connector = worker.connector

    def step(self, output: SchedulerOutput, forward: Callable[[], None]) -> None:
        connector = self._connector
        assert output.kv_connector_metadata is not None
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        if output.total_num_scheduled_tokens:
            forward()
        connector.finish_forward()
        connector.start_load_kv(SimpleNamespace(attn_metadata=None))
        connector.get_transfer_results(set())
        connector.build_connector_worker_meta()
        connector.wait_for_save()
        connector.clear_connector_metadata()


RUNNERS: tuple[type[Runner], ...] = (RunnerV1, DraftingRunnerV1, RunnerV2, DraftingRunnerV2)


@contextmanager
def running(kind: type[Runner]) -> Iterator[tuple[Runner, Worker, HeldEngine]]:
    """A worker whose copies wait for the test."""
    worker = make_worker()
    # private: vLLM makes its connector itself otherwise, with the ranks of a process group
    kv_transfer_state._KV_CONNECTOR_AGENT = worker.connector
    try:
        runner = kind(worker)
        yield runner, worker, replace_engine(side_of(worker.connector), HeldEngine)
    finally:
        kv_transfer_state.ensure_kv_transfer_shutdown()


def side_of(connector: KVOffloadConnector) -> Any:
    assert connector.worker_side is not None
    return connector.worker_side


def output_of(plan: StepPlan, tokens: int) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.total_num_scheduled_tokens = tokens
    output.has_sync_kv_loads = False
    output.kv_connector_metadata = plan
    return output


def forward_of(seen: list[str]) -> Callable[[], None]:
    return lambda: seen.append("forward")


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_step_that_runs_the_model_never_waits_for_a_copy(kind: type[Runner]) -> None:
    with running(kind) as (runner, worker, engine):
        engine.hold()
        save = StepPlan(saves=(save_job(worker.shared, Move(0, 1, 0)),), has_forward=True)
        forwards: list[str] = []
        runner.step(output_of(save, 4), forward_of(forwards))
        for _ in range(20):
            runner.step(output_of(StepPlan(has_forward=True), 1), forward_of(forwards))
        assert len(engine.plans) == 0
        assert len(forwards) == 21
        assert engine.waits == []
        engine.release()


@pytest.mark.parametrize("kind", RUNNERS)
def test_an_idle_engine_that_steps_for_a_copy_waits_in_each_step(kind: type[Runner]) -> None:
    with running(kind) as (runner, worker, engine):
        engine.hold()
        runner.step(output_of(load_plan(worker.shared, Move(0, 1, 0)), 0), forward_of([]))
        for _ in range(20):
            runner.step(output_of(NOTHING_TO_DO, 0), forward_of([]))
        assert engine.waits == [IDLE_WAIT_S] * 21
        engine.release()


@pytest.mark.parametrize("kind", RUNNERS)
def test_loads_are_submitted_after_the_forward_and_do_not_wait_for_it(
    kind: type[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(kind) as (runner, worker, _):
        side = side_of(worker.connector)
        engine = replace_engine(side, lambda held: MarkingEngine(held.inner))
        monkeypatch.setattr(worker_side, "compute_stream", lambda device: 77)
        plan = replace(load_plan(worker.shared, Move(0, 2, 1)), saves=(save_job(worker.shared, Move(0, 1, 0)),))
        runner.step(output_of(replace(plan, has_forward=True), 4), lambda: engine.seen.append("forward"))
        assert engine.seen == ["mark 1 of 77", "forward", "load after point 1", "save after 77"]
        runner.step(output_of(ONLY_A_FORWARD, 4), lambda: engine.seen.append("forward"))
        assert engine.marks == 1


def test_what_a_step_did_not_come_to_keeps_its_place_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(RunnerV1) as (_, worker, _):
        engine = replace_engine(side_of(worker.connector), lambda held: MarkingEngine(held.inner))
        monkeypatch.setattr(worker_side, "compute_stream", lambda device: 77)
        for slot in (1, 2):
            worker.connector.bind_connector_metadata(load_plan(worker.shared, Move(0, slot, slot)))
        worker.connector.get_transfer_results(set())
        assert engine.seen == ["mark 1 of 77", "load after point 1", "mark 2 of 77", "load after point 2"]


@pytest.mark.parametrize(
    ("file", "order"),
    [
        (
            "vllm/v1/worker/gpu_model_runner.py",
            (
                "self._update_states(",
                "preprocess_mamba(",
                "self.maybe_get_kv_connector_output(",
                "self._model_forward(",
            ),
        ),
        (
            "vllm/v1/worker/gpu/model_runner.py",
            ("self.update_requests(", "preprocess_state(", "self.kv_connector.pre_forward(", ".run_fullgraph("),
        ),
    ],
)
def test_vllm_binds_a_plan_after_it_has_zeroed_new_blocks_and_before_the_forward(
    file: str, order: tuple[str, ...]
) -> None:
    """Loads rely on this order: a release of vLLM that changes it fails here."""
    source = (Path(vllm.__file__).parents[1] / file).read_text()
    step = source[source.index("    def execute_model(") :]
    places = [step.index(call) for call in order]
    assert places == sorted(places)
    updates = source[source.index(f"    def {order[0].removeprefix('self.')}") :].split("\n    def ", 1)[0]
    assert "new_block_ids_to_zero" in updates
    assert "copy_kv_cache_blocks_inplace(" in updates


def test_the_scheduler_side_says_which_steps_run_the_model() -> None:
    """Also where there is nothing to do, and where planning failed."""
    engine = warm_engine()
    plans = engine.serve("b", range(100, 130), chunk=4)
    assert len(plans) > 7
    assert {plan.has_forward for plan in plans} == {True}
    assert not engine.step().has_forward


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_plan_that_failed_still_says_whether_the_model_runs(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = warm_engine()
    engine.admit(engine.arrive("b", range(30)))

    def fail(*given: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.side, "plan_step", fail)
    plan = engine.connector.build_connector_meta(output_of(NOTHING_TO_DO, tokens))
    assert isinstance(plan, StepPlan)
    assert (len(plan.loads), plan.has_forward) == (1, tokens > 0)
