"""The cache's memory as the driver knows it: registered from its beginning as it becomes ready, and taken back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvoffload.cache import SegmentMap
from kvoffload.connector.cache_client import CopyPlaces
from kvoffload.transfer.cuda_engine import HostRegistration
from kvoffload.units import format_size

logger = logging.getLogger(__name__)

START_WAIT_S = 1.0
"""How long an engine's start waits at most for the first segment. All else is registered beside the engine's steps."""

Places = tuple[tuple[int, int], ...]


@runtime_checkable
class RegisteringEngine(Protocol):
    """What is wanted of a copy engine here; engines whose copies need no registration do not have it."""

    @property
    def registration(self) -> HostRegistration: ...
    def add_host_range(self, address: int, size_bytes: int) -> None: ...
    def remove_host_range(self, address: int, size_bytes: int) -> None: ...
    def wait_registered(self, size_bytes: int, timeout_s: float) -> None: ...


@dataclass
class _Memory:
    """One memory of a server; the map keeps it where it is."""

    segments: SegmentMap
    waiting: list[tuple[int, int]]
    """Ranges that the driver has not been told of, the next one last."""
    told: list[tuple[int, int]] = field(default_factory=list)
    told_bytes: int = 0


class HostMemory:
    """Owned by the worker's thread, which asks it in each step; the engine registers in a thread of its own.

    Slots in memory that is not registered are copied all the same, by way of a pinned buffer.
    """

    def __init__(
        self, engine: RegisteringEngine, cache: CopyPlaces, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._clock = clock
        self._places: Places = ()
        self._memories: dict[int, _Memory] = {}
        self._growing: list[int] = []
        """Memories that have more to tell of, or will have."""
        self._leaving: list[SegmentMap] = []
        self._begun_s: float | None = None
        """When what is being registered began to be; None: nothing is."""
        self._problem = ""

    def update(self, places: Places) -> None:
        """Tells the driver what is new since the last call, and waits for nothing. `places`: the worker's, now.

        KVOffloadError: the engine takes no memory.
        """
        if places != self._places:
            self._follow(places)
        if self._growing:
            self._growing = [memory_id for memory_id in self._growing if self._grow(memory_id)]
        if self._begun_s is not None or self._leaving:
            self._look(self._engine.registration)

    def wait_for_first(self) -> None:
        """Until a segment is registered, for `START_WAIT_S` at most: a server may have none ready yet."""
        first = [memory.told[0][1] for memory in self._memories.values() if memory.told]
        if first:
            self._engine.wait_registered(min(first), START_WAIT_S)
            self._look(self._engine.registration)

    def _follow(self, places: Places) -> None:
        present = {memory_id for memory_id, _ in places}
        for memory_id in self._memories.keys() - present:
            self._remove(self._memories.pop(memory_id))
        for memory_id in sorted(present - self._memories.keys()):
            try:
                segments = self._cache.memory(memory_id)
            except ValueError:
                continue  # it has gone since `places` was read
            self._memories[memory_id] = _Memory(segments, segments.ranges()[::-1])
            self._growing.append(memory_id)
        self._places = places

    def _grow(self, memory_id: int) -> bool:
        """Whether there is more to come."""
        memory = self._memories.get(memory_id)
        if memory is None:
            return False
        try:
            ready_bytes = self._cache.ready_bytes(memory_id)
        except ValueError:
            return True  # it has gone, which `places` is about to say
        while memory.waiting and memory.told_bytes + memory.waiting[-1][1] <= ready_bytes:
            address, size_bytes = memory.waiting[-1]
            self._engine.add_host_range(address, size_bytes)
            memory.told.append(memory.waiting.pop())
            memory.told_bytes += size_bytes
            if self._begun_s is None:
                self._begun_s = self._clock()
                logger.debug("memory %d is being registered with the driver", memory_id)
        return bool(memory.waiting)

    def _remove(self, memory: _Memory) -> None:
        for address, size_bytes in memory.told:
            self._engine.remove_host_range(address, size_bytes)
        if memory.told:
            self._leaving.append(memory.segments)

    def _look(self, registration: HostRegistration) -> None:
        if self._leaving and not registration.is_leaving:
            self._leaving.clear()
            logger.debug("a former server's memory is no longer registered")
        if self._begun_s is not None and registration.is_done:
            logger.debug(
                "%s of %s are registered with the driver, after %.1f s",
                format_size(registration.registered_bytes),
                format_size(registration.asked_bytes),
                self._clock() - self._begun_s,
            )
            self._begun_s = None
        if registration.problem != self._problem:
            self._problem = registration.problem
            logger.warning("blocks in part of the cache's memory are copied more slowly: %s", self._problem)
