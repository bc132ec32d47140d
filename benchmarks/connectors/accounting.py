"""CPU seconds by whom they were spent for: the engine, the threads and hooks of its connector, the cache server."""

from __future__ import annotations

import functools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NATIVE_THREADS = "kvoffload"
"""How the names begin that our native threads have in the kernel."""
KEEPER = "kvoffload-client"
"""The thread of a client, which Python has by this name."""


@dataclass(frozen=True, kw_only=True)
class CpuSeconds:
    """Since the start of each. `engine` is the whole process, with what of it is ours."""

    engine: float
    threads: float
    scheduler_hooks: float
    worker_hooks: float
    server: float

    def since(self, before: CpuSeconds) -> CpuSeconds:
        mine, its = asdict(self), asdict(before)
        return CpuSeconds(**{name: mine[name] - its[name] for name in mine})

    @property
    def ours(self) -> float:
        return self.threads + self.scheduler_hooks + self.worker_hooks + self.server


class HookClock:
    """CPU seconds that the engine's threads spend inside the hooks of one connector class, by its side.

    A hook that calls another is one call. The clock's own two readings are partly in it: about half a microsecond.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        """`now`: a clock of other seconds than the thread's CPU time."""
        self._now = now or time.thread_time
        self.scheduler_s = 0.0
        self.worker_s = 0.0
        self._is_inside = False

    def watch(self, connector: type[Any]) -> None:
        """Every public method of the class, for all its instances made from now on."""
        for name, hook in list(vars(connector).items()):
            if not name.startswith("_") and callable(hook) and not isinstance(hook, type):
                setattr(connector, name, self._timed(hook))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def timed(connector: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return hook(connector, *args, **kwargs)
            self._is_inside = True
            begun_s = self._now()
            try:
                return hook(connector, *args, **kwargs)
            finally:
                spent_s = self._now() - begun_s
                self._is_inside = False
                if connector.scheduler_side is not None:
                    self.scheduler_s += spent_s
                else:
                    self.worker_s += spent_s

        return timed


def read_cpu(clock: HookClock, server: int) -> CpuSeconds:
    """Returns the processor time of this process and of its server, whose process number is `server` (0: no server)."""
    return CpuSeconds(
        engine=time.process_time(),
        threads=sum(_thread_cpu(thread) for thread in _find_threads()),
        scheduler_hooks=clock.scheduler_s,
        worker_hooks=clock.worker_s,
        server=process_cpu(server) if server else 0.0,
    )


def process_cpu(process: int) -> float:
    """Of all its threads, ended ones too: the clock that clock_getcpuclockid names."""
    return time.clock_gettime((~process << 3) | 2)


def find_server(client: Any) -> int:
    """The process at the other end of a client's connection."""
    with socket.socket(fileno=os.dup(client.wire.lifeline_file)) as lifeline:
        process, _, _ = struct.unpack("3i", lifeline.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(process)


def _find_threads() -> set[int]:
    native = {
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().startswith(NATIVE_THREADS)
    }
    keepers = {thread.native_id for thread in threading.enumerate() if thread.name == KEEPER}
    return native | {keeper for keeper in keepers if keeper is not None}


def _thread_cpu(thread: int) -> float:
    return time.clock_gettime((~thread << 3) | 6)
