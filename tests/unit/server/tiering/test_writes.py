"""Blocks that are written down: when, how far behind, what is dropped, and that nothing stays held."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvoffload.cache import CacheGeometry, CacheGroup, StoredBlocks
from kvoffload.server.tiering.settings import PIECE_BLOCKS, WriteRule
from kvoffload.tiers import RecordOutcome
from tests.kit.cache.cache_model import HYBRID, PLAIN, SMALL, block_hashes, make_chain
from tests.kit.server.tier_setting import CHAIN, TierSetting, tier_setting

BLOCK = 4096
SMALLEST = CacheGeometry(hash_block_size=16, groups=(CacheGroup(rule=PLAIN.groups[0].rule, record_bytes=8),))


@pytest.fixture
def many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierSetting, "cache_settings", replace(SMALL, entry_limit=16 * PIECE_BLOCKS))


def written(setting: TierSetting, chain: bytes, group: int = 0) -> int:
    """How many of a prompt's blocks the tier has, with all shards."""
    names = b"".join(block_hashes(chain, setting.geometry, group))
    space = setting.traffic.find_space(setting.name_space)
    assert space is not None
    found = [setting.tier.inner.contains(space.names(group, names, shard)) for shard in range(space.shards(group))]
    return int(np.logical_and.reduce(found).sum())


def test_all_groups_and_shards_are_written_as_soon_as_they_are_stored() -> None:
    with tier_setting() as setting:
        setting.save(CHAIN)
        setting.turn()
        assert [written(setting, CHAIN, group) for group in range(3)] == [16, 8, 4]
        counts = setting.traffic.counts
        assert counts.written == 28
        assert counts.written_bytes == 16 * 2 * 1000 + 8 * 4096 + 4 * 40 * 1024


def test_what_the_tier_has_is_not_written_again() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        setting.save(CHAIN)
        setting.turn()
        assert setting.traffic.counts.written == 16
        assert [verb for verb, _ in setting.tier.asked] == ["put"]


def test_consecutive_blocks_go_together_in_pieces() -> None:
    with tier_setting(PLAIN, piece_bytes=6 * BLOCK) as setting:
        setting.save(CHAIN)
        setting.turn()
        assert setting.tier.asked == [("put", 6), ("put", 6), ("put", 4)]


@pytest.mark.usefixtures("many_entries")
def test_a_turn_writes_a_bounded_number_of_small_blocks() -> None:
    with tier_setting(SMALLEST, queue_s=1e9) as setting:
        setting.save(make_chain(1, 10 * PIECE_BLOCKS))
        setting.tier.is_held = True
        turns = []
        for _ in range(4):
            setting.turn(times=1)
            turns.append(setting.tier.asked[:])
            setting.tier.asked.clear()
            is_due = setting.traffic.next_s() == setting.now_s
            assert is_due is (len(turns) == 1)
        assert turns == [[("put", PIECE_BLOCKS)] * 4] * 2 + [[]] * 2
        # So a bounded number ends in a turn, too.
        setting.tier.is_held = False
        setting.turn()
        assert setting.traffic.counts.written == 10 * PIECE_BLOCKS


@pytest.mark.usefixtures("many_entries")
def test_what_needs_no_write_takes_its_part_of_a_turn() -> None:
    chain = make_chain(1, 6 * PIECE_BLOCKS)
    with tier_setting(SMALLEST, queue_s=1e9) as setting:
        setting.save(chain)
        setting.cache.clear(setting.name_space)
        setting.turn(times=1)
        assert setting.traffic.counts.dropped_gone == 4 * PIECE_BLOCKS
        assert setting.traffic.next_s() == setting.now_s
        setting.turn(times=1)
        assert setting.traffic.is_idle


@pytest.mark.usefixtures("many_entries")
def test_small_blocks_that_are_saved_one_by_one_make_pieces_that_are_bounded() -> None:
    with tier_setting(SMALLEST, queue_s=1e9) as setting:
        for number in range(3):
            setting.save(make_chain(number, PIECE_BLOCKS // 2))
        setting.turn(times=1)
        assert setting.tier.asked == [("put", PIECE_BLOCKS), ("put", PIECE_BLOCKS // 2)]


def test_a_slow_tier_drops_what_would_wait_too_long_and_counts_it() -> None:
    with tier_setting(PLAIN, queue_s=0.5, piece_bytes=16 * BLOCK) as setting:
        setting.save(CHAIN)
        setting.turn(seconds=0.1)  # 640 KiB/s
        setting.tier.is_held = True
        chains = [make_chain(number, 16) for number in range(2, 12)]
        for chain in chains:
            setting.save(chain)
            setting.turn(times=1, seconds=0)
        counts = setting.traffic.counts
        assert 0 < counts.dropped_full < 160
        assert counts.dropped_full % 16 == 0
        waiting_s = setting.traffic.waiting_bytes / setting.traffic.writes.rate.bytes_per_s
        assert waiting_s <= 0.5
        setting.tier.is_held = False
        setting.turn(times=16)
        assert counts.written + counts.dropped_full + counts.dropped_gone == 16 * 11
        # The first of them went, not the last: a prefix has no hole in front.
        assert written(setting, chains[0]) == 16
        assert written(setting, chains[-1]) == 0


def test_what_memory_has_lost_before_its_turn_is_counted() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save(CHAIN)
        setting.cache.clear(setting.name_space)
        setting.turn()
        assert setting.traffic.counts.dropped_gone == 16
        assert setting.traffic.is_idle


def test_what_is_under_way_is_bounded_and_held_so_long() -> None:
    with tier_setting(PLAIN, piece_bytes=4 * BLOCK, under_way_bytes=8 * BLOCK) as setting:
        setting.tier.is_held = True
        setting.save(CHAIN)
        setting.turn()
        assert setting.cache.stats.leases == 2
        assert setting.cache.evict(1 << 30) == 8 * BLOCK
        setting.tier.is_held = False
        setting.turn(times=8)
        assert setting.traffic.counts.written == 8
        assert setting.traffic.counts.dropped_gone == 8


@pytest.mark.parametrize("outcome", [RecordOutcome.UNAVAILABLE, RecordOutcome.LATE, RecordOutcome.OVER_BUDGET])
def test_what_the_tier_does_not_take_is_counted_and_stays_in_memory(outcome: RecordOutcome) -> None:
    with tier_setting(PLAIN) as setting:
        setting.faults[("put", 3)] = outcome
        setting.save(CHAIN)
        setting.turn()
        assert (setting.traffic.counts.failed, setting.traffic.counts.written) == (1, 15)
        assert setting.load(CHAIN) == 256


def test_a_block_that_memory_has_damaged_is_forgotten_there() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save(CHAIN)
        found = setting.cache.acquire_entries(setting.session, setting.name_space, 0, CHAIN)
        setting.cache.view(int(found.groups[0].addresses[7]), 8)[0] ^= 1
        setting.cache.release(setting.session, found.lease)
        setting.turn()
        assert setting.traffic.counts.quarantined == 1
        assert setting.load(CHAIN) == 7 * 16
        assert written(setting, CHAIN) == 15


def test_a_full_tier_is_asked_again_later() -> None:
    with tier_setting() as setting:
        setting.tier.takes = 0
        setting.save(CHAIN)
        setting.turn()
        assert setting.held_bytes == 0
        setting.tier.takes = 100
        setting.turn()
        assert setting.traffic.counts.written == 28


def test_write_back_waits_until_memory_needs_the_room() -> None:
    with tier_setting(PLAIN, write=WriteRule.BACK, kept_share=48 * BLOCK / (1 << 20)) as setting:
        chains = [make_chain(number, 16) for number in range(5)]
        for chain in chains[:3]:
            setting.save(chain)
        setting.turn()
        assert setting.traffic.counts.written == 0
        for chain in chains[3:]:
            setting.save(chain)
        setting.turn()
        assert [written(setting, chain) for chain in chains] == [16, 16, 0, 0, 0]


def test_one_piece_may_wait_however_slow_the_tier_seems() -> None:
    """A moment in which the machine had other things to do is measured too."""
    with tier_setting(PLAIN, queue_s=0.5, piece_bytes=32 * BLOCK) as setting:
        setting.save(CHAIN)
        setting.turn(seconds=60.0)
        setting.tier.is_held = True
        chains = [make_chain(number, 16) for number in (2, 3, 4)]
        for chain in chains:
            setting.save(chain)
            setting.turn(times=1, seconds=0)
        assert setting.traffic.counts.dropped_full == 16
        setting.tier.is_held = False
        setting.turn(times=4)
        assert [written(setting, chain) for chain in chains] == [16, 16, 0]


def test_write_back_is_done_when_the_server_ends() -> None:
    setting = TierSetting(HYBRID, write=WriteRule.BACK)
    setting.save(CHAIN)
    setting.turn()
    assert setting.traffic.counts.written == 0
    setting.close()
    assert [written(setting, CHAIN, group) for group in range(3)] == [16, 8, 4]


def test_at_the_end_no_queue_is_too_long() -> None:
    setting = TierSetting(PLAIN, write=WriteRule.BACK, queue_s=1e-9)
    chains = [make_chain(number, 16) for number in range(3)]
    for chain in chains:
        setting.save(chain)
    setting.close()
    assert [written(setting, chain) for chain in chains] == [16, 16, 16]
    assert setting.traffic.counts.dropped_full == 0


def test_only_what_was_loaded_is_written_where_a_second_use_is_asked_for() -> None:
    with tier_setting(PLAIN, write=WriteRule.SECOND_USE, kept_share=16 * BLOCK / (1 << 20)) as setting:
        setting.save(CHAIN)
        assert setting.load(CHAIN[: 32 * 6]) == 6 * 16
        setting.save(make_chain(2, 16))
        setting.turn()
        assert written(setting, CHAIN) == 6
        # Its own reading of them was no use of them.
        assert setting.cache.find_used(setting.name_space, 0, CHAIN).sum() == 6


def test_blocks_of_an_unknown_identity_are_left_alone() -> None:
    with tier_setting(PLAIN) as setting:
        setting.traffic.note_stored(77, StoredBlocks(0, CHAIN, b""))
        setting.traffic.note_stored(setting.name_space, StoredBlocks(0, b"", b""))
        setting.turn()
        assert setting.tier.asked == []
