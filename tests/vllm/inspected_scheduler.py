"""vLLM's scheduler, with a way to ask it from another process. An engine takes it by name (`scheduler_cls`).

vLLM answers a front-end's utility call with any method of its core, so the core gets a few more when this scheduler is
made. Only the process of the core imports this module.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from tests.kit.open_files import count_open_files
from tests.vllm import connector_probe, pool_probe


def _invalidate_entry(core: Any, group: int, name: str) -> None:
    core.scheduler.invalidate_entry(group, name)


class InspectedScheduler(Scheduler):
    """Counts its preemptions and loads, tells what is held, and can be given a smaller pool than settings allow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._preemptions = 0
        self._loads = 0
        self._doomed = 0
        self._squatter: pool_probe.Squatter | None = None
        EngineCore.inspect_scheduler = lambda core: core.scheduler.inspect()  # type: ignore[attr-defined]
        EngineCore.list_entries = lambda core: core.scheduler.list_entries()  # type: ignore[attr-defined]
        EngineCore.resolve_connector = lambda core: connector_probe.resolve_connector()  # type: ignore[attr-defined]
        EngineCore.invalidate_entry = _invalidate_entry  # type: ignore[attr-defined]
        EngineCore.settle_pool = lambda core: core.scheduler.settle_pool()  # type: ignore[attr-defined]
        EngineCore.limit_pool = lambda core, size: core.scheduler.limit_pool(size)  # type: ignore[attr-defined]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        pool_probe.follow(self._side)
        output = super().schedule(*args, **kwargs)
        plan: Any = output.kv_connector_metadata
        self._preemptions += len(output.preempted_req_ids or ())
        self._loads += len(plan.loads)
        self._doomed += len(plan.doomed)
        return output

    @property
    def _side(self) -> Any:
        return self.connector.scheduler_side  # type: ignore[union-attr]

    def inspect(self) -> dict[str, int]:
        """Counts, of the scheduler, of its connector's side and of the pool."""
        blocks = self.kv_cache_manager.block_pool
        return {
            **pool_probe.count_pool(self._side),
            **pool_probe.count_held(self._side),
            "preemptions": self._preemptions,
            "planned_loads": self._loads,
            "doomed_loads": self._doomed,
            "blocks": blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),
            "engine_requests": len(self.requests),
            "faults": sum(self.connector.faults.values()),  # type: ignore[union-attr]
            "open_files": count_open_files(),
        }

    def list_entries(self) -> list[pool_probe.Entry]:
        """Lists what `PublishLog.entries` has."""
        return pool_probe.follow(self._side).entries()

    def invalidate_entry(self, group: int, name: str) -> None:
        """One record of a block is not to be found any more."""
        self._side.parts.cache.invalidate(group, bytes.fromhex(name))
        pool_probe.settle(self._side)

    def settle_pool(self) -> None:
        """Waits until the server has handled all messages."""
        pool_probe.settle(self._side)

    def limit_pool(self, size_bytes: int) -> None:
        """Limits the bytes that readable blocks may take from now on; 0: no limit."""
        if self._squatter is not None:
            self._squatter.close()
            self._squatter = None
        if size_bytes:
            self._squatter = pool_probe.Squatter(self._side, leaves_bytes=size_bytes)


class InspectedAsyncScheduler(InspectedScheduler, AsyncScheduler):
    """The same of the one that plans a step before the last one's tokens are known."""
