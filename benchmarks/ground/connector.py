"""Our connector as it is, on a virtual machine: its copies are virtual, its scheduler side has the virtual clock, and
the time in its hooks is taken."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.ground.machine import MACHINES, Machine, Stopwatch
from benchmarks.ground.virtual_copy import AT_ONCE, VirtualCopyEngine
from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.connector.scheduler_side import SchedulerSide
from kvoffload.connector.start_up import EngineStart
from kvoffload.connector.worker_side import WorkerSide
from kvoffload.kvspec import PageMap
from kvoffload.transfer import CopyDirection


class GroundWorker(WorkerSide):
    """Its device is the host's to torch, which has no streams; the rank has one, and its copy engine knows it."""

    engine: VirtualCopyEngine
    compared_bytes = 0
    """Bytes that saves copied to memory which is not kept, because their digests alone are compared."""

    def mark(self) -> None:
        self._before_forward = self.engine.mark()

    def _find_point(self, direction: CopyDirection, before_forward: Any) -> Any:
        is_free = direction is CopyDirection.LOAD and self.settings.has_late_frees
        return AT_ONCE if is_free else super()._find_point(direction, before_forward)

    def _begin(self, job: Any, before_forward: Any) -> None:
        known = len(self._copies)
        super()._begin(job, before_forward)
        if len(self._copies) > known:
            scratch = next(reversed(self._copies.values())).scratch
            self.compared_bytes += 0 if scratch is None else scratch.nbytes


class GroundConnector(KVOffloadConnector):
    """vLLM makes it by name."""

    stopwatch: Stopwatch

    def _make_scheduler(self, start: EngineStart) -> SchedulerSide:
        machine = self._find_machine()
        self.stopwatch = machine.scheduler
        return SchedulerSide(start.scheduler_settings(), start.open_for_scheduler, self.measures, machine.clock)

    def _make_worker(self, start: EngineStart) -> WorkerSide:
        machine, rank = self._find_machine(), self._vllm_config.parallel_config.rank
        self.stopwatch = machine.workers[rank]

        def open_engine(page_map: PageMap, memory: object, **settings: object) -> VirtualCopyEngine:
            engine = VirtualCopyEngine(page_map, machine.links[rank])
            machine.engines[rank] = engine
            return engine

        settings = replace(start.worker_settings(), open_engine=open_engine)
        exchange = functools.partial(machine.meeting.exchange, rank)
        return GroundWorker(settings, start.open_for_worker, exchange, start.open_for_node)

    def _find_machine(self) -> Machine:
        assert self._vllm_config.kv_transfer_config is not None
        return MACHINES[str(self._vllm_config.kv_transfer_config.engine_id)]


def time_hooks(kind: type, hooks: type) -> None:
    """Takes the time of what `hooks` does in public, in `kind`, which is made of it and has a `stopwatch`."""
    for name, hook in list(vars(hooks).items()):
        if not name.startswith("_") and callable(hook) and not isinstance(hook, type):
            setattr(kind, name, _time(hook))


def _time(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def timed(connector: Any, *args: Any, **kwargs: Any) -> Any:
        with connector.stopwatch:
            return hook(connector, *args, **kwargs)

    return timed


time_hooks(GroundConnector, KVOffloadConnector)
