from __future__ import annotations

import select

from kvoffload.cache import CacheGeometry
from kvoffload.peers import PeerSpace
from kvoffload.peers.loop_queue import MAX_BLOCKS, LoopQueue, PutBlocks, RemovedBlocks, WantedBlocks
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
    assert queue.take() == ([kept, last], 2)
    queue.send(last)
    assert queue.take() == ([last], 0)
    queue.close()


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
