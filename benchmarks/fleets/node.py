"""One node of a fleet: an engine with its own prefix cache, a cache server's memory, and a network link."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.fleets.wire import Wire
from benchmarks.fleets.workload import Blocks
from kvoffload import native

NOBODY = np.empty(0, np.uint32)


def flags(memory: native.ReplayMemory, blocks: Blocks) -> npt.NDArray[np.bool_]:
    return np.frombuffer(memory.holds(blocks), np.bool_)


def prefix(present: npt.NDArray[np.bool_]) -> int:
    """How many are True from the first one on."""
    return len(present) if present.all() else int(present.argmin())


@dataclass(eq=False)
class Request:
    """One of the workload on its way through a node. Positions count blocks."""

    number: int
    arrival_s: float
    blocks: Blocks
    tokens: int
    epoch: int = 0
    engine_end: int = 0
    memory_end: int = 0
    remote_end: int = 0
    """The blocks before this one are not computed."""


@dataclass(eq=False)
class Node:
    """`epoch` counts its lives."""

    number: int
    engine: native.ReplayMemory
    memory: native.ReplayMemory
    link_in: Wire
    link_out: Wire
    is_up: bool = True
    epoch: int = 0
    free_s: float = 0.0
    """When its engine has computed all that was ready."""
    expected_s: float = 0.0
    """When it will have computed all that was given to it."""
    requests: dict[int, Request] = field(default_factory=dict)

    def find_local(self, blocks: Blocks) -> tuple[int, int]:
        """Where the engine's own prefix ends, and where that of its memory behind it does."""
        engine_end = self.engine.count_prefix(blocks)
        return engine_end, engine_end + self.memory.count_prefix(blocks[engine_end:])
