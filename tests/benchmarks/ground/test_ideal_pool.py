"""The blocks that a pool of some bytes could hold: the default policy's choice, without slots, leases or messages."""

from __future__ import annotations

import hashlib

from benchmarks.ground.ideal_pool import IdealPool, Record
from kvoffload.cache import GroupRule
from kvoffload.kvspec import ReuseRule

PREFIX = GroupRule(block_size=16, reuse=ReuseRule.PREFIX)
WINDOW = GroupRule(block_size=16, reuse=ReuseRule.WINDOW, window=32)


def make_chain(name: str, blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {at}".encode()).digest() for at in range(blocks)]


def make_records(chain: list[bytes], group: int = 0) -> list[Record]:
    return [Record(group, name, parent) for name, parent in zip(chain, [bytes(32), *chain], strict=False)]


def test_a_conversation_goes_from_its_end() -> None:
    pool = IdealPool([PREFIX], [10], capacity_bytes=50)
    old, new = make_chain("old", 4), make_chain("new", 3)
    pool.admit(make_records(old))
    pool.admit(make_records(new))
    assert pool.find_present(0, old).tolist() == [True, True, False, False]
    assert pool.find_present(0, new).all()
    assert pool.used_bytes == 50


def test_groups_have_records_of_their_own_size_and_windows_may_come_first() -> None:
    pool = IdealPool([WINDOW, PREFIX], [3, 10], capacity_bytes=1000)
    chain = make_chain("both", 4)
    pool.admit([*make_records(chain, 0), *make_records(chain, 1)])
    pool.admit(make_records(chain, 1))
    assert pool.used_bytes == 4 * 13
    assert pool.find_present(0, chain).all()
    assert pool.find_present(0, []).tolist() == []
