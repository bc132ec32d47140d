"""Blocks that each rule writes, on traces so small that the answer is plain."""

from __future__ import annotations

import pytest

from benchmarks.write_rules import KNOWN, Cache, Returns, compare


def serve(rule: str, *requests: tuple[int, ...], memory_blocks: int = 2, disk_blocks: int = 4) -> Cache:
    cache = Cache(rule, memory_blocks, disk_blocks)
    for request in requests:
        cache.serve(request)
    return cache


@pytest.mark.parametrize(("rule", "written"), [("through", 4), ("back", 2), ("second_use", 1), ("likely", 2)])
def test_a_block_is_written_when_the_rule_says_so(rule: str, written: int) -> None:
    """Of four blocks two are dropped, of which one was used."""
    assert serve(rule, (1,), (1,), (2,), (3,), (4,)).written == written


@pytest.mark.parametrize("rule", ["through", "back", "likely"])
def test_what_the_disk_has_is_read_and_not_written_again(rule: str) -> None:
    cache = serve(rule, *[(1,), (2,), (3,)] * 3)
    assert (cache.hits, cache.read, cache.written) == (0, 6, 3)


def test_a_hit_ends_at_the_first_block_that_is_nowhere() -> None:
    cache = serve("through", (1, 2, 3), (1, 9, 3), memory_blocks=3)
    assert (cache.hits, cache.read) == (1, 0)


def test_classes_that_do_not_come_back_in_time_are_not_likely() -> None:
    returns = Returns(blocks=2)
    once, used = (0, 1, 1, False), (1, 1, 1, False)
    for block in range(KNOWN + 2):
        returns.drop(2 * block, once)
        returns.drop(2 * block + 1, used)
        returns.ask(2 * block + 1)
    assert not returns.are_likely(once)
    assert returns.are_likely(used)
    assert returns.are_likely((3, 3, 3, True))


def test_rules_are_compared_with_writing_through() -> None:
    found = compare([(1,), (2,), (3,)] * 3, 2, 4)
    assert found["through"] == {"written": 1, "written_per_read": 1, "hits": 1}
    assert found["back"] == {"written": 1, "written_per_read": 1, "hits": 1}
    assert found["second_use"] == {"written": 0, "written_per_read": 0, "hits": 0}
