"""Virtual copies take the link's time, in their stream's order, behind the forward that was launched before them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benchmarks.ground.virtual_copy import LINK_RATE, PLAN_S, Link, VirtualCopyEngine
from benchmarks.ground.virtual_time import Clock, Stream
from kvoffload.errors import NativeError
from kvoffload.kvspec import PageMap
from kvoffload.kvspec.page_map import GroupPages
from kvoffload.transfer import CopyDirection, CopyItems

RECORD = 640 << 10
RUNS = 80
SECONDS = PLAN_S + RECORD / LINK_RATE


@pytest.fixture
def link() -> Link:
    return Link.of(Clock(), Stream())


@pytest.fixture
def engine(link: Link) -> VirtualCopyEngine:
    return VirtualCopyEngine(page_map(), link)


def page_map() -> PageMap:
    """Makes the page map of a group with 80 runs of 8 KiB."""
    numbers = np.arange(RUNS, dtype=np.int64)
    length = np.full(RUNS, RECORD // RUNS, np.int64)
    pages = GroupPages(
        name="g",
        record_bytes=RECORD,
        parts=(),
        allocation=np.zeros(RUNS, np.int64),
        base=numbers * (1 << 30),
        stride=length,
        length=length,
        record_offset=numbers * (RECORD // RUNS),
    )
    return PageMap(num_blocks=10, null_block=0, allocations=(), groups=(pages,))


def items(count: int = 1) -> CopyItems:
    return CopyItems(group=np.zeros(count, np.int64), block=np.arange(1, count + 1), slot=np.arange(count))


def ended(engine: VirtualCopyEngine, link: Link, at_s: float) -> int:
    link.worker.reach(at_s)
    return len(engine.poll())


def test_a_copy_ends_behind_its_forward_and_the_links_time(engine: VirtualCopyEngine, link: Link) -> None:
    link.forwards.run(0.5, not_before_s=0.0)
    engine.submit(CopyDirection.SAVE, items())
    assert ended(engine, link, 0.5 + SECONDS - 1e-9) == 0
    assert ended(engine, link, 0.5 + SECONDS) == 1


def test_a_copy_after_a_mark_goes_on_beside_the_next_forward(engine: VirtualCopyEngine, link: Link) -> None:
    link.forwards.run(0.1, not_before_s=0.0)
    mark = engine.mark()
    link.forwards.run(0.5, not_before_s=0.0)
    engine.submit(CopyDirection.LOAD, items(), after=mark)
    assert ended(engine, link, 0.1 + SECONDS) == 1


def test_copies_of_one_direction_follow_each_other_and_directions_do_not_wait(
    engine: VirtualCopyEngine, link: Link
) -> None:
    for direction in (CopyDirection.SAVE, CopyDirection.SAVE, CopyDirection.LOAD):
        engine.submit(direction, items())
    assert ended(engine, link, SECONDS) == 2
    assert ended(engine, link, 2 * SECONDS) == 1


def test_a_fence_is_a_wait_of_the_workers_thread(engine: VirtualCopyEngine, link: Link) -> None:
    engine.submit(CopyDirection.SAVE, items(4), has_digests=True)
    assert not engine.fence(1e-6)
    assert engine.fence(1.0)
    assert engine.take_wait() == pytest.approx(PLAN_S + 4 * RECORD / LINK_RATE)
    assert engine.take_wait() == 0
    assert engine.take_saved() == 4 * RECORD
    (finished,) = engine.poll()
    assert finished.digests is not None
    assert finished.digests.shape == (4, 2)


def test_a_wait_for_some_plans_leaves_those_behind_them(engine: VirtualCopyEngine, link: Link) -> None:
    first, _ = (engine.submit(CopyDirection.SAVE, items()) for _ in range(2))
    engine.wait({first})
    assert engine.take_wait() == link.worker.now_s == SECONDS
    assert [one.ticket for one in engine.poll()] == [first]
    engine.wait({first})
    assert engine.take_wait() == 0


def test_there_is_no_room_for_more_plans_than_a_real_engine_takes(link: Link) -> None:
    engine = VirtualCopyEngine(page_map(), link, plan_limit=2)
    for _ in range(2):
        engine.submit(CopyDirection.SAVE, items())
    with pytest.raises(NativeError, match="not taken"):
        engine.submit(CopyDirection.LOAD, items())
