"""The description of a fleet, and the counts of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt


class Routing(Enum):
    ROUND_ROBIN = "round robin"
    LEAST_LOADED = "least loaded"
    PREFIX = "prefix"
    """Where it is done first: what a node has to compute before it, and what of it that node has not."""


class Kind(Enum):
    NONE = "none"
    STORE = "store"
    HOMES = "homes"
    PEERS = "peers"
    POOL = "pool"
    """One memory of all nodes' sizes that every node has as its own: the limit."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Sizes in blocks. `load`: which part of the time all engines would compute if nothing were cached."""

    nodes: int
    engine_blocks: int
    memory_blocks: int
    kind: Kind = Kind.NONE
    place: str = "peer"
    store_blocks: int = 0
    home_share: float | None = None
    """The share of its memory that a node sets aside for the fleet; None: the fleet's records lie among its own."""
    run_blocks: int = 1
    """Consecutive blocks with one home; 0: a whole prefix."""
    cuts_by_hash: bool = False
    """Runs begin where a block's hash says so, and have so many blocks in the mean."""
    tells_uses: bool = False
    """A remote hears of all blocks that a request makes use of, also of those that it need not be asked for."""
    routing: Routing = Routing.LEAST_LOADED
    policy: str = "prefix"
    home_policy: str = "prefix"
    load: float = 0.7
    fails: tuple[tuple[float, int], ...] = ()
    """Shares of the run, and the numbers of nodes."""
    joins: tuple[tuple[float, int], ...] = ()


@dataclass(eq=False)
class Tally:
    """Counts of a run: arrays have one entry for each request, and other counts without a unit are blocks."""

    ttft_s: npt.NDArray[np.float64]
    engine_hits: npt.NDArray[np.int64]
    memory_hits: npt.NDArray[np.int64]
    remote_hits: npt.NDArray[np.int64]
    references: int = 0
    completed: int = 0
    rerouted: int = 0
    lost_blocks: int = 0
    too_slow_blocks: int = 0
    """A remote had them; to read them would have taken longer than to compute them, or than the deadline."""
    dropped_blocks: int = 0
    """Not written: the queue was full."""
    read_bytes: int = 0
    written_bytes: int = 0
    questions: int = 0
    batches: int = 0
    """The number of batches of reads and writes, one to each end."""
    prefill_s: float = 0.0
    duration_s: float = 0.0
    served_bytes: list[int] = field(default_factory=list)
    """The bytes that others read from each node."""
    held_blocks: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return float((self.engine_hits + self.memory_hits + self.remote_hits).sum()) / max(self.references, 1)
