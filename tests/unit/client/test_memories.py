"""Memories: one is the present one, others stay while they are used."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.cache import Ask, LocalCache
from kvoffload.client.joining import HeldMemory
from kvoffload.client.memories import MAX_FORMER, MappedBlocks, SharedMemory, name_memory
from tests.kit.cache.cache_model import SMALL
from tests.kit.client.fake_wire import NO_FILE, FakeMemory, make_memories


def held(memory: int, *, boot_id: int = 1, session: int = 1) -> HeldMemory:
    return HeldMemory(
        boot_id=boot_id,
        session=session,
        lock=NO_FILE + memory,
        index=memory,
        index_bytes=1,
        segments=(NO_FILE + memory + 1,),
        segment_sizes=(1,),
    )


def test_memory_that_is_mapped_already_stays_and_is_the_new_servers() -> None:
    memories = make_memories()
    assert memories.take(held(1))
    first = memories.current
    assert isinstance(first, FakeMemory)
    assert not memories.take(held(1, boot_id=2, session=9))
    assert memories.current is first
    assert not first.is_closed
    assert (first.held.boot_id, first.held.session, first.held.lock) == (2, 9, NO_FILE + 1)


def test_places_are_the_sessions_of_every_memory_that_is_kept() -> None:
    memories = make_memories()
    assert memories.places() == ()
    memories.take(held(1, session=3))
    memories.hold(1)
    memories.take(held(1, boot_id=2, session=9))
    memories.take(held(2, session=4))
    assert memories.places() == ((1, 3), (1, 9), (2, 4))
    memories.let_go(1)
    assert memories.places() == ((2, 4),)


def test_former_memory_goes_when_nothing_in_it_is_held() -> None:
    memories = make_memories()
    memories.take(held(1))
    former = memories.current
    assert isinstance(former, FakeMemory)
    memories.hold(1)
    memories.hold(1)
    memories.take(held(2))
    assert memories.find(1) is former
    memories.let_go(1)
    assert not former.is_closed
    memories.let_go(1)
    assert former.is_closed
    assert memories.find(1) is None
    memories.let_go(1)
    assert memories.find(2) is memories.current


def test_unused_memory_goes_at_once() -> None:
    memories = make_memories()
    memories.take(held(1))
    former = memories.current
    assert isinstance(former, FakeMemory)
    memories.take(held(2))
    assert former.is_closed


def test_a_worker_keeps_former_memory_until_it_is_told() -> None:
    memories = make_memories(keeps_former=True)
    for number in range(1, MAX_FORMER + 2):
        memories.take(held(number))
    assert len(memories) == MAX_FORMER + 1
    memories.take(held(9))
    assert (memories.find(1), len(memories)) == (None, MAX_FORMER + 1)
    memories.retire(2)
    assert memories.find(2) is None
    memories.retire(9)
    assert memories.find(9) is not None  # the present one is not retired


def test_the_end_closes_all() -> None:
    memories = make_memories(keeps_former=True)
    memories.take(held(1))
    memories.take(held(2))
    every = [memories.find(1), memories.find(2)]
    memories.close()
    assert all(isinstance(memory, FakeMemory) and memory.is_closed for memory in every)
    assert (memories.current, len(memories)) == (None, 0)


def test_a_caches_memory_is_mapped_from_its_descriptors() -> None:
    with LocalCache.create(SMALL) as cache:
        files = cache.files
        sizes = tuple(os.fstat(file).st_size for file in files.segments)
        segments = tuple(os.dup(file) for file in files.segments)
        memory = HeldMemory(
            boot_id=1,
            session=1,
            lock=os.open(os.devnull, os.O_RDONLY),
            index=cache.open_index(),
            index_bytes=1,
            segments=segments,
            segment_sizes=sizes,
        )
        mapped = SharedMemory(memory)
        assert mapped.memory_id == name_memory(memory) == os.fstat(files.index).st_ino
        assert mapped.segments.size_bytes == SMALL.memory_bytes
        assert not mapped.index.lookup(0, 0, bytes(32)).any()
        mapped.close()
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(segments[0])


def test_what_is_no_memory_is_closed() -> None:
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    memory = HeldMemory(
        boot_id=1, session=1, lock=files[0], index=files[1], index_bytes=1, segments=(files[2],), segment_sizes=(1,)
    )
    with pytest.raises(ValueError, match="index"):
        SharedMemory(memory)
    for file in files:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(file)


def test_what_is_mapped_is_told_until_the_last_has_let_go() -> None:
    memories = make_memories(keeps_former=True)
    assert memories.list_mapped() == ()
    memories.take(held(1))
    former = memories.current
    assert isinstance(former, FakeMemory)
    assert memories.list_mapped() == ()
    assert memories.list_mapped(is_current_former=True) == ((1, 100),)
    memories.take(held(2))
    assert memories.list_mapped() == ((1, 100),)
    former.is_mapped = True  # a copy still runs
    memories.retire_unused(1)
    assert memories.find(1) is None
    assert memories.list_mapped() == ((1, 100),)
    former.is_mapped = False
    assert memories.list_mapped() == ()


def test_memory_in_use_and_the_present_one_are_not_let_go_of_because_somebody_asks() -> None:
    memories = make_memories()
    memories.take(held(1))
    memories.hold(1)
    memories.take(held(2))
    for memory_id in (1, 2, 3):
        memories.retire_unused(memory_id)
    assert memories.list_mapped() == ((1, 100),)
    assert memories.current is memories.find(2)


def test_real_memory_says_whether_it_is_still_mapped() -> None:
    with LocalCache.create(SMALL) as cache:
        files = cache.files
        shared = SharedMemory(
            HeldMemory(
                boot_id=1,
                session=1,
                lock=os.dup(files.lock),
                index=os.dup(files.index),
                index_bytes=0,
                segments=tuple(os.dup(file) for file in files.segments),
                segment_sizes=(SMALL.segment_bytes,) * 2,
            )
        )
        assert shared.ready_bytes == SMALL.memory_bytes
        is_mapped, segments = shared.watch(), shared.segments
        shared.close()
        del shared
        assert is_mapped()
        del segments
        assert not is_mapped()


class NumberedIndex:
    """An index of blocks whose hashes are their numbers; it counts how often it is asked for one."""

    def __init__(self, present: npt.NDArray[np.bool_]) -> None:
        self.present = present
        self.asked = 0

    def lookup(self, _name_space: int, group: int, hashes: bytes) -> npt.NDArray[np.bool_]:
        assert group == 0
        numbers = np.frombuffer(hashes, "<u8").reshape(-1, 4)[:, 0]
        self.asked += len(numbers)
        return self.present[numbers]


BLOCKS = 5000


def estimate(present: npt.NDArray[np.bool_], **asked: Any) -> tuple[int, int]:
    """Returns the boundary, in blocks of 16 tokens, and how many blocks were looked at."""
    memories = make_memories()
    blocks = MappedBlocks(memories, groups=1)
    numbers = np.zeros((BLOCKS, 4), "<u8")
    numbers[:, 0] = np.arange(BLOCKS)
    index = NumberedIndex(present)
    memory: Any = SimpleNamespace(index=index, memory_id=1)
    memories.mapped = memory, 0
    found = blocks.estimate_boundary(Ask(numbers.tobytes(), **asked), block_tokens=16)
    assert found % 16 == 0
    return found // 16, index.asked


@pytest.mark.parametrize("there", [0, 1, 127, 128, 129, 2500, BLOCKS - 1, BLOCKS])
def test_a_long_prefix_is_found_by_a_sample(there: int) -> None:
    present = np.arange(BLOCKS) < there
    found, asked = estimate(present)
    assert found == there
    assert asked < 200
    assert estimate(present, local=16 * 1000)[0] == max(there, 1000)
    assert estimate(present, limit=16 * 3000 + 5)[0] == min(there, 3000)
    assert estimate(present, alignment=64)[0] == there // 4 * 4
    assert estimate(present, local=16 * BLOCKS)[0] == BLOCKS
    assert estimate(present, limit=0)[0] == 0


def test_a_hole_makes_the_estimate_too_long_but_never_too_short() -> None:
    for hole in (3, 128, 700):
        present = np.ones(BLOCKS, np.bool_)
        present[hole] = False
        found, _ = estimate(present)
        assert found in (hole, BLOCKS)
