"""vLLM's scheduler, which measures what the connector adds to its steps. An engine takes it by name.

It appends a line to the file that the engine's `additional_config` names, whenever the engine's own cache is reset.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.connectors.accounting import HookClock, find_server
from kvoffload.client import Client
from kvoffload.connector.facade import KVOffloadConnector

LONG_WAIT_S = 0.001
"""The most that a step should wait for the server."""


class TimedScheduler(AsyncScheduler):
    """Measures, for each step, the time in the connector's hooks on the scheduler's side, and the part in which it
    waited for the server. A step lasts from one plan to the next. Owned by the engine's thread, like its base."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._elapsed, self._cpu = HookClock(time.perf_counter), HookClock()
        self._elapsed.watch(KVOffloadConnector)
        self._cpu.watch(KVOffloadConnector)
        self._waited_s = 0.0
        self._time_waits()
        super().__init__(*args, **kwargs)
        self._file = Path(self.vllm_config.additional_config["steps_file"])  # type: ignore[index]
        self._before = self._read()
        self._steps: list[tuple[float, ...]] = []

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._end_step()
        return super().schedule(*args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        is_reset = super().reset_prefix_cache(*args, **kwargs)
        self._end_step()
        hooks, cpu, waits = zip(*self._steps, strict=True)
        self._steps = []
        line = {
            "server": self._find_server(),
            "hooks_s": sum(hooks),
            "hooks_cpu_s": sum(cpu),
            "longest_hooks_s": max(hooks),
            "longest_wait_s": max(waits),
            "long_waits": sum(wait > LONG_WAIT_S for wait in waits),
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return is_reset

    def _end_step(self) -> None:
        now = self._read()
        self._steps.append(tuple(one - other for one, other in zip(now, self._before, strict=True)))
        self._before = now

    def _read(self) -> tuple[float, float, float]:
        return self._elapsed.scheduler_s, self._cpu.scheduler_s, self._waited_s

    def _time_waits(self) -> None:
        wait = Client.wait_for

        def wait_timed(client: Client, pending: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return wait(client, pending)
            finally:
                self._waited_s += time.perf_counter() - begun_s

        Client.wait_for = wait_timed  # type: ignore[method-assign, assignment]

    def _find_server(self) -> int:
        """Returns the number of the server's process. 0: there is no connection to one."""
        with suppress(OSError, AttributeError):
            return find_server(self.connector.scheduler_side.parts.cache)  # type: ignore[union-attr]
        return 0
