"""Blocks that tiers have are evicted first: noted when they are written or promoted, until a tier has lost them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvoffload.cache.settings import DEFAULT_POLICY
from kvoffload.server.tiering import tier_notes
from kvoffload.server.tiering.settings import TierSettings
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.tiers import RecordOutcome
from tests.kit.cache.cache_model import PLAIN, SMALL, make_chain
from tests.kit.server.tier_setting import CHAIN, TierSetting
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.memory_tier import MemoryTier
from tests.kit.tiers.tier_contract import finish

BLOCKS = 16
OTHER = make_chain(2, BLOCKS)


class NotedSetting(TierSetting):
    """Its memory evicts as a server's does."""

    cache_settings = replace(SMALL, policy=DEFAULT_POLICY)

    def save_unwritten(self, chain: bytes) -> None:
        """Saves a chain that stays in memory alone."""
        self.faults = {("put", place): RecordOutcome.FAILED for place in range(BLOCKS)}
        self.save(chain)
        self.turn(times=16)
        self.faults = {}

    def lose(self, chain: bytes) -> None:
        """The tier has these no more, and says nothing of it."""
        space = self.traffic.find_space(self.name_space)
        assert space is not None
        names = space.names(0, chain)
        ended = finish(self.tier.inner, self.tier.inner.remove(names, timeout_s=1.0))  # type: ignore[arg-type]
        assert ended.count(RecordOutcome.REMOVED) == BLOCKS

    def evict_one_of(self, *chains: bytes) -> list[int]:
        """Evicts as many blocks as one prompt has. Returns how many of each chain are left."""
        assert self.cache.evict(BLOCKS * 4096) == BLOCKS * 4096
        return [int(self.cache.lookup(self.name_space, 0, chain).sum()) for chain in chains]


@pytest.fixture
def setting() -> Iterator[NotedSetting]:
    setting = NotedSetting(PLAIN)
    yield setting
    setting.turn(times=8)
    assert setting.held_bytes == 0
    setting.close()


def test_of_prompts_that_no_tier_has_the_older_one_goes(setting: NotedSetting) -> None:
    setting.save_unwritten(CHAIN)
    setting.save_unwritten(OTHER)
    assert setting.evict_one_of(CHAIN, OTHER) == [0, BLOCKS]


def test_what_was_written_goes_before_what_is_older(setting: NotedSetting) -> None:
    setting.save_unwritten(CHAIN)
    setting.save(OTHER)
    setting.turn(times=16)
    assert setting.traffic.counts.written == BLOCKS
    assert setting.evict_one_of(CHAIN, OTHER) == [BLOCKS, 0]


def test_what_the_tier_had_already_is_noted_when_it_is_saved_again(setting: NotedSetting) -> None:
    setting.save_below(OTHER)
    setting.save_unwritten(CHAIN)
    setting.save(OTHER)
    setting.turn(times=16)
    assert setting.traffic.counts.written == BLOCKS, "not again"
    assert setting.evict_one_of(CHAIN, OTHER) == [BLOCKS, 0]


def test_what_came_up_goes_before_what_is_older(setting: NotedSetting) -> None:
    setting.save_below(OTHER)
    setting.save_unwritten(CHAIN)
    setting.ask(OTHER)
    setting.turn(times=16)
    assert setting.traffic.counts.promoted == BLOCKS
    setting.turn(seconds=1.0)  # for as long it is held for the request
    assert setting.evict_one_of(CHAIN, OTHER) == [BLOCKS, 0]


def test_a_look_finds_what_the_tier_has_lost(setting: NotedSetting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_notes, "SWEPT_BLOCKS", 5)
    setting.save(CHAIN)
    setting.save(OTHER)
    setting.turn(times=16)
    setting.lose(CHAIN)
    for _ in range(2 * BLOCKS // 5 + 1):
        setting.chain.look()
    assert setting.evict_one_of(CHAIN, OTHER) == [BLOCKS, 0]


def test_a_second_round_finds_what_was_lost_after_the_first(setting: NotedSetting) -> None:
    setting.save(CHAIN)
    setting.save(OTHER)
    setting.turn(times=16)
    setting.chain.look()
    setting.lose(CHAIN)
    setting.chain.look()
    assert setting.evict_one_of(CHAIN, OTHER) == [BLOCKS, 0]


class SharedTier(MemoryTier):
    """Others write to its place, too: what is there has to be asked."""

    knows_all = False


class SharedSetting(NotedSetting):
    def open_farther(self) -> list[TierTraffic]:
        tier: Any = FaultyTier(SharedTier())
        return [TierTraffic(tier, TierSettings(name="far"), open_pidfd=lambda: os.pidfd_open(os.getpid()))]


def test_what_a_shared_place_was_given_counts_as_there() -> None:
    setting = SharedSetting(PLAIN)
    setting.save_unwritten(CHAIN)  # by the near tier
    setting.save(OTHER)
    setting.turn(times=16)
    setting.lose(OTHER)
    setting.chain.look()
    assert np.array_equal(setting.evict_one_of(CHAIN, OTHER), [0, BLOCKS]), "both are in the far one: by age"
    setting.close()


def test_nothing_is_looked_up_before_an_identity_is_known() -> None:
    setting = NotedSetting(PLAIN)
    setting.chain.forget_spaces({setting.name_space})
    setting.chain.look()
    setting.chain.learn(setting.name_space, bytes(32), PLAIN)
    setting.chain.look()
    setting.close()
