"""Memory of servers as this process has it mapped: the present one, and former ones that are still in use."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from kvoffload.cache import IndexReader, SegmentMap
from kvoffload.client.joining import HeldMemory
from kvoffload.packets import close_all

MAX_FORMER = 2
"""Former memories that a process keeps which cannot know whether they are in use. Beyond it the oldest goes."""


class MappedMemory(Protocol):
    """What a link needs of it."""

    memory_id: int
    held: HeldMemory
    sessions: set[int]
    """Of it, that this process is or was of: they wait for its exit."""

    @property
    def ready_bytes(self) -> int:
        """So many of its bytes have their pages."""
        ...

    def watch(self) -> Callable[[], bool]:
        """Makes a check whether anything in this process still has it mapped. The check keeps none of it."""
        ...

    def join(self, held: HeldMemory) -> None:
        """A server handed over the same memory, for a session of its own. Takes the descriptors."""
        ...

    def close(self) -> None: ...


class SharedMemory:
    """All of a server's memory, mapped. It goes with the last reference, views of slots included."""

    def __init__(self, held: HeldMemory) -> None:
        """Takes the descriptors. RuntimeError, ValueError: they are no cache's memory. OSError: it cannot be mapped."""
        self.held = held
        self.memory_id = name_memory(held)
        self.sessions = {held.memory_session}
        try:
            self.index = IndexReader(os.dup(held.index))
            self.segments = SegmentMap([os.dup(file) for file in held.segments], held.segment_sizes[0])
            # It is this process's own, and a server that takes the memory over goes by it.
            self.segments.keep(os.dup(held.index))
        except BaseException:
            self.close()
            raise

    @property
    def ready_bytes(self) -> int:
        return self.index.ready_bytes

    def watch(self) -> Callable[[], bool]:
        segments = weakref.ref(self.segments)
        return lambda: segments() is not None

    def join(self, held: HeldMemory) -> None:
        if held.memory_session in self.sessions:
            os.close(held.index)
        else:
            self.segments.keep(held.index)
            self.sessions.add(held.memory_session)
        close_all((held.lock, *held.segments))
        self.held = replace(self.held, boot_id=held.boot_id, session=held.session)

    def close(self) -> None:
        """The descriptors alone: whoever uses the maps still has them."""
        close_all((self.held.lock, self.held.index, *self.held.segments))


def name_memory(held: HeldMemory) -> int:
    """The same in all processes of a machine that have this memory, whichever server handed it over."""
    return os.fstat(held.index).st_ino


class Memories:
    """Belongs to whoever holds the link's lock; `current` may be read by anybody.

    A former memory stays while leases or slots in it are ours; with `keeps_former`, until `retire` as well: a worker
    does not know what its scheduler holds.
    """

    def __init__(
        self,
        *,
        keeps_former: bool,
        open_memory: Callable[[HeldMemory], MappedMemory] = SharedMemory,
        name: Callable[[HeldMemory], int] = name_memory,
    ) -> None:
        self._keeps_former = keeps_former
        self._open = open_memory
        self._name = name
        self._by_id: dict[int, MappedMemory] = {}
        self._held: dict[int, int] = {}
        self._leaving: dict[int, tuple[int, Callable[[], bool]]] = {}
        """Let go of, and still mapped: copies use it, or the driver knows it. Its bytes, and whether that is so."""
        self.current: MappedMemory | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, memory_id: int) -> MappedMemory | None:
        return self._by_id.get(memory_id)

    def places(self) -> tuple[tuple[int, int], ...]:
        """(memory, session) pairs whose copies this process's exit would be waited for."""
        # A copy of the values first: other threads read this while the owner changes it.
        return tuple(
            (memory.memory_id, session) for memory in list(self._by_id.values()) for session in sorted(memory.sessions)
        )

    def list_mapped(self, *, is_current_former: bool = False) -> tuple[tuple[int, int], ...]:
        """(memory, bytes) of former ones that this process has pages of; and of the present one, if a server is about
        to say whether it is its own."""
        self._leaving = {one: left for one, left in self._leaving.items() if left[1]()}
        found = {one: size_bytes for one, (size_bytes, _) in self._leaving.items()}
        for memory in self._by_id.values():
            if is_current_former or memory is not self.current:
                found[memory.memory_id] = memory.ready_bytes
        return tuple(sorted(found.items()))

    def take(self, held: HeldMemory) -> bool:
        """What a server handed over is the present memory from here on. False: it was so before. Takes the
        descriptors; its errors are those of `SharedMemory`."""
        former = self.current
        if former is not None and former.memory_id == self._name(held):
            former.join(held)
            return False
        self.current = memory = self._open(held)
        self._by_id[memory.memory_id] = memory
        if former is not None:
            self._drop_unused()
        return True

    def hold(self, memory_id: int, count: int = 1) -> None:
        """Leases or slots in it became ours."""
        self._held[memory_id] = self._held.get(memory_id, 0) + count

    def let_go(self, memory_id: int, count: int = 1) -> None:
        left = self._held.get(memory_id, 0) - count
        if left > 0:
            self._held[memory_id] = left
        else:
            self._held.pop(memory_id, None)
            if len(self._by_id) > 1:
                self._drop_unused()

    def retire(self, memory_id: int) -> None:
        """Nobody of the engine uses this former memory any more."""
        memory = self._by_id.get(memory_id)
        if memory is not None and memory is not self.current:
            self._drop(memory)

    def retire_unused(self, memory_id: int) -> None:
        """The same, unless this process itself holds something in it."""
        if memory_id not in self._held:
            self.retire(memory_id)

    def close(self) -> None:
        for memory in list(self._by_id.values()):
            self._drop(memory)
        self.current = None

    def _drop_unused(self) -> None:
        former = [memory for memory in self._by_id.values() if memory is not self.current]
        unused = [memory for memory in former if memory.memory_id not in self._held]
        spared = MAX_FORMER if self._keeps_former else 0
        for memory in unused[: max(len(former) - spared, 0)]:
            self._drop(memory)

    def _drop(self, memory: MappedMemory) -> None:
        del self._by_id[memory.memory_id]
        self._held.pop(memory.memory_id, None)
        self._leaving[memory.memory_id] = memory.ready_bytes, memory.watch()
        memory.close()
