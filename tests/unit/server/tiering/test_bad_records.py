"""Bad records: not there whatever the tier says, until it has removed them."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from kvoffload.server.tiering import bad_records
from kvoffload.server.tiering.bad_records import BadRecords
from kvoffload.tiers import RecordNames, RecordOutcome, TierHealth, TierState
from tests.kit.cache.cache_model import fingerprint, make_chain
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.memory_tier import MemoryTier
from tests.kit.tiers.tier_contract import Records, put

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
    tier = FaultyTier(MemoryTier())
    tier.takes = 0
    bad = BadRecords(tier)
    bad.add(names_of(CHAIN[:32]))
    bad.retry()
    assert tier.poll() == []
    tier.takes = None
    bad.retry()
    bad.retry()  # it is under way
    (batch,) = tier.poll()
    assert bad.finish(batch)
    assert len(bad) == 0
    bad.retry()
    assert tier.poll() == []


def test_those_that_are_tried_again_go_together_and_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is gone for a while costs few calls, and none of its records keeps back the others."""
    monkeypatch.setattr(bad_records, "RETRIED_AT_ONCE", 2)
    tier = FaultyTier(MemoryTier())
    tier.takes = 0
    bad = BadRecords(tier)
    bad.add(names_of(CHAIN[:96]))
    bad.add(names_of(CHAIN[:32], shard=1))
    tier.takes = None
    bad.retry()
    bad.retry()
    bad.retry()
    assert [len(batch.outcomes) for batch in tier.poll()] == [2, 1, 1]


class ManyPlaces(MemoryTier):
    """With a second place, in the state that a test says."""

    state = TierState.READY

    def health(self) -> list[TierHealth]:
        return [*super().health(), TierHealth(name="second", state=self.state)]


@pytest.mark.parametrize("state", [TierState.OPENING, TierState.ABSENT])
def test_what_may_be_where_nobody_can_look_is_not_forgotten(state: TierState) -> None:
    tier = ManyPlaces()
    tier.state = state
    bad = BadRecords(tier)
    bad.add(names_of(CHAIN[:32]))
    for tier.state, left in ((state, 1), (TierState.READY, 0)):
        (batch,) = tier.poll()
        assert batch.count(RecordOutcome.MISSING) == 1
        assert bad.finish(batch)
        assert len(bad) == left
        bad.retry()
    assert tier.poll() == []


def test_one_of_several_places_may_have_another() -> None:
    tier = ManyPlaces()
    put(tier, Records(0, 1, 100, filled=True))
    names = Records(0, 1, 100, filled=False).names
    bad = BadRecords(tier)
    bad.add(names)
    for outcome, left in ((RecordOutcome.REMOVED, 1), (RecordOutcome.MISSING, 0)):
        (batch,) = tier.poll()
        assert batch.count(outcome) == 1
        bad.finish(batch)
        assert len(bad) == left
        bad.retry()


def test_their_number_is_bounded() -> None:
    bad = BadRecords(MemoryTier(), limit=3)
    bad.add(names_of(CHAIN))
    assert len(bad) == 3
    assert find(bad, names_of(CHAIN)) == [True, False, False, False]


def test_a_search_for_garbage_does_not_walk_over_them() -> None:
    """Tuples that replace others do not count as new objects, so that one search walked over 131,072 of them in the
    server's loop."""
    tier = FaultyTier(MemoryTier())
    tier.takes = 0
    bad = BadRecords(tier)
    gc.disable()
    try:
        tracked = len(gc.get_objects())
        bad.add(names_of(make_chain(1, 10_000)))
        assert len(gc.get_objects()) - tracked < 100
    finally:
        gc.enable()
    assert len(bad) == 10_000
