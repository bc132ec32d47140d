"""Traffic with a real disk below, some of whose records go wrong."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffload.tiers import RecordNames, RecordOutcome
from tests.kit.server.tier_setting import CHAIN, TierSetting, tier_setting
from tests.unit.cache.cache_model import fingerprint
from tests.unit.tiers.test_disk import make_tier

STEP_S = 0.001
WAIT_S = 30.0


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[TierSetting]:
    tier = make_tier(tmp_path / "disk")
    with tier_setting(tier=tier) as setting:
        yield setting


def await_(setting: TierSetting, is_over: Callable[[], bool]) -> None:
    while not is_over():
        assert select.select([setting.tier], [], [], WAIT_S)[0]
        setting.turn(STEP_S, times=1)


def bring_down(setting: TierSetting, chain: bytes) -> None:
    setting.save(chain)
    setting.turn(STEP_S)
    await_(setting, lambda: setting.traffic.is_idle)
    setting.cache.clear(setting.name_space)


def bring_up(setting: TierSetting, chain: bytes) -> int:
    answers = setting.ask(chain)
    await_(setting, lambda: bool(answers))
    return setting.load(chain)


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
