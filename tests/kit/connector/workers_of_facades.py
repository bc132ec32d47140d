"""Facades of schedulers and workers that run steps together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
)
from vllm.v1.outputs import KVConnectorOutput

from kvoffload.connector.common.step_plan import LoadJob, SaveJob, StepPlan, WantedDigests, WorkerReport
from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.connector.start_up import EngineStart
from tests.kit.connector.engine_configs import (
    full,
    make_config,
    make_tensors,
    make_vllm_config,
)
from tests.kit.connector.scripted import ScriptedEngine
from tests.kit.connector.workers import Move, SharedCache

CONTEXT = SimpleNamespace(attn_metadata=None)


def warm_engine() -> ScriptedEngine:
    engine = ScriptedEngine((["a"], full(4)))
    engine.serve("first", range(30))
    engine.forget()
    return engine


class Worker(NamedTuple):
    connector: KVOffloadConnector
    tensors: dict[str, torch.Tensor]
    shared: SharedCache


def open_worker(config: Any, cache: Any) -> tuple[KVOffloadConnector, SharedCache]:
    shared = SharedCache()
    with patch.object(EngineStart, "open_for_worker", lambda start, register: shared.open(register)):
        return KVOffloadConnector(config, KVConnectorRole.WORKER, cache), shared


def make_worker(*, extra: dict[str, Any] | None = None) -> Worker:
    config = make_config((["a"], full(4)), num_blocks=8)
    connector, shared = open_worker(make_vllm_config(extra=extra), config)
    tensors = make_tensors(config)
    connector.register_kv_caches(tensors)
    return Worker(connector, tensors, shared)


def save_job(shared: SharedCache, *moves: Move, job: int = 1) -> SaveJob:
    return SaveJob(job, shared.place, shared.make_moves(moves))


def load_plan(shared: SharedCache, *moves: Move, wanted: WantedDigests | None = None) -> StepPlan:
    return StepPlan(loads=(LoadJob("a", shared.place, shared.make_moves(moves), wanted),))


def run_step(connector: KVOffloadConnector, plan: StepPlan) -> KVConnectorOutput:
    """The hooks of one worker step in vLLM's order."""
    connector.bind_connector_metadata(plan)
    connector.start_load_kv(CONTEXT)
    connector.wait_for_save()
    results = connector.get_transfer_results(set())
    output = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        kv_connector_worker_meta=connector.build_connector_worker_meta(),
    )
    connector.clear_connector_metadata()
    return output


def run_until_saved(connector: KVOffloadConnector, plan: StepPlan) -> WorkerReport:
    output = run_step(connector, plan)
    while output.kv_connector_worker_meta is None:
        output = run_step(connector, StepPlan())
    assert isinstance(output.kv_connector_worker_meta, WorkerReport)
    return output.kv_connector_worker_meta


def run_until_loaded(connector: KVOffloadConnector, plan: StepPlan) -> KVConnectorOutput:
    output = run_step(connector, plan)
    while not output.finished_recving:
        output = run_step(connector, StepPlan())
    return output
