"""The virtual machine that an engine runs on: its threads' clocks, its ranks' links, and what hooks really took."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.ground.virtual_copy import Link, VirtualCopyEngine
from benchmarks.ground.virtual_time import Clock, Stream

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

MEETING_S = 60.0
"""How long ranks wait for each other at most, in seconds."""


@dataclass
class Spent:
    """The real nanoseconds that a thread was in a connector's hooks since the last `take`."""

    cpu_ns: int = 0
    wall_ns: int = 0

    def take(self) -> tuple[int, int]:
        taken = self.cpu_ns, self.wall_ns
        self.cpu_ns = self.wall_ns = 0
        return taken


class Stopwatch:
    """Times the hooks of one thread; a hook that calls another is one call."""

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


class Meeting:
    """Lets ranks meet when they register, each in a thread. One of them runs at a time: vLLM keeps the connector of a
    process in a global."""

    def __init__(self, ranks: int) -> None:
        self.turn = threading.Lock()
        self._frames = [b""] * ranks
        self._all_have_come = threading.Barrier(ranks, timeout=MEETING_S)

    def exchange(self, rank: int, frame: bytes) -> Sequence[bytes]:
        """Gives a rank's frame to all and returns those of all, in their order. The caller has the turn."""
        self._frames[rank] = frame
        self.turn.release()
        try:
            self._all_have_come.wait()
        finally:
            self.turn.acquire()
        return list(self._frames)


@dataclass
class Machine:
    """One engine's. The scheduler's thread and the workers' have clocks of their own, as they are processes."""

    clock: Clock
    links: list[Link]
    scheduler: Stopwatch = field(default_factory=Stopwatch)
    workers: list[Stopwatch] = field(default_factory=list)
    engines: dict[int, VirtualCopyEngine] = field(default_factory=dict)
    """The copy engines, by rank."""
    record_bytes: Sequence[int] = ()
    """Of a block in each group of the engine, of all ranks: each byte once."""
    cache: KVCacheConfig | None = None
    """The first rank's configuration. The scheduler's has one spec for all layers of a group, whatever their pages."""
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    @classmethod
    def of(cls, ranks: int) -> Machine:
        clock = Clock()
        links = [Link.of(Clock(), Stream()) for _ in range(ranks)]
        return cls(clock, links, workers=[Stopwatch() for _ in range(ranks)], meeting=Meeting(ranks))


MACHINES: dict[str, Machine] = {}
"""The machines by their engines' ids: vLLM makes connectors by name and gives them its configuration alone."""
