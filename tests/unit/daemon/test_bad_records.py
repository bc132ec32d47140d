"""Bad records: not there whatever the tier says, until it has removed them."""

from __future__ import annotations

import numpy as np

from kvoffload.daemon.bad_records import BadRecords
from kvoffload.tiers import RecordNames
from tests.unit.cache.cache_model import fingerprint, make_chain
from tests.unit.daemon.tier_setting import SlowTier
from tests.unit.tiers.memory_tier import MemoryTier

CHAIN = make_chain(1, 4)


def names_of(chain: bytes, shard: int = 0) -> RecordNames:
    return RecordNames(fingerprint=fingerprint("model"), hashes=chain, shard=shard)


def find(bad: BadRecords, names: RecordNames) -> list[bool]:
    found = np.ones(len(names), np.bool_)
    bad.leave_out(names, found)
    return [bool(one) for one in found]


def test_they_are_left_out_until_they_are_removed() -> None:
    tier = MemoryTier()
    bad = BadRecords(tier)
    bad.add(names_of(CHAIN[32:96]))
    assert find(bad, names_of(CHAIN)) == [True, False, False, True]
    assert find(bad, names_of(CHAIN, shard=1)) == [True] * 4
    (batch,) = tier.poll()
    assert bad.finish(batch)
    assert find(bad, names_of(CHAIN)) == [True] * 4
    assert not bad.finish(batch)


def test_what_could_not_be_removed_is_tried_again() -> None:
    tier = SlowTier(lambda verb, place: None)
    refused = [None, None]
    tier.remove = lambda *rest, **more: refused.pop() if refused else tier.inner.remove(*rest, **more)  # type: ignore[attr-defined]
    bad = BadRecords(tier)  # type: ignore[arg-type]
    bad.add(names_of(CHAIN[:32]))
    bad.retry()
    assert (tier.poll(), refused) == ([], [])
    bad.retry()
    bad.retry()  # it is under way
    (batch,) = tier.poll()
    assert bad.finish(batch)
    assert len(bad) == 0
    bad.retry()
    assert tier.poll() == []


def test_their_number_is_bounded() -> None:
    bad = BadRecords(MemoryTier(), limit=3)
    bad.add(names_of(CHAIN))
    assert len(bad) == 3
    assert find(bad, names_of(CHAIN)) == [True, False, False, False]
