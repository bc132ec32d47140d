"""Two tiers, of which the farther one is asked for what the nearer one lacks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.errors import TierError
from kvoffload.hash_rows import as_rows
from kvoffload.protocol import Prefetch, Promoted, PromotionOutcome
from kvoffload.server.common.steps import run_steps
from kvoffload.server.tiering import chain as chain_module
from kvoffload.server.tiering import seen as seen_module
from kvoffload.server.tiering.chain import TierChain, open_chains
from kvoffload.server.tiering.rate import TierRate
from kvoffload.server.tiering.seen import Seen
from kvoffload.server.tiering.settings import TierPlan, TierSettings, TierSpace
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.tiers import RecordNames, RecordOutcome, Tier
from kvoffload.tiers.remote import RemoteTier, RemoteTierSettings
from tests.kit.cache.cache_model import PLAIN, make_chain
from tests.kit.server.tier_setting import TierSetting
from tests.kit.tiers.dict_store import Place
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.memory_tier import MemoryTier
from tests.kit.tiers.seals import make_keys
from tests.kit.tiers.tier_contract import Records, finish, put

BLOCKS = 16
CHAIN = make_chain(1, BLOCKS)
TOKENS = BLOCKS * PLAIN.hash_block_size
COMPLETE, PARTLY, NOTHING = PromotionOutcome.COMPLETE, PromotionOutcome.PARTLY, PromotionOutcome.NOTHING


class FarTier(MemoryTier):
    """Others write to its place, too."""

    knows_all = False

    def contains(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        return np.zeros(len(names), np.bool_)


@dataclass(frozen=True)
class OnePlace:
    """The place of a tier that is there already."""

    tier: Tier

    def describe(self) -> str:
        return "one place"

    def open_tier(self) -> Tier:
        return self.tier


def open_with_keys(tier: Tier) -> dict[str, TierChain]:
    plan = TierPlan(place=OnePlace(tier), settings=TierSettings(seal_keys=make_keys(1)))
    return open_chains({"red": [plan]}, open_pidfd=lambda: os.pidfd_open(os.getpid()))


def test_a_remote_tier_gets_the_keys_that_seal_its_records() -> None:
    place = Place()
    tier = RemoteTier(RemoteTierSettings(place="dictionary", open_store=place.open))
    chains = open_with_keys(tier)
    records = Records(0, 1, 1000, filled=True)
    put(tier, records)
    [value] = place.values.values()
    assert records.memory[0, :16].tobytes() not in value
    chains["red"].close(lambda: 0.0)


def test_a_tier_that_cannot_seal_is_refused_where_there_are_keys() -> None:
    tier = MemoryTier()
    with pytest.raises(TierError, match="one place: records cannot be sealed there"):
        open_with_keys(tier)


class ChainSetting(TierSetting):
    """`tier` is near, `far` is beyond it."""

    def open_farther(self) -> list[TierTraffic]:
        self.far_faults: dict[tuple[str, int], Any] = {}
        self.far = FaultyTier(FarTier(), lambda verb, place: self.far_faults.get((verb, place)))
        own = lambda: os.pidfd_open(os.getpid())  # noqa: E731
        self.far_traffic = TierTraffic(self.far, TierSettings(name="far"), open_pidfd=own)
        return [self.far_traffic]

    @property
    def space(self) -> TierSpace:
        space = self.traffic.find_space(self.name_space)
        assert space is not None
        return space

    def drop(self, tier: FaultyTier, *blocks: int) -> None:
        """Drops these records from that tier."""
        names = b"".join(CHAIN[32 * block : 32 * block + 32] for block in blocks)
        ended = finish(tier.inner, tier.inner.remove(self.space.names(0, names), timeout_s=1.0))  # type: ignore[arg-type]
        assert ended.count(RecordOutcome.REMOVED) == len(blocks)

    def settle(self) -> None:
        self.turn(times=32)
        assert self.traffic.is_idle
        assert self.far_traffic.is_idle


@pytest.fixture
def setting() -> Iterator[ChainSetting]:
    """Both tiers have the prompt, and memory has lost it."""
    setting = ChainSetting(PLAIN)
    setting.save(CHAIN)
    setting.settle()
    setting.cache.clear(setting.name_space)
    yield setting
    setting.tier.is_held = setting.far.is_held = False
    setting.settle()
    setting.turn(seconds=1.0)
    assert setting.held_bytes == 0
    setting.close()


def list_reaches(answers: list[Promoted]) -> list[tuple[str, int]]:
    (answer,) = answers
    return [(one.tier, one.boundary) for one in answer.reaches]


def test_what_is_near_is_not_asked_for_beyond(setting: ChainSetting) -> None:
    asked = len(setting.far.asked)
    answers = setting.ask(CHAIN)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS)]
    assert list_reaches(answers) == [("disk", TOKENS)]
    assert all(verb == "look" for verb, _ in setting.far.asked[asked:])
    assert setting.load(CHAIN) == TOKENS


def test_what_is_only_far_comes_up_and_is_near_from_then_on(setting: ChainSetting) -> None:
    setting.drop(setting.tier, *range(BLOCKS))
    answers = setting.ask(CHAIN)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS)]
    assert setting.load(CHAIN) == TOKENS
    assert setting.told, "whoever listens to events hears of it"
    setting.settle()
    space = setting.traffic.find_space(setting.name_space)
    assert space is not None
    assert setting.tier.contains(space.names(0, CHAIN)).all()
    assert setting.far_traffic.counts.promoted == BLOCKS


def test_each_tier_gives_what_it_has(setting: ChainSetting) -> None:
    setting.drop(setting.tier, *range(8, BLOCKS))
    setting.drop(setting.far, *range(8))
    answers = setting.ask(CHAIN)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS)]
    assert list_reaches(answers) == [("disk", TOKENS // 2), ("far", TOKENS)]
    assert (setting.traffic.counts.promoted, setting.far_traffic.counts.promoted) == (8, 8)
    assert setting.load(CHAIN) == TOKENS


def test_blocks_of_one_prompt_may_lie_anywhere(setting: ChainSetting) -> None:
    setting.drop(setting.tier, *range(0, BLOCKS, 2))
    setting.drop(setting.far, *range(1, BLOCKS, 2))
    answers = setting.ask(CHAIN)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS)]
    assert list_reaches(answers) == [("disk", 0), ("far", TOKENS)], "without the far tier it would be no hit"
    assert (setting.traffic.counts.promoted, setting.far_traffic.counts.promoted) == (8, 8)
    assert setting.load(CHAIN) == TOKENS


def test_a_tier_that_is_too_slow_is_left_out_and_others_bring_what_they_have(setting: ChainSetting) -> None:
    setting.drop(setting.tier, *range(8, BLOCKS))
    setting.far_traffic.reads.rate = slow_rate(setting)
    answers = setting.ask(CHAIN, prefill_ns=1000)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS // 2)]
    assert (setting.traffic.counts.promoted, setting.far_traffic.counts.promoted) == (8, 0)
    assert setting.far_traffic.counts.too_slow == 1


def test_what_a_slow_tier_has_comes_from_a_faster_one_beyond_it(setting: ChainSetting) -> None:
    setting.traffic.reads.rate = slow_rate(setting)
    answers = setting.ask(CHAIN, prefill_ns=1000)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS)]
    assert (setting.traffic.counts.promoted, setting.far_traffic.counts.promoted) == (0, BLOCKS)
    assert setting.load(CHAIN) == TOKENS


def test_when_all_are_too_slow_that_is_the_answer(setting: ChainSetting) -> None:
    setting.traffic.reads.rate = setting.far_traffic.reads.rate = slow_rate(setting)
    answers = setting.ask(CHAIN, prefill_ns=1000)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(PromotionOutcome.TOO_SLOW, TOKENS)]
    assert (setting.traffic.counts.too_slow, setting.far_traffic.counts.too_slow) == (1, 1)


def test_a_busy_tier_that_has_nothing_to_bring_is_not_called_slow(setting: ChainSetting) -> None:
    setting.drop(setting.tier, *range(8, BLOCKS))
    setting.drop(setting.far, 8)  # what it has is behind a gap
    setting.far_traffic.reads.rate = slow_rate(setting)
    setting.far_traffic.reads.rate.begin(1 << 20, setting.now_s)
    answers = setting.ask(CHAIN, prefill_ns=1_000_000)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS // 2)]
    assert setting.far_traffic.counts.too_slow == 0


def test_what_one_tier_brought_is_kept_until_the_slowest_has(setting: ChainSetting) -> None:
    setting.drop(setting.tier, *range(8, BLOCKS))
    answers = setting.ask(CHAIN, wait_ms=60_000)
    while setting.far.asked[-1][0] != "get":
        setting.turn(times=1)
    setting.far.is_held = True
    setting.turn(seconds=10.0)
    assert (answers, setting.traffic.counts.promoted) == ([], 8)
    setting.cache.evict(1 << 30)
    setting.far.is_held = False
    setting.turn(seconds=0.01)
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS)]
    setting.cache.evict(1 << 30)
    assert setting.load(CHAIN) == TOKENS
    setting.turn(seconds=1.0)
    assert setting.cache.evict(1 << 30) == BLOCKS * 4096


def slow_rate(setting: ChainSetting) -> TierRate:
    """A byte a second."""
    rate = TierRate()
    rate.begin(1, setting.now_s - 1.0)
    rate.end(1, setting.now_s, moved_bytes=1)
    assert rate.is_measured
    return rate


def test_a_gap_that_is_filled_from_afar_opens_what_is_behind_it(setting: ChainSetting) -> None:
    setting.drop(setting.tier, 4, 5, 6)
    setting.drop(setting.far, *range(4), *range(7, BLOCKS))
    answers = setting.ask(CHAIN)
    setting.turn(times=12)
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS)]
    assert (setting.traffic.counts.promoted, setting.far_traffic.counts.promoted) == (13, 3)
    assert setting.load(CHAIN) == TOKENS


def test_what_nobody_has_is_nothing(setting: ChainSetting) -> None:
    answers = setting.ask(make_chain(2, BLOCKS))
    setting.turn()
    assert [one.outcome for one in answers] == [NOTHING]


@pytest.mark.parametrize("slow", ["look", "get"])
def test_a_far_tier_that_does_not_answer_costs_what_the_request_gives(setting: ChainSetting, slow: str) -> None:
    setting.drop(setting.tier, *range(8, BLOCKS))
    answers = setting.ask(CHAIN, wait_ms=500)
    if slow == "look":
        setting.far.is_held = True
        setting.turn()
    else:
        while setting.far.asked[-1][0] != "get":
            setting.turn(times=1)
        setting.far.is_held = True
        setting.turn(times=1)
    assert answers == []
    setting.turn(seconds=0.25, times=2)
    [answer] = answers
    assert answer.outcome in (COMPLETE, PARTLY), "the nearer one has done its part"
    assert setting.load(CHAIN) == 8 * PLAIN.hash_block_size


def test_a_far_tier_that_is_gone_costs_nothing(setting: ChainSetting) -> None:
    setting.drop(setting.tier, *range(8, BLOCKS))
    setting.far_faults |= {("look", place): RecordOutcome.UNAVAILABLE for place in range(BLOCKS)}
    answers = setting.ask(CHAIN)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, 8 * PLAIN.hash_block_size)]


def test_what_was_damaged_afar_is_removed_there_and_not_asked_for_again(setting: ChainSetting) -> None:
    setting.drop(setting.tier, *range(BLOCKS))
    setting.far_faults["get", 3] = RecordOutcome.DAMAGED
    answers = setting.ask(CHAIN)
    setting.turn()
    assert [one.outcome for one in answers] == [PARTLY]
    assert setting.load(CHAIN) == 3 * PLAIN.hash_block_size
    assert setting.far_traffic.counts.quarantined == 1
    setting.settle()
    assert ("remove", 1) in setting.far.asked
    setting.far_faults.clear()
    answers = setting.ask(CHAIN)
    setting.turn()
    assert setting.load(CHAIN) == 3 * PLAIN.hash_block_size


def test_what_is_not_to_be_trusted_is_removed_everywhere(setting: ChainSetting) -> None:
    setting.chain.forget(setting.name_space, 0, CHAIN[:64])
    setting.settle()
    answers = setting.ask(CHAIN)
    setting.turn()
    assert [one.outcome for one in answers] == [NOTHING]


def test_a_prefetch_goes_through_all_tiers(setting: ChainSetting) -> None:
    setting.drop(setting.tier, *range(BLOCKS))
    setting.chain.prefetch(Prefetch(name_space=setting.name_space, chain=CHAIN), setting.now_s)
    setting.turn()
    assert setting.load(CHAIN) == TOKENS


def test_files_and_times_are_those_of_all(setting: ChainSetting) -> None:
    assert setting.chain.files() == [setting.tier.fileno(), setting.far.fileno()]
    assert setting.chain.next_s() is None
    setting.far.is_held = True
    setting.drop(setting.tier, *range(BLOCKS))
    setting.ask(CHAIN, wait_ms=100)
    assert setting.chain.next_s() == pytest.approx(setting.now_s + 0.05)


def find_places(setting: ChainSetting, block_hash: bytes, *, wait_s: float, name_space: int | None = None) -> list[Any]:
    """Returns what is answered now, and later."""
    answers: list[Any] = []
    rows = [as_rows(block_hash)]
    space = setting.space if name_space is None else replace(setting.space, number=name_space)
    setting.chain.find_places(
        space,
        rows,
        run_steps(setting.chain.look_for(space, rows, is_memory_asked=False)),
        now_s=setting.now_s,
        wait_s=wait_s,
        then=answers.append,
    )
    return answers


def test_where_a_block_is_every_tier_says_for_itself(setting: ChainSetting) -> None:
    setting.drop(setting.tier, 3)
    setting.drop(setting.far, 4)
    for block, there in ((3, [False, True]), (4, [True, False]), (5, [True, True])):
        answers = find_places(setting, CHAIN[32 * block : 32 * block + 32], wait_s=1.0)
        setting.turn()
        [found] = answers
        assert [[bool(group[0]) for group in tier] for tier in found] == [[has] for has in there]


def test_a_tier_that_does_not_answer_has_nothing(setting: ChainSetting) -> None:
    setting.far.is_held = True
    answers = find_places(setting, CHAIN[:32], wait_s=0.5)
    setting.turn()
    assert not answers
    setting.turn(seconds=1.0)
    [found] = answers
    assert [[bool(group[0]) for group in tier] for tier in found] == [[True], [False]]


def test_of_a_namespace_that_no_tier_knows_nothing_is_said(setting: ChainSetting) -> None:
    assert find_places(setting, CHAIN[:32], wait_s=0.5, name_space=99) == [[]]


def test_a_tier_that_has_to_be_asked_is_not_where_nobody_waits(setting: ChainSetting) -> None:
    [[near, far]] = find_places(setting, CHAIN[:32], wait_s=0.0)
    assert (bool(near[0][0]), far) == (True, None)


def test_what_is_not_lacking_is_not_there(setting: ChainSetting) -> None:
    rows = [as_rows(CHAIN)]
    lacking = np.arange(len(rows[0])) % 2 == 0
    answers: list[Any] = []
    settings: dict[str, Any] = {"now_s": setting.now_s, "wait_s": 1.0, "then": answers.append}
    in_tiers = run_steps(setting.chain.look_for(setting.space, rows, is_memory_asked=False)).in_tiers
    setting.chain.find_places(setting.space, rows, Seen([~lacking], in_tiers), **settings)
    setting.turn()
    assert [tier[0].tolist() for tier in answers[0]] == [lacking.tolist()] * 2


def test_an_identity_is_forgotten_by_all_tiers_or_by_none(setting: ChainSetting) -> None:
    setting.drop(setting.tier, *range(BLOCKS))
    setting.far.is_held = True
    answers = setting.ask(CHAIN)
    assert setting.chain.forget_spaces({setting.name_space}) == set()
    assert setting.traffic.find_space(setting.name_space) is not None
    setting.far.is_held = False
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS)]
    setting.settle()
    setting.cache.clear(setting.name_space)
    assert setting.chain.forget_spaces({setting.name_space, 4711}) == {setting.name_space, 4711}
    assert setting.traffic.find_space(setting.name_space) is setting.far_traffic.find_space(setting.name_space) is None


def test_a_request_waits_for_a_bounded_number_of_blocks(setting: ChainSetting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of a longer one comes up."""
    monkeypatch.setattr(chain_module, "MAX_NEEDED", 5)
    answers = setting.ask(CHAIN)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, 5 * 16)]
    assert setting.load(CHAIN) == 5 * 16


def test_a_long_request_is_found_in_parts_and_brings_the_same(
    setting: ChainSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (seen_module, chain_module):
        monkeypatch.setattr(module, "LOOKS_AT_ONCE", 1)
    answers = setting.ask(CHAIN)
    setting.turn()
    assert [(one.outcome, one.boundary) for one in answers] == [(COMPLETE, TOKENS)]
    assert setting.load(CHAIN) == TOKENS
