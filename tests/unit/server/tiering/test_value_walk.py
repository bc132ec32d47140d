"""Blocks that a server gives to others when it ends, or when one of them comes back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.cache.settings import DEFAULT_POLICY
from kvoffload.server.tiering.settings import Wants, WriteRule
from kvoffload.server.tiering.value_walk import ValueWalk
from tests.kit.cache.cache_model import PLAIN, SMALL, make_chain
from tests.kit.server.tier_setting import CHAIN, TierSetting, tier_setting

BLOCK = 4096
CHAINS = [make_chain(number, 4) for number in range(1, 11)]


@pytest.fixture(autouse=True)
def with_the_default_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierSetting, "cache_settings", replace(SMALL, policy=DEFAULT_POLICY))


def want_all(hashes: bytes) -> npt.NDArray[np.bool_]:
    return np.ones(len(hashes) // 32, np.bool_)


def want_none(hashes: bytes) -> npt.NDArray[np.bool_]:
    return np.zeros(len(hashes) // 32, np.bool_)


def fill(setting: TierSetting) -> None:
    for chain in CHAINS[:-1]:
        setting.save(chain)
    for _ in range(3):
        setting.load(CHAINS[4])
        setting.load(CHAINS[7])
    # The policy hears of those loads no later than with the next save.
    setting.save(CHAINS[-1])
    setting.turn()


def walk(setting: TierSetting, wants: Wants = want_all, part_bytes: int = 6 * BLOCK) -> list[bytes]:
    """Returns the hashes in the order in which they come."""
    steps = ValueWalk(setting.cache, setting.traffic.spaces, wants, part_bytes=part_bytes)
    parts = [stored.hashes for found in steps if found is not None for stored in [found[1]]]
    assert max(map(len, parts), default=0) <= 32 * part_bytes // BLOCK
    joined = b"".join(parts)
    return [joined[at : at + 32] for at in range(0, len(joined), 32)]


def rows(chain: bytes) -> set[bytes]:
    return {chain[at : at + 32] for at in range(0, len(chain), 32)}


def test_blocks_come_once_and_by_what_they_are_worth() -> None:
    with tier_setting(PLAIN, wants=want_none) as setting:
        fill(setting)
        came = walk(setting)
        assert len(came) == len(set(came)) == 40
        values = setting.cache.find_values(setting.name_space, 0, b"".join(came))
        assert values[:8].min() >= values[8:].max()
        assert set(came[:8]) == rows(CHAINS[4]) | rows(CHAINS[7])


def test_blocks_that_are_not_wanted_are_left_out() -> None:
    with tier_setting(PLAIN, wants=want_none) as setting:
        fill(setting)

        def wants(hashes: bytes) -> npt.NDArray[np.bool_]:
            return np.array([hashes[at : at + 32] in rows(CHAINS[0]) for at in range(0, len(hashes), 32)], np.bool_)

        assert set(walk(setting, wants)) == rows(CHAINS[0])
        assert walk(setting, want_none) == []


def test_all_groups_of_all_identities_are_walked_through() -> None:
    with tier_setting(wants=want_none) as setting:
        setting.save(CHAIN)
        assert len(walk(setting, part_bytes=1 << 20)) == 16 + 8 + 4


class SecondsByRecord(dict[tuple[str, int], Any]):
    """Faults of a tier: there are none, but each record that is put takes a second of the setting's clock."""

    def __init__(self, setting: TierSetting) -> None:
        super().__init__()
        self._setting = setting

    def get(self, *_: Any) -> Any:
        self._setting.now_s += 1.0


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> Iterator[TierSetting]:
    """A server with 40 blocks that no other one has, before a tier that takes one at a time."""
    setting = TierSetting(
        PLAIN, wants=want_none, on_leave=lambda: want_all, piece_bytes=BLOCK, under_way_bytes=BLOCK, queue_s=1e9
    )
    fill(setting)
    assert count_written(setting) == [0] * 10
    monkeypatch.setattr(setting.tier.inner, "knows_all", False)
    monkeypatch.setattr(setting.tier.inner, "close", lambda timeout_s: None)
    setting.faults = SecondsByRecord(setting)
    yield setting
    setting.cache.close()


def count_written(setting: TierSetting) -> list[int]:
    """Counts for each prompt the blocks that the tier has."""
    space = setting.traffic.find_space(setting.name_space)
    assert space is not None
    return [int(setting.tier.inner.contains(space.names(0, chain)).sum()) for chain in CHAINS]


def test_a_server_that_ends_hands_over_the_blocks_that_only_it_has(
    leaving: TierSetting, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    leaving.traffic.close(lambda: leaving.now_s, until_s=leaving.now_s + 1000.0)
    assert count_written(leaving) == [4] * 10
    assert "disk tier: 40 blocks (160KiB) that only this server had were handed over, 0 were left" in caplog.text
    assert leaving.held_bytes == 0


def test_when_time_is_short_the_blocks_that_are_worth_most_are_handed_over(
    leaving: TierSetting, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    until_s = leaving.now_s + 15.0
    leaving.traffic.close(lambda: leaving.now_s, until_s=until_s)
    assert until_s <= leaving.now_s <= until_s + 1.0, "one record may be under way at the end"
    counts = count_written(leaving)
    assert counts[4] == counts[7] == 4
    assert 14 <= sum(counts) <= 16
    ended = leaving.traffic.counts.written
    assert sum(counts) - 1 <= ended <= sum(counts)
    assert f"{ended} blocks" in caplog.text
    assert f"{40 - ended} were left" in caplog.text


def test_a_server_whose_memory_stays_hands_nothing_over(leaving: TierSetting) -> None:
    leaving.traffic.close(lambda: leaving.now_s)
    assert count_written(leaving) == [0] * 10


def test_blocks_that_wait_to_be_written_back_go_by_what_they_are_worth() -> None:
    with tier_setting(PLAIN, write=WriteRule.BACK, kept_share=1.0, queue_share=1.0, piece_bytes=4 * BLOCK) as setting:
        fill(setting)
        setting.traffic.writes.flush()
        setting.tier.takes = 2
        setting.turn()
        assert [at for at, count in enumerate(count_written(setting)) if count] == [4, 7]


def test_blocks_whose_home_came_back_are_written_while_the_server_runs() -> None:
    found: list[Wants] = []
    with tier_setting(PLAIN, wants=want_none, find_moved=lambda: found.pop() if found else None) as setting:
        fill(setting)
        setting.traffic.look()
        setting.turn(times=64)
        assert count_written(setting) == [0] * 10
        found.append(want_all)
        setting.traffic.look()
        assert setting.traffic.next_s() is not None, "the loop goes on at once"
        setting.turn(times=64)
        assert count_written(setting) == [4] * 10
        assert setting.traffic.next_s() is None


def test_a_part_at_a_time_waits_for_a_busy_tier() -> None:
    """The queue stays short, so that an engine's own writes are not dropped."""
    found: list[Wants] = [want_all]
    settings: dict[str, Any] = {"piece_bytes": BLOCK, "under_way_bytes": 4 * BLOCK}
    with tier_setting(PLAIN, wants=want_none, find_moved=lambda: found.pop() if found else None, **settings) as setting:
        fill(setting)
        setting.tier.is_held = True
        setting.traffic.look()
        setting.turn(times=64)
        assert 0 < setting.traffic.waiting_bytes < 8 * BLOCK
        setting.tier.is_held = False
        setting.turn(times=128)
        assert count_written(setting) == [4] * 10
