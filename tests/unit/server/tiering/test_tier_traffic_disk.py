"""Traffic with a real disk below, some of whose records go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.tiers import RecordNames, RecordOutcome
from tests.kit.cache.cache_model import fingerprint
from tests.kit.server.disk_traffic import STEP_S, await_, bring_down, bring_up
from tests.kit.server.tier_setting import CHAIN, TierSetting, tier_setting
from tests.kit.tiers.disks import make_tier


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[TierSetting]:
    tier = make_tier(tmp_path / "disk")
    with tier_setting(tier=tier) as setting:
        yield setting


def test_blocks_go_down_and_come_up_as_they_were(setting: TierSetting) -> None:
    bring_down(setting, CHAIN)
    assert bring_up(setting, CHAIN) == 256


@pytest.mark.parametrize("outcome", [RecordOutcome.FAILED, RecordOutcome.LATE, RecordOutcome.UNAVAILABLE])
def test_a_fault_once_is_a_shorter_hit_once(setting: TierSetting, outcome: RecordOutcome) -> None:
    bring_down(setting, CHAIN)
    setting.faults[("get", 1)] = outcome
    assert bring_up(setting, CHAIN) < 256
    setting.faults.clear()
    setting.cache.clear(setting.name_space)
    assert bring_up(setting, CHAIN) == 256


def test_a_damaged_record_is_removed_from_the_disk(setting: TierSetting) -> None:
    bring_down(setting, CHAIN)
    setting.faults[("get", 1)] = RecordOutcome.DAMAGED
    assert bring_up(setting, CHAIN) < 256
    setting.faults.clear()
    second = RecordNames(fingerprint=fingerprint("model"), hashes=CHAIN[32:64])
    await_(setting, lambda: not setting.tier.contains(second).any())
    setting.cache.clear(setting.name_space)
    assert setting.ask(CHAIN)[0].boundary < 256


def test_a_disk_that_takes_nothing_is_asked_again(setting: TierSetting) -> None:
    setting.tier.takes = 0
    setting.save(CHAIN)
    setting.turn(STEP_S)
    assert not setting.traffic.is_idle
    setting.tier.takes = None
    setting.turn(STEP_S)
    await_(setting, lambda: setting.traffic.is_idle)
    setting.cache.clear(setting.name_space)
    assert bring_up(setting, CHAIN) == 256
