"""A virtual rank: the worker side of a connector, called in the order in which vLLM's model runners call it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from benchmarks.ground.engine_config import EngineConfig
from benchmarks.ground.virtual_memory import map_tensors

ATTENTION: dict[str, Any] = {"layers": "what attention needs to know of a batch"}


class Rank:
    """One worker process's part. vLLM's own code calls the hooks; of the model there is nothing."""

    def __init__(self, config: EngineConfig, number: int) -> None:
        self._config = config
        self._stage = number // config.model.tensor_ranks
        self._vllm = copy.copy(config.vllm)
        self._vllm.parallel_config = copy.copy(config.vllm.parallel_config)
        self._vllm.parallel_config.rank = number
        self._vllm.parallel_config.node_rank = number * config.model.nodes // config.model.ranks
        self.connector: Any = KVConnectorFactory.create_connector(
            config=self._vllm, role=KVConnectorRole.WORKER, kv_cache_config=config.stages[self._stage]
        )
        self._hooks: Any = None

    def register(self) -> None:
        """As the model runner does; all ranks at once, each in its turn."""
        self._become_current()
        self._hooks = ActiveKVConnector(self._vllm, map_tensors(self._config.stages[self._stage]))

    def step(self, output: SchedulerOutput, launch: Callable[[], None]) -> KVConnectorOutput:
        """`launch`: the forward, which goes on when this returns."""
        self._become_current()
        found = self._step_v2(output, launch) if self._config.settings.runner == 2 else self._step_v1(output, launch)
        return found or KVConnectorOutput()

    @property
    def place(self) -> tuple[int, int]:
        """Returns its stage, and which of the stage's ranks it is."""
        return self._stage, self._vllm.parallel_config.rank % self._config.model.tensor_ranks

    def close(self) -> None:
        self._become_current()
        self.connector.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def _step_v1(self, output: SchedulerOutput, launch: Callable[[], None]) -> KVConnectorOutput | None:
        """`GPUModelRunner.execute_model`, and with drafts what follows them."""
        runner = KVConnectorModelRunnerMixin
        self.connector.handle_preemptions(output.kv_connector_metadata)
        if not output.total_num_scheduled_tokens:
            return runner.kv_connector_no_forward(output, self._vllm).kv_connector_output
        has_drafts = self._config.settings.drafts > 0
        with (
            set_forward_context(ATTENTION, self._vllm),
            runner.maybe_get_kv_connector_output(output, defer_finalize=has_drafts) as found,
        ):
            launch()
        if has_drafts:
            runner.finalize_kv_connector()
        return found

    def _step_v2(self, output: SchedulerOutput, launch: Callable[[], None]) -> KVConnectorOutput | None:
        """`execute_model` and `sample_tokens` of model runner V2, with full CUDA graphs."""
        if not output.total_num_scheduled_tokens:
            return self._hooks.no_forward(output).kv_connector_output
        names = list(output.num_scheduled_tokens)
        batch: Any = SimpleNamespace(
            idx_mapping=np.arange(len(names)), req_ids=names, num_tokens=output.total_num_scheduled_tokens
        )
        self._hooks.pre_forward(output, batch)
        launch()
        self._hooks.finish_forward()
        return self._hooks.post_forward(output.finished_req_ids)

    def _become_current(self) -> None:
        """Ranks are processes, and vLLM keeps the connector of each in a global."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
