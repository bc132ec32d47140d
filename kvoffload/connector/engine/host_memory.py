"""Registers the cache's memory with the driver, from its beginning as it becomes ready, and unregisters it: all of it
with its server, its end when the server gives that back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvoffload.cache import SegmentMap
from kvoffload.client import Client
from kvoffload.errors import KVOffloadError
from kvoffload.transfer.cuda_engine import HostRegistration
from kvoffload.units import describe_size

logger = logging.getLogger(__name__)

START_WAIT_S = 1.0
"""How long an engine's start waits for the first segment, in seconds. The others are registered while it steps."""

BUSY_WAIT_S = 0.02
"""Seconds between two looks while memory is growing, being registered, or being unregistered."""
IDLE_WAIT_S = 0.5
"""Seconds between two looks when all memory is registered; `wake` brings the next look forward."""
CLOSE_WAIT_S = 5.0
"""How long the engine's end waits for the thread, in seconds. No look waits, so the thread should end at once."""

Places = tuple[tuple[int, int], ...]


@runtime_checkable
class RegisteringEngine(Protocol):
    """The methods of a copy engine that registers memory; engines whose copies need no registration lack them."""

    @property
    def registration(self) -> HostRegistration: ...
    def add_host_range(self, address: int, size_bytes: int) -> None: ...
    def remove_host_range(self, address: int, size_bytes: int) -> None: ...
    def wait_registered(self, size_bytes: int, timeout_s: float) -> None: ...


@dataclass
class _Memory:
    """One memory of a server. The map keeps it at its address."""

    segments: SegmentMap
    waiting: list[tuple[int, int]]
    """Ranges that the driver has not been told of, the next one last."""
    told: list[tuple[int, int]] = field(default_factory=list)
    told_bytes: int = 0


class HostMemory:
    """Looks for memory that has become ready, on a thread of its own, and hands it to the copy engine, which registers
    it piece by piece on another thread: no step waits for either. Any thread may call `wait_for_first`, `wake` and
    `close`.

    Slots in memory that is not registered are copied too, by way of a pinned buffer, so a fault here ends nothing but
    the registration. It is logged, and refused memory is tried again.
    """

    def __init__(
        self,
        engine: RegisteringEngine,
        cache: Client,
        *,
        clock: Callable[[], float] = time.monotonic,
        idle_wait_s: float = IDLE_WAIT_S,
    ) -> None:
        self._engine = engine
        self._cache = self._followed = cache
        self._clock = clock
        self._idle_wait_s = idle_wait_s
        self._places: Places = ()
        self._memories: dict[int, _Memory] = {}
        self._growing: list[int] = []
        """Memories with ranges that the driver has not been told of."""
        self._leaving: list[SegmentMap] = []
        self._unpinning: list[tuple[int, int]] = []
        """(memory, segment) of segments that are being unregistered because the server gives them back."""
        self._begun_s: float | None = None
        """When the present registration began; None: none is under way."""
        self._tenths = 0
        """Tenths of the memory that the log has last reported as registered."""
        self._problem = ""
        self._refusal = ""
        self._wakes = threading.Event()
        self._has_looked = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvoffload-host-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops registering. Called before the copy engine is closed, which unregisters all memory."""
        self._is_closing = True
        self._wakes.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_WAIT_S)

    def follow(self, cache: Client) -> None:
        """Registers another client's memory from now on, and unregisters the former client's."""
        self._cache = cache
        self._wakes.set()

    def wake(self) -> None:
        """Makes the thread look now, because there is a new memory, or a former one was retired."""
        self._wakes.set()

    def wait_for_first(self) -> None:
        """Waits until a segment is registered, for `START_WAIT_S` at most: a server may have none ready yet."""
        end_s = time.monotonic() + START_WAIT_S
        self._has_looked.wait(START_WAIT_S)
        first = [memory.told[0][1] for memory in list(self._memories.values()) if memory.told]
        if first:
            self._engine.wait_registered(min(first), max(end_s - time.monotonic(), 0.0))

    def update(self, places: Places) -> None:
        """Hands the copy engine all memory that is new since the last call, without waiting. `places` are the worker's
        present ones.

        KVOffloadError: the engine takes no memory.
        """
        if self._followed is not self._cache:
            # Another client has memories with the same numbers at other addresses.
            self._follow(())
            self._followed = self._cache
        if places != self._places:
            self._follow(places)
        for memory_id in self._memories:
            self._shrink(memory_id)
        if self._growing:
            self._growing = [memory_id for memory_id in self._growing if self._grow(memory_id)]
        if self._begun_s is not None or self._leaving or self._unpinning:
            self._look(self._engine.registration)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._update_once()
                self._has_looked.set()
                is_busy = self._growing or self._leaving or self._unpinning or self._begun_s is not None
                self._wakes.wait(BUSY_WAIT_S if is_busy and not self._refusal else self._idle_wait_s)
                self._wakes.clear()
        except Exception:
            # Memory that is not registered by now is copied through the pinned buffer as long as the engine lives.
            logger.exception("no more of the cache's memory is registered")
        finally:
            self._has_looked.set()

    def _update_once(self) -> None:
        """Updates once, also with memory that the engine refused before; the same refusal is logged only once."""
        try:
            self.update(self._cache.places())
            self._refusal = ""
        except KVOffloadError as fault:
            if str(fault) != self._refusal:
                logger.warning("the cache's memory is not registered: %s", fault)
            self._refusal = str(fault)

    def _follow(self, places: Places) -> None:
        present = {memory_id for memory_id, _ in places}
        for memory_id in self._memories.keys() - present:
            self._remove(self._memories.pop(memory_id))
        for memory_id in sorted(present - self._memories.keys()):
            try:
                segments = self._followed.memory(memory_id)
            except ValueError:
                continue  # it has gone since `places` was read
            self._memories[memory_id] = _Memory(segments, segments.ranges()[::-1])
            self._growing.append(memory_id)
        self._places = places

    def _grow(self, memory_id: int) -> bool:
        """Hands the copy engine a memory's new ranges. Returns whether there are more to come."""
        memory = self._memories.get(memory_id)
        if memory is None:
            return False
        if self._unpinning:
            return True  # one of these may be ready again
        try:
            ready_bytes = self._followed.ready_bytes(memory_id)
        except ValueError:
            return True  # it has gone, which the next `places` will show
        while memory.waiting and memory.told_bytes + memory.waiting[-1][1] <= ready_bytes:
            address, size_bytes = memory.waiting[-1]
            if not self._pin(memory_id, len(memory.told), memory.told_bytes + size_bytes):
                return True
            self._engine.add_host_range(address, size_bytes)
            memory.told.append(memory.waiting.pop())
            memory.told_bytes += size_bytes
            if self._begun_s is None:
                self._begun_s = self._clock()
                self._tenths = 0
                logger.debug("memory %d is being registered with the driver", memory_id)
        return bool(memory.waiting)

    def _pin(self, memory_id: int, segment: int, end_bytes: int) -> bool:
        """Marks a segment as pinned. False: the server has given it back meanwhile. The ready bytes are read after the
        mark was made, and the server looks for marks after it has lowered the ready bytes."""
        try:
            self._followed.mark_pinned(memory_id, segment, True)
            if self._followed.ready_bytes(memory_id) >= end_bytes:
                return True
            self._followed.mark_pinned(memory_id, segment, False)
        except ValueError:
            pass  # it has gone, which the next `places` will show
        return False

    def _shrink(self, memory_id: int) -> None:
        """Makes the copy engine unregister the segments that are not ready any more."""
        memory = self._memories[memory_id]
        try:
            ready_bytes = self._followed.ready_bytes(memory_id)
        except ValueError:
            return
        while memory.told and memory.told_bytes > ready_bytes:
            address, size_bytes = memory.told.pop()
            self._engine.remove_host_range(address, size_bytes)
            memory.waiting.append((address, size_bytes))
            memory.told_bytes -= size_bytes
            self._unpinning.append((memory_id, len(memory.told)))
            if memory_id not in self._growing:
                self._growing.append(memory_id)

    def _remove(self, memory: _Memory) -> None:
        for address, size_bytes in memory.told:
            self._engine.remove_host_range(address, size_bytes)
        if memory.told:
            self._leaving.append(memory.segments)

    def _look(self, registration: HostRegistration) -> None:
        if self._leaving and not registration.is_leaving:
            self._leaving.clear()
            logger.debug("a former server's memory is no longer registered")
        if self._unpinning and not registration.is_leaving:
            self._unpin()
        if self._begun_s is not None and registration.is_done:
            logger.debug(
                "%s of %s are registered with the driver, after %.1f s",
                describe_size(registration.registered_bytes),
                describe_size(registration.asked_bytes),
                self._clock() - self._begun_s,
            )
            self._begun_s = None
        elif self._begun_s is not None:
            self._tell_progress(registration.registered_bytes)
        if registration.problem != self._problem:
            self._problem = registration.problem
            logger.warning("blocks in part of the cache's memory are copied more slowly: %s", self._problem)

    def _unpin(self) -> None:
        for memory_id, segment in self._unpinning:
            with contextlib.suppress(ValueError):
                self._followed.mark_pinned(memory_id, segment, False)
        logger.debug("%d segments that the server gives back are no longer registered", len(self._unpinning))
        self._unpinning.clear()

    def _tell_progress(self, registered_bytes: int) -> None:
        """Logs progress at each tenth of the memories' full size."""
        whole_bytes = sum(memory.segments.size_bytes for memory in self._memories.values())
        tenths = 10 * registered_bytes // whole_bytes if whole_bytes else 0
        if tenths > self._tenths:
            self._tenths = tenths
            logger.debug(
                "%s of %s are registered with the driver", describe_size(registered_bytes), describe_size(whole_bytes)
            )
