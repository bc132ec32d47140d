from __future__ import annotations

import select

from kvoffload.cache import CacheGeometry
from kvoffload.peers import PeerSpace
from kvoffload.peers.loop_queue import (
    MAX_BLOCKS,
    REMOVED_BLOCKS,
    TAKEN_BLOCKS,
    LoopQueue,
    PutBlocks,
    RemovedBlocks,
    WantedBlocks,
)
from tests.kit.cache.cache_model import PLAIN

SPACE = PeerSpace(number=1, fingerprint=b"F" * 32, geometry=CacheGeometry(hash_block_size=16, groups=PLAIN.groups))


def stored(count: int) -> PutBlocks:
    return PutBlocks(domain="", space=SPACE, group=0, hashes=bytes(32 * count), parents=bytes(32 * count))


def removed(count: int) -> RemovedBlocks:
    return RemovedBlocks(domain="", space=SPACE, group=0, hashes=bytes(32 * count))


def wanted(count: int) -> WantedBlocks:
    return WantedBlocks(domain="", space=SPACE, group=0, hashes=bytes(32 * count), wait_s=1.0)


def is_ready(queue: LoopQueue) -> bool:
    return bool(select.select([queue], [], [], 0)[0])


def test_what_is_sent_is_taken_once_in_its_order() -> None:
    queue = LoopQueue()
    assert not is_ready(queue)
    sent = [stored(1), removed(1), wanted(2)]
    for one in sent:
        queue.send(one)
    assert is_ready(queue)
    assert queue.take() == (sent, 0)
    assert not is_ready(queue)
    assert queue.take() == ([], 0)
    queue.close()


def test_beyond_the_bound_blocks_are_counted_and_nobody_waits() -> None:
    queue = LoopQueue()
    kept, last, late = stored(MAX_BLOCKS - 1), stored(1), [wanted(2), removed(2)]
    queue.send(kept)
    queue.send(stored(2))
    for one in late:
        queue.send(one)
        assert one.is_done.result(0) is False
    queue.send(last)
    assert queue.take() == ([kept], 0)
    assert queue.take() == ([last], 2)
    queue.send(last)
    assert queue.take() == ([last], 0)
    queue.close()


def test_a_bounded_number_of_blocks_is_taken_at_once_and_the_queue_stays_ready() -> None:
    queue = LoopQueue()
    sent = [stored(TAKEN_BLOCKS // 2), wanted(TAKEN_BLOCKS // 2), stored(1)]
    for one in sent:
        queue.send(one)
    assert queue.take() == (sent[:2], 0)
    assert is_ready(queue)
    assert queue.has_more
    assert queue.take() == (sent[2:], 0)
    assert not is_ready(queue)
    assert not queue.has_more
    queue.close()


def test_blocks_to_remove_are_taken_in_parts_of_which_the_last_is_answered() -> None:
    queue = LoopQueue()
    one = removed(5 * REMOVED_BLOCKS + 1)
    queue.send(one)
    turns = []
    while queue.has_more:
        parts, _ = queue.take()
        turns.append([len(part) for part in parts])
        assert not one.is_done.done()
        for part in parts:
            assert isinstance(part, RemovedBlocks)
            part.end_part(is_right=True)
    assert turns == [[REMOVED_BLOCKS] * 4, [REMOVED_BLOCKS, 1]]
    assert one.is_done.result(0) is True
    queue.close()


def test_a_removal_has_failed_if_one_of_its_parts_has() -> None:
    one = removed(3 * REMOVED_BLOCKS)
    for part, is_right in zip(one.cut(), (True, False, True), strict=True):
        part.end_part(is_right=is_right)
    assert one.is_done.result(0) is False


def test_whoever_waits_is_told_whether_it_was_done() -> None:
    for is_done in (True, False):
        one = removed(1)
        one.is_done.set_result(is_done)
        assert one.wait(30) is is_done


def test_when_the_loop_ends_nobody_waits_for_it() -> None:
    queue = LoopQueue()
    before, after = wanted(1), removed(1)
    queue.send(before)
    assert not before.is_done.done()
    assert not before.wait(0)
    queue.refuse()
    queue.send(after)
    assert before.is_done.result(0) is False
    assert after.is_done.result(0) is False
    assert queue.take() == ([], 0)
    queue.close()
