"""The virtual machine that an engine runs on: its threads' clocks, its ranks' links, and what hooks really took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from benchmarks.ground.virtual_copy import Link, VirtualCopyEngine
from benchmarks.ground.virtual_time import Clock, Stream


@dataclass
class Spent:
    """Real nanoseconds that a thread was in a connector's hooks since somebody took them."""

    cpu_ns: int = 0
    wall_ns: int = 0

    def take(self) -> tuple[int, int]:
        taken = self.cpu_ns, self.wall_ns
        self.cpu_ns = self.wall_ns = 0
        return taken


class Stopwatch:
    """Of one thread's hooks; a hook that calls another is one call."""

    def __init__(self) -> None:
        self.spent = Spent()
        self._depth = 0
        self._begun = (0, 0)

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._begun = time.thread_time_ns(), time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.spent.cpu_ns += time.thread_time_ns() - self._begun[0]
            self.spent.wall_ns += time.perf_counter_ns() - self._begun[1]


@dataclass
class Machine:
    """One engine's. The scheduler's thread and the workers' have clocks of their own, as they are processes."""

    clock: Clock
    links: list[Link]
    scheduler: Stopwatch = field(default_factory=Stopwatch)
    workers: list[Stopwatch] = field(default_factory=list)
    engines: list[VirtualCopyEngine] = field(default_factory=list)

    @classmethod
    def of(cls, ranks: int) -> Machine:
        clock = Clock()
        links = [Link.of(Clock(), Stream()) for _ in range(ranks)]
        return cls(clock, links, workers=[Stopwatch() for _ in range(ranks)])


MACHINES: dict[str, Machine] = {}
"""By the engine's id: vLLM makes connectors by name and gives them its configuration alone."""
