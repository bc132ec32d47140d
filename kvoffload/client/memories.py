"""Memory of servers as this process has it mapped: the present one, whose index can be read, and former ones."""

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
"""Former memories that a process keeps which cannot know whether they are in use. Beyond it the oldest goes."""
ROOM_SHARE = 32
"""A pool has room while more than one part in so many of it was given to nobody: rounding and holes take less."""
_SAMPLE_STEP = 128


class SharedMemory:
    """All of a server's memory, mapped. It goes with the last reference, views of slots included."""

    def __init__(self, held: HeldMemory) -> None:
        """Maps the memory that descriptors are of, and takes them. RuntimeError, ValueError: they are no cache's
        memory. OSError: it cannot be mapped."""
        self.held = held
        self.memory_id = name_memory(held)
        self.sessions = {held.memory_session}
        """Of it, that this process is or was of: they wait for its exit."""
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
        """So many of its bytes have their pages."""
        return self.index.ready_bytes

    def watch(self) -> Callable[[], bool]:
        """Makes a check whether anything in this process still has it mapped. The check keeps none of it."""
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
        """Closes the descriptors alone: whoever uses the maps still has them."""
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
        open_memory: Callable[[HeldMemory], SharedMemory] = SharedMemory,
        name: Callable[[HeldMemory], int] = name_memory,
    ) -> None:
        self._keeps_former = keeps_former
        self._open = open_memory
        self._name = name
        self._by_id: dict[int, SharedMemory] = {}
        self._held: dict[int, int] = {}
        self._leaving: dict[int, tuple[int, Callable[[], bool]]] = {}
        """Let go of, and still mapped: copies use it, or the driver knows it. Its bytes, and whether that is so."""
        self.current: SharedMemory | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, memory_id: int) -> SharedMemory | None:
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

    def _drop(self, memory: SharedMemory) -> None:
        del self._by_id[memory.memory_id]
        self._held.pop(memory.memory_id, None)
        self._leaving[memory.memory_id] = memory.ready_bytes, memory.watch()
        memory.close()


class MappedBlocks:
    """What is known of blocks without asking: look-ups in the present memory, for anybody. An observer sees none."""

    def __init__(self, memories: Memories, *, groups: int) -> None:
        self._memories = memories
        self._groups = groups
        self.mapped: tuple[SharedMemory, int] | None = None
        """The present memory, with the namespace in it; set by whoever holds the client's lock."""

    @property
    def memory_id(self) -> int:
        return 0 if self.mapped is None else self.mapped[0].memory_id

    @property
    def session(self) -> int:
        """The engine's session, by the memory's own count: what new leases and slots belong to."""
        return 0 if self.mapped is None else self.mapped[0].held.memory_session

    def memory(self, memory_id: int) -> SegmentMap:
        return self._find_memory(memory_id).segments

    def ready_bytes(self, memory_id: int) -> int:
        """Of that memory, from its beginning: what has its pages, and may be touched. It never becomes less."""
        return self._find_memory(memory_id).index.ready_bytes

    def places(self) -> tuple[tuple[int, int], ...]:
        """(memory, session) of all that `may_copy` accepts."""
        return self._memories.places()

    def may_copy(self, held: Placed) -> bool:
        found = self._memories.find(held.memory_id)
        return found is not None and held.session in found.sessions

    def lookup(self, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        self.check_group(group)
        mapped = self.mapped
        if mapped is None:
            return np.zeros(count_hashes(hashes), np.bool_)
        memory, name_space = mapped
        return memory.index.lookup(name_space, group, hashes)

    def find_boundary(self, ask: Ask) -> int:
        mapped = self.mapped
        if mapped is None:
            return ask.local
        memory, name_space = mapped
        return memory.index.find_boundary(name_space, ask)

    def estimate_boundary(self, ask: Ask, *, block_tokens: int) -> int:
        """Returns what `find_boundary` does, or more where single blocks are missing in between. It is for a chain of
        full attention alone, in blocks of so many tokens, each with a hash of its own. One block in `_SAMPLE_STEP` is
        looked at, and each of those around the first that is missing."""
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
        """Part of the pool was given to nobody yet: what is saved there displaces nothing."""
        mapped = self.mapped
        if mapped is None:
            return False
        index = mapped[0].index
        # What is still to come is no room yet: it may not come at all.
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
