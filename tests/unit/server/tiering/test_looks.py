"""A tier that does not know its place's records asks for them, and no request waits longer than its own limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvoffload.hash_rows import as_rows
from kvoffload.server.tiering import looks as looks_module
from kvoffload.server.tiering.looks import TierLooks
from kvoffload.server.tiering.settings import TierSpace
from kvoffload.tiers import RecordOutcome
from tests.kit.cache.cache_model import HYBRID, fingerprint
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.memory_tier import MemoryTier
from tests.kit.tiers.tier_contract import Records, hashes_of, put

SPACE = TierSpace(number=1, fingerprint=fingerprint("model"), geometry=HYBRID)
ROWS = [as_rows(hashes_of(100 * group, 4)) for group in range(len(HYBRID.groups))]
ALL = [np.ones(4, np.bool_) for _ in ROWS]


class Asked:
    """One question, and its answer."""

    def __init__(self, looks: TierLooks, *, wait_s: float = 1.0, lacking: Any = ALL) -> None:
        self.answers: list[tuple[list[list[bool]], float]] = []
        looks.ask(SPACE, ROWS, lacking, now_s=10.0, wait_s=wait_s, then=self._hear)

    def _hear(self, found: Any, now_s: float) -> None:
        self.answers.append(([group.tolist() for group in found], now_s))


@pytest.fixture
def tier() -> Iterator[FaultyTier]:
    tier = FaultyTier(MemoryTier())
    yield tier
    tier.close()


def store(tier: FaultyTier, group: int, shard: int, *places: int) -> None:
    for place in places:
        records = Records(100 * group + place, 1, HYBRID.groups[group].record_bytes, filled=True)
        records.names = SPACE.names(group, ROWS[group][place].tobytes(), shard)
        records.digests = _digests(records, group, shard)
        assert put(tier, records).count(RecordOutcome.WRITTEN) == 1


def _digests(records: Records, group: int, shard: int) -> Any:
    from kvoffload import native

    data = native.digest_records(
        records.memory.reshape(-1),
        records.record_bytes,
        fingerprint=SPACE.fingerprint,
        block_hashes=records.names.hashes,
        group=group,
        shard=shard,
    )
    return np.frombuffer(data, np.uint64)


def poll(tier: FaultyTier, looks: TierLooks, now_s: float = 11.0) -> None:
    for batch in tier.poll():
        assert looks.finish(batch, now_s)


def test_a_block_is_there_when_all_its_shards_are(tier: FaultyTier) -> None:
    for group, settings in enumerate(HYBRID.groups):
        for shard in range(settings.shards):
            store(tier, group, shard, *((0, 2) if shard == 0 else (2, 3)))
    looks = TierLooks(tier, timeout_s=1.0)
    asked = Asked(looks)
    assert (asked.answers, len(looks)) == ([], 1)
    poll(tier, looks)
    [(found, now_s)] = asked.answers
    shards = [settings.shards for settings in HYBRID.groups]
    assert set(shards) == {1, 2}
    assert found == [[True, False, True, False] if count == 1 else [False, False, True, False] for count in shards]
    assert (now_s, len(looks), looks.next_s()) == (11.0, 0, None)


def test_what_is_not_lacking_is_not_asked_for(tier: FaultyTier) -> None:
    looks = TierLooks(tier, timeout_s=1.0)
    some = np.array([False, True, False, False])
    asked = Asked(looks, lacking=[some, *(np.zeros(4, np.bool_) for _ in ROWS[1:])])
    assert tier.asked == [("look", 1)] * HYBRID.groups[0].shards
    poll(tier, looks)
    assert asked.answers[0][0] == [[False] * 4 for _ in ROWS]
    nothing = Asked(looks, lacking=[np.zeros(4, np.bool_) for _ in ROWS])
    assert nothing.answers == [([[False] * 4 for _ in ROWS], 10.0)]


def test_batches_that_a_tier_does_not_take_are_a_few_in_each_turn(
    tier: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may have thousands of them, and the loop has other work."""
    monkeypatch.setattr(looks_module, "BATCHES_AT_ONCE", 2)
    told: list[int] = []
    monkeypatch.setattr(tier, "look", lambda names, *, timeout_s: told.append(len(names)))
    looks = TierLooks(tier, timeout_s=1.0)
    asked = Asked(looks)
    assert (len(told), asked.answers, looks.next_s()) == (2, [], 0.0)
    turns = 0
    while looks.next_s() is not None:
        turns += 1
        looks.expire(10.1)
        assert len(told) <= 2 + 2 * turns
    assert len(told) == sum(settings.shards for settings in HYBRID.groups)
    assert asked.answers == [([[False] * 4 for _ in ROWS], 10.1)]


@pytest.mark.parametrize("way", ["time", "end"])
def test_who_does_not_wait_any_longer_knows_nothing(tier: FaultyTier, way: str) -> None:
    store(tier, 0, 0, 0, 1, 2, 3)
    looks = TierLooks(tier, timeout_s=1.0)
    asked = Asked(looks, wait_s=0.5)
    tier.is_held = True
    looks.expire(10.4)
    assert (asked.answers, looks.next_s()) == ([], 10.5)
    if way == "time":
        looks.expire(10.5)
    else:
        looks.end_all(10.5)
    assert asked.answers == [([[False] * 4 for _ in ROWS], 10.5)]
    tier.is_held = False
    poll(tier, looks)
    assert len(asked.answers) == 1


def test_a_look_takes_as_long_as_the_store_may_and_no_longer_than_its_request_waits(
    tier: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    monkeypatch.setattr(tier, "look", lambda _, *, timeout_s: told.append(timeout_s))
    looks = TierLooks(tier, timeout_s=10.0)
    for wait_s in (30.0, 0.5):
        told.clear()
        Asked(looks, wait_s=wait_s)
        assert set(told) == {min(wait_s, 10.0)}


def test_a_tier_that_takes_no_more_batches_has_nothing(tier: FaultyTier) -> None:
    for group, settings in enumerate(HYBRID.groups):
        for shard in range(settings.shards):
            store(tier, group, shard, 0, 1, 2, 3)
    tier.takes = 1
    looks = TierLooks(tier, timeout_s=1.0)
    asked = Asked(looks)
    poll(tier, looks)
    found = asked.answers[0][0]
    assert found[0] == [HYBRID.groups[0].shards == 1] * 4
    assert found[1:] == [[False] * 4 for _ in ROWS[1:]]


def test_owners_take_turns_and_a_bounded_number_of_names_is_asked_for_at_a_time(
    tier: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One owner's long request is no reason for another's short one to get no answer."""
    monkeypatch.setattr(looks_module, "BATCH_NAMES", 1)
    monkeypatch.setattr(looks_module, "NAMES_UNDER_WAY", 2)
    looks, answers = TierLooks(tier, timeout_s=1.0), list[str]()
    tier.is_held = True
    for owner, count in (("his", 4), ("hers", 1)):
        rows = [as_rows(hashes_of(100, count)), *(as_rows(b"") for _ in ROWS[1:])]
        lacking = [np.ones(len(names), np.bool_) for names in rows]
        looks.ask(
            SPACE,
            rows,
            lacking,
            now_s=10.0,
            wait_s=1.0,
            then=lambda _found, _now_s, owner=owner: answers.append(owner),  # type: ignore[misc]
            owner=owner,
        )
    assert len(tier.asked) == 2
    tier.is_held = False
    while len(looks):
        poll(tier, looks)
    assert answers == ["hers", "his"]
    assert tier.asked == [("look", 1)] * (4 + 1) * HYBRID.groups[0].shards
