"""vLLM's scheduler, with a way to ask it from another process. An engine takes it by name (`scheduler_cls`).

vLLM answers a front-end's utility call with any method of its core, so the core gets two more when this scheduler is
made. Only the process of the core imports this module.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request


class InspectedScheduler(Scheduler):
    """Counts its preemptions and loads, tells what is held, and can be given a smaller cache than settings allow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._preemptions = 0
        self._loads = 0
        self._doomed = 0
        EngineCore.inspect_scheduler = lambda core: core.scheduler.inspect()  # type: ignore[attr-defined]
        EngineCore.limit_records = lambda core, size: core.scheduler.limit_records(size)  # type: ignore[attr-defined]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._preemptions += 1
        super()._preempt_request(request, *args, **kwargs)

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: Any) -> Any:
        plan = super()._build_kv_connector_meta(connector, scheduler_output)
        self._loads += sum(not load.is_doomed for load in plan.loads)
        self._doomed += sum(load.is_doomed for load in plan.loads)
        return plan

    @property
    def _side(self) -> Any:
        return self.connector._scheduler  # type: ignore[union-attr]

    def inspect(self) -> dict[str, int]:
        """Counts, of the scheduler and of its connector's side."""
        pool = self.kv_cache_manager.block_pool
        side, stats = self._side, self._side.index.stats
        return {
            "preemptions": self._preemptions,
            "planned_loads": self._loads,
            "doomed_loads": self._doomed,
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests": len(self.requests) + len(side._requests),
            "remembered": len(side._restores._answers) + len(side._restores._failed) + len(side._saves._next),
            "pins": side._saves._pins.count,
            "saves": side._saves.pending,
            "loads": side._restores.pending,
            "admission": sum(side._restores._admission._rest.values()),
            "leased": stats.leased_entries,
            "reserved": stats.reserved_entries,
            "readable": stats.entries,
            "evicted": stats.evicted,
            "faults": sum(self.connector.faults.values()),  # type: ignore[union-attr]
        }

    def limit_records(self, size_bytes: int) -> int:
        """From now on the records may take that much. How much it was before."""
        before, self._side.index._capacity_bytes = self._side.index._capacity_bytes, size_bytes
        return before
