"""Identities that are forgotten while a tier below has something of them, or something to do for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.cache import StoredBlocks
from kvoffload.peers import SpaceTable
from kvoffload.protocol import Promoted, PromotionOutcome
from kvoffload.server.tiering.settings import WriteRule
from tests.kit.cache.cache_model import HYBRID, PLAIN, fingerprint
from tests.kit.server.disk_traffic import STEP_S, await_, bring_down, bring_up
from tests.kit.server.tier_setting import CHAIN, TierSetting, tier_setting
from tests.kit.tiers.disks import make_tier


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[TierSetting]:
    with tier_setting(tier=make_tier(tmp_path / "disk")) as setting:
        yield setting


def forget(setting: TierSetting) -> bool:
    """As the server does, when no session has registered it."""
    unknown = setting.chain.forget_spaces({setting.name_space})
    kept = {setting.name_space} - unknown
    forgotten = setting.name_space in setting.cache.forget_namespaces(kept)
    if unknown and not forgotten:
        setting.chain.learn(setting.name_space, fingerprint("model"), setting.geometry)
    return forgotten


def fill_all_places(setting: TierSetting) -> None:
    for at in range(4096 - setting.cache.stats.namespaces):
        setting.cache.open_namespace(fingerprint(f"other {setting.name_space} {at}"), PLAIN)


def come_back(setting: TierSetting) -> None:
    """Its number is another one."""
    former = setting.name_space
    setting.name_space = setting.cache.open_namespace(fingerprint("model"), setting.geometry)
    setting.chain.learn(setting.name_space, fingerprint("model"), setting.geometry)
    assert setting.name_space != former


def test_blocks_below_are_found_by_whoever_comes_back(setting: TierSetting) -> None:
    bring_down(setting, CHAIN)
    fill_all_places(setting)
    assert forget(setting)
    come_back(setting)
    assert bring_up(setting, CHAIN) == 256


def test_what_is_being_written_keeps_its_identity(setting: TierSetting) -> None:
    """Its last block has left memory by then."""
    setting.tier.is_held = True
    setting.save(CHAIN)
    setting.turn(STEP_S)
    setting.cache.clear(setting.name_space)
    assert setting.cache.stats.quarantined > 0
    assert not forget(setting)
    setting.tier.is_held = False
    await_(setting, lambda: setting.traffic.is_idle)
    assert setting.traffic.counts.written == 28
    fill_all_places(setting)
    assert forget(setting)
    come_back(setting)
    assert bring_up(setting, CHAIN) == 256


def test_what_comes_up_keeps_its_identity(setting: TierSetting) -> None:
    bring_down(setting, CHAIN)
    setting.tier.is_held = True
    answers = setting.ask(CHAIN)
    assert not forget(setting)
    setting.tier.is_held = False
    await_(setting, lambda: bool(answers))
    assert setting.load(CHAIN) == 256
    assert not forget(setting)


def test_what_waits_to_come_up_keeps_its_identity(setting: TierSetting) -> None:
    bring_down(setting, CHAIN)
    setting.tier.takes = 0
    answers = setting.ask(CHAIN)
    assert setting.cache.stats.reserved == 0
    assert not forget(setting)
    setting.turn(seconds=2.0)
    setting.tier.takes = None
    setting.turn()
    assert [answer.outcome for answer in answers] == [PromotionOutcome.PARTLY]
    assert forget(setting)


@pytest.mark.parametrize("rule", [WriteRule.BACK, WriteRule.SECOND_USE, WriteRule.THROUGH])
def test_what_waits_to_be_written_and_has_left_memory_waits_no_more(rule: WriteRule) -> None:
    with tier_setting(write=rule) as setting:
        setting.tier.takes = 0
        setting.save(CHAIN)
        setting.turn()
        assert not setting.traffic.is_idle
        assert not forget(setting)
        setting.cache.clear(setting.name_space)
        assert forget(setting)
        assert setting.traffic.is_idle
        assert setting.traffic.waiting_bytes == 0
        assert setting.traffic.counts.dropped_gone > 0
        # Late news about the forgotten namespace has no effect.
        setting.chain.note_stored(setting.name_space, StoredBlocks(0, CHAIN, bytes(len(CHAIN))))
        setting.chain.forget(setting.name_space, 0, CHAIN)
        assert setting.traffic.is_idle
        answers: list[Promoted] = setting.ask(CHAIN)
        assert [answer.outcome for answer in answers] == [PromotionOutcome.NOTHING]


def test_a_request_of_a_peer_keeps_its_identity() -> None:
    spaces = SpaceTable()
    with tier_setting(on_learn=spaces.learn, on_forget=spaces.forget) as setting:
        assert spaces.find(fingerprint("model")) is not None
        with spaces.use(fingerprint("model")) as is_known, spaces.use(fingerprint("model")):
            assert is_known
            assert not forget(setting)
        assert spaces.find(fingerprint("model")) is not None
        with spaces.use(fingerprint("stranger")) as is_known:
            assert not is_known
            assert forget(setting)
        assert spaces.find(fingerprint("model")) is None
        setting.chain.learn(7, fingerprint("model"), HYBRID)
        found = spaces.find(fingerprint("model"))
        assert found is not None
        assert found.number == 7
