"""The memory of servers, as mapped by this process: the present one, whose index can be read, and former ones."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import Ask, IndexReader, Placed, SegmentMap
from kvoffload.client.joining import HeldMemory
from kvoffload.hash_rows import as_rows, count_hashes
from kvoffload.packets import close_all

MAX_FORMER = 2
"""The most former memories kept by a process that cannot know whether they are in use. The oldest goes first."""
ROOM_SHARE = 32
"""A pool has room while more than one part in so many of it has never been given out. Rounding and holes take less."""
_SAMPLE_STEP = 128


class SharedMemory:
    """All of a server's memory, mapped. It goes with the last reference, views of slots included."""

    def __init__(self, held: HeldMemory) -> None:
        """Maps the memory behind the descriptors, and takes them. RuntimeError, ValueError: they are not a cache's
        memory. OSError: it cannot be mapped."""
        self.held = held
        self.memory_id = name_memory(held)
        self.sessions = {held.memory_session}
        """The memory's sessions to which this process belongs or belonged: they wait for its exit."""
        try:
            self.index = IndexReader(os.dup(held.index))
            self.segments = SegmentMap([os.dup(file) for file in held.segments], held.segment_sizes[0])
            # Each process has opened the index for itself. A server that takes the memory over sees by this that the
            # process lives.
            self.segments.keep(os.dup(held.index))
        except BaseException:
            self.close()
            raise

    @property
    def ready_bytes(self) -> int:
        """Number of the memory's bytes that have their pages."""
        return self.index.ready_bytes

    def watch(self) -> Callable[[], bool]:
        """Returns a check whether anything in this process still has the memory mapped. The check keeps none of it."""
        segments = weakref.ref(self.segments)
        return lambda: segments() is not None

    def join(self, held: HeldMemory) -> None:
        """A server handed over the same memory, for a session of its own. Takes the descriptors."""
        if held.memory_session in self.sessions:
            os.close(held.index)
        else:
            self.segments.keep(held.index)
            self.sessions.add(held.memory_session)
        close_all((held.lock, *held.segments))
        self.held = replace(self.held, boot_id=held.boot_id, session=held.session)

    def close(self) -> None:
        """Closes the descriptors. The maps stay valid for those that use them."""
        close_all((self.held.lock, self.held.index, *self.held.segments))


def name_memory(held: HeldMemory) -> int:
    """Returns a number that is the same in all processes of a machine that have this memory, whichever server handed it
    over."""
    return os.fstat(held.index).st_ino


class Memories:
    """The present memory and the former ones. The caller holds the link's lock; any thread may read `current`.

    A former memory stays while this process holds leases or slots in it. With `keeps_former` it stays until `retire` as
    well: a worker does not know what its scheduler holds.
    """

    def __init__(
        self,
        *,
        keeps_former: bool,
        open_memory: Callable[[HeldMemory], SharedMemory] = SharedMemory,
        name: Callable[[HeldMemory], int] = name_memory,
    ) -> None:
        self._keeps_former = keeps_former
        self._open = open_memory
        self._name = name
        self._by_id: dict[int, SharedMemory] = {}
        self._held: dict[int, int] = {}
        self._leaving: dict[int, tuple[int, Callable[[], bool]]] = {}
        """Dropped memories that may still be mapped: copies use them, or the driver knows them. The bytes of each, and
        a check whether it is mapped."""
        self.current: SharedMemory | None = None
        self.mapped: tuple[SharedMemory, int] | None = None
        """The memory in which look-ups search, with the namespace in it. The link sets it once the server has
        registered this process's blocks."""

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, memory_id: int) -> SharedMemory | None:
        return self._by_id.get(memory_id)

    def places(self) -> tuple[tuple[int, int], ...]:
        """Returns the (memory, session) pairs in which this process may copy; a server waits for its exit for their
        sake."""
        # A copy of the values first: other threads read this while the owner changes it.
        return tuple(
            (memory.memory_id, session) for memory in list(self._by_id.values()) for session in sorted(memory.sessions)
        )

    def list_mapped(self, *, is_current_former: bool = False) -> tuple[tuple[int, int], ...]:
        """Returns (memory, bytes) of former ones of which this process has pages; and of the present one, if a server
        is about to say whether it is its own."""
        self._leaving = {one: left for one, left in self._leaving.items() if left[1]()}
        found = {one: size_bytes for one, (size_bytes, _) in self._leaving.items()}
        for memory in self._by_id.values():
            if is_current_former or memory is not self.current:
                found[memory.memory_id] = memory.ready_bytes
        return tuple(sorted(found.items()))

    def take(self, held: HeldMemory) -> bool:
        """Makes the memory that a server handed over the present one. False: it was so before. Takes the descriptors;
        its errors are those of `SharedMemory`."""
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
        """Counts leases or slots in a memory that this process has been given."""
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
        """Drops a former memory that no process of the engine uses any more."""
        memory = self._by_id.get(memory_id)
        if memory is not None and memory is not self.current:
            self._drop(memory)

    def retire_unused(self, memory_id: int) -> None:
        """Does the same, unless this process itself holds something in it."""
        if memory_id not in self._held:
            self.retire(memory_id)

    def close(self) -> None:
        for memory in list(self._by_id.values()):
            self._drop(memory)
        self.current = self.mapped = None

    def _drop_unused(self) -> None:
        former = [memory for memory in self._by_id.values() if memory is not self.current]
        unused = [memory for memory in former if memory.memory_id not in self._held]
        spared = MAX_FORMER if self._keeps_former else 0
        for memory in unused[: max(len(former) - spared, 0)]:
            self._drop(memory)

    def _drop(self, memory: SharedMemory) -> None:
        del self._by_id[memory.memory_id]
        self._held.pop(memory.memory_id, None)
        self._leaving[memory.memory_id] = memory.ready_bytes, memory.watch()
        memory.close()


class MappedBlocks:
    """Look-ups in the present memory, without a call to the server, from any thread. An observer finds nothing."""

    def __init__(self, memories: Memories, *, groups: int) -> None:
        self._memories = memories
        self._groups = groups

    @property
    def memory_id(self) -> int:
        mapped = self._memories.mapped
        return 0 if mapped is None else mapped[0].memory_id

    @property
    def session(self) -> int:
        """The engine's session, as numbered within the memory. New leases and slots belong to it."""
        mapped = self._memories.mapped
        return 0 if mapped is None else mapped[0].held.memory_session

    def memory(self, memory_id: int) -> SegmentMap:
        return self._find_memory(memory_id).segments

    def ready_bytes(self, memory_id: int) -> int:
        """Returns how many bytes from that memory's beginning have their pages and may be touched. It shrinks
        where the server gives memory back."""
        return self._find_memory(memory_id).index.ready_bytes

    def mark_pinned(self, memory_id: int, segment: int, is_pinned: bool) -> None:
        """Marks a segment before a driver pins it, or takes the mark away when it is unpinned: see `IndexReader`."""
        self._find_memory(memory_id).index.mark_pinned(segment, is_pinned)

    def places(self) -> tuple[tuple[int, int], ...]:
        """Returns all (memory, session) pairs that `may_copy` accepts."""
        return self._memories.places()

    def may_copy(self, held: Placed) -> bool:
        found = self._memories.find(held.memory_id)
        return found is not None and held.session in found.sessions

    def lookup(self, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        self.check_group(group)
        mapped = self._memories.mapped
        if mapped is None:
            return np.zeros(count_hashes(hashes), np.bool_)
        memory, name_space = mapped
        return memory.index.lookup(name_space, group, hashes)

    def find_boundary(self, ask: Ask) -> int:
        mapped = self._memories.mapped
        if mapped is None:
            return ask.local
        memory, name_space = mapped
        return memory.index.find_boundary(name_space, ask)

    def estimate_boundary(self, ask: Ask, *, block_tokens: int) -> int:
        """Returns what `find_boundary` does, or more where single blocks are missing in between. Works only for a chain
        of full attention, in blocks of `block_tokens`, each with a hash of its own. It looks at one block in
        `_SAMPLE_STEP`, and at each of those around the first that is missing."""
        rows = as_rows(ask.chain)
        first, end = ask.local // block_tokens, min(len(rows), ask.limit // block_tokens)
        sample = np.unique(np.r_[np.arange(first, end, _SAMPLE_STEP), max(end - 1, 0)])
        missing = np.flatnonzero(~self.lookup(0, rows[sample].tobytes()))
        if len(missing):
            begin = first if missing[0] == 0 else int(sample[missing[0] - 1])
            around = np.flatnonzero(~self.lookup(0, rows[begin : int(sample[missing[0]]) + 1].tobytes()))
            end = begin + int(around[0]) if len(around) else begin
        return max(end * block_tokens // ask.alignment * ask.alignment, ask.local)

    @property
    def has_room(self) -> bool:
        """Whether part of the pool has never been given out, so that a save there displaces nothing."""
        mapped = self._memories.mapped
        if mapped is None:
            return False
        index = mapped[0].index
        # Memory without pages is no room yet: it may never get them.
        ready_bytes = index.ready_bytes
        return ROOM_SHARE * (ready_bytes - index.used_bytes) > ready_bytes

    def check_group(self, group: int) -> None:
        if not 0 <= group < self._groups:
            raise ValueError(f"there is no group {group}, there are {self._groups}")

    def _find_memory(self, memory_id: int) -> SharedMemory:
        found = self._memories.find(memory_id)
        if found is None:
            raise ValueError(f"memory {memory_id} is not mapped here")
        return found
