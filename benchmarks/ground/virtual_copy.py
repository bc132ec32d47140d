"""A copy engine that moves nothing: its plans end when the bytes of real ones would have crossed the link."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count

import numpy as np

from benchmarks.ground.virtual_time import Clock, Stream
from kvoffload.errors import NativeError
from kvoffload.kvspec import PageMap
from kvoffload.transfer import CopyDirection, CopyItems, FinishedCopy
from kvoffload.transfer.copy_engine import CLOSE_TIMEOUT_S, PLAN_LIMIT, CopyTicket

LINK_RATE = 50e9
"""Bytes a second and direction: what a PCIe 5 x16 link carries of its 63 GB/s."""
PLAN_S = 20e-6
"""The time of a plan in addition to its bytes: launch, the first gathered piece, and the event at its end."""
STAGED_BYTES = 28 << 10
"""Kernels gather shorter runs of memory without time on the link; longer ones are a DMA each."""
RUN_S = 50e-9
"""The time of a DMA in addition to that of its bytes."""
ANY_DIGEST = 1


@dataclass(frozen=True)
class Mark:
    """A place in the work of a rank's stream: all that was launched before has ended by then."""

    time_s: float


AT_ONCE = Mark(0.0)
"""All that comes before it has ended long ago."""


@dataclass(frozen=True)
class Link:
    """One rank's: a lane for each direction, behind the stream that its forwards run on."""

    worker: Clock
    forwards: Stream
    saves: Stream
    loads: Stream

    @classmethod
    def of(cls, worker: Clock, forwards: Stream) -> Link:
        return cls(worker, forwards, Stream(), Stream())

    def lane(self, direction: CopyDirection) -> Stream:
        return self.saves if direction is CopyDirection.SAVE else self.loads


class VirtualCopyEngine:
    """A `CopyEngine`, owned by its rank's worker. Digests are made up."""

    def __init__(self, page_map: PageMap, link: Link, *, plan_limit: int = PLAN_LIMIT) -> None:
        self._page_map = page_map
        self._link = link
        self._plan_limit = plan_limit
        self._bytes = np.array([group.record_bytes for group in page_map.groups], np.int64)
        self._runs = np.array([int((group.length >= STAGED_BYTES).sum()) for group in page_map.groups], np.int64)
        self._tickets = count(1)
        self._under_way: dict[CopyDirection, deque[tuple[float, FinishedCopy]]] = {
            direction: deque() for direction in CopyDirection
        }
        self._is_closed = False
        self._saved_bytes = 0
        self.all_saved_bytes = 0
        """The bytes of all saves that were submitted."""
        self.all_loaded_bytes = 0
        """The bytes of all loads that were submitted."""
        self._waited_s = 0.0

    def take_saved(self) -> int:
        """Bytes of saves that were submitted since the last call."""
        taken, self._saved_bytes = self._saved_bytes, 0
        return taken

    def take_wait(self) -> float:
        """Virtual seconds in `fence` since the last call."""
        taken, self._waited_s = self._waited_s, 0.0
        return taken

    def submit(
        self, direction: CopyDirection, items: CopyItems, *, has_digests: bool = False, after: int | None = None
    ) -> CopyTicket:
        """Behind the forward that was launched last."""
        if self._is_closed or sum(map(len, self._under_way.values())) >= self._plan_limit:
            raise NativeError("a copy was not taken: too many are under way")
        size_bytes = int(self._bytes[items.group].sum())
        seconds = PLAN_S + size_bytes / LINK_RATE + int(self._runs[items.group].sum()) * RUN_S
        behind_s = after.time_s if isinstance(after, Mark) else self._link.forwards.free_s
        begin_s = max(self._link.worker.now_s, behind_s)
        end_s = self._link.lane(direction).run(seconds, not_before_s=begin_s)
        ticket = next(self._tickets)
        digests = np.full((len(items), 2), ANY_DIGEST, np.uint64) if has_digests else None
        finished = FinishedCopy(ticket=ticket, fault="", digests=digests, copied_s=seconds)
        self._under_way[direction].append((end_s, finished))
        if direction is CopyDirection.SAVE:
            self._saved_bytes += size_bytes
            self.all_saved_bytes += size_bytes
        else:
            self.all_loaded_bytes += size_bytes
        return ticket

    def mark(self) -> Mark:
        """Copies that come after it do not wait for what is launched from now on."""
        return Mark(self._link.forwards.free_s)

    def poll(self) -> list[FinishedCopy]:
        found = []
        for lane in self._under_way.values():
            while lane and lane[0][0] <= self._link.worker.now_s:
                found.append(lane.popleft()[1])
        return found

    def fence(self, timeout_s: float) -> bool:
        """The worker's clock goes on until the last plan has ended."""
        worker = self._link.worker
        end_s = max((lane[-1][0] for lane in self._under_way.values() if lane), default=worker.now_s)
        self._wait(min(end_s, worker.now_s + timeout_s))
        return end_s <= worker.now_s

    def wait(self, tickets: Collection[CopyTicket]) -> None:
        """The worker's clock goes on until these plans have ended."""
        ends = [end_s for lane in self._under_way.values() for end_s, one in lane if one.ticket in tickets]
        self._wait(max(ends, default=0.0))

    def _wait(self, until_s: float) -> None:
        worker, begun_s = self._link.worker, self._link.worker.now_s
        worker.reach(until_s)
        self._waited_s += worker.now_s - begun_s

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self.fence(timeout_s)
        self._is_closed = True
