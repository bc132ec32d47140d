"""Blocks that are promoted for a request: all of them, some in time, none; the waiting requests, and the blocks that
stay."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.protocol import Promoted, PromotionOutcome
from kvoffload.server.tiering.promotion_parts import Wanted
from kvoffload.tiers import RecordOutcome
from tests.kit.cache.cache_model import HYBRID, PLAIN, make_chain
from tests.kit.server.held_writer import held_writer
from tests.kit.server.tier_setting import CHAIN, tier_setting

OTHER = make_chain(2, 16)
TOKENS = 256


@pytest.mark.parametrize("geometry", [PLAIN, HYBRID], ids=["attention", "hybrid"])
def test_what_memory_has_lost_comes_up_whole(geometry: Any) -> None:
    with tier_setting(geometry) as setting:
        setting.save_below(CHAIN)
        assert setting.load(CHAIN) == 0
        answers = setting.ask(CHAIN)
        setting.turn()
        assert [(one.outcome, one.boundary) for one in answers] == [(PromotionOutcome.COMPLETE, TOKENS)]
        assert setting.load(CHAIN) == TOKENS
        counts = setting.traffic.counts
        # Of a window and a state only what the boundary needs.
        assert counts.promoted == (16 if geometry is PLAIN else 16 + 2 + 1)
        assert sum(len(hashes) // 32 for _, hashes in setting.told) == counts.promoted


@pytest.mark.parametrize("geometry", [PLAIN, HYBRID], ids=["attention", "hybrid"])
def test_nothing_waits_for_another_thread_that_writes(geometry: Any) -> None:
    """Neither slots for what comes up, nor what has come, nor what is forgotten; it goes on when it is done."""
    with tier_setting(geometry) as setting:
        setting.save_below(CHAIN)
        with held_writer(setting.cache.core):
            answers = setting.ask(CHAIN)
            setting.turn()
            assert setting.chain.next_s() == pytest.approx(setting.now_s + 0.001)
        setting.tier.is_held = True
        setting.turn()
        assert not answers
        with held_writer(setting.cache.core):
            setting.tier.is_held = False
            setting.turn()
            setting.chain.forget(setting.name_space, 0, OTHER)
            assert not answers
        setting.turn()
        assert [(one.outcome, one.boundary) for one in answers] == [(PromotionOutcome.COMPLETE, TOKENS)]
        assert setting.load(CHAIN) == TOKENS


def test_who_has_left_meanwhile_leaves_no_slots_behind() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        with held_writer(setting.cache.core):
            answers = setting.ask(CHAIN, wait_ms=10)
            setting.turn(seconds=0.02)
            assert [one.outcome for one in answers] == [PromotionOutcome.PARTLY]
        setting.turn()
        assert setting.cache.stats.reserved == 0


def test_what_is_forgotten_while_another_thread_writes_is_not_stored() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        with held_writer(setting.cache.core):
            setting.ask(CHAIN)
            setting.chain.forget(setting.name_space, 0, CHAIN[:32])
        setting.turn()
        assert not setting.cache.lookup(setting.name_space, 0, CHAIN[:32]).any()


def test_what_is_there_is_not_read_again_and_does_not_give_way() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        setting.ask(CHAIN[: 32 * 8])
        setting.turn()
        assert setting.traffic.counts.promoted == 8
        setting.tier.is_held = True
        answers = setting.ask(CHAIN)
        setting.turn()
        setting.cache.evict(1 << 30)
        setting.tier.is_held = False
        setting.turn()
        assert answers[0].outcome is PromotionOutcome.COMPLETE
        assert setting.traffic.counts.promoted == 16
        assert setting.load(CHAIN) == TOKENS


def test_what_has_come_up_is_held_for_whoever_asked_for_it() -> None:
    with tier_setting(PLAIN, hold_s=0.5) as setting:
        setting.save_below(CHAIN)
        setting.ask(CHAIN)
        setting.turn()
        setting.cache.evict(1 << 30)
        assert setting.load(CHAIN) == TOKENS
        setting.turn(seconds=0.2)
        assert setting.cache.evict(1 << 30) == 16 * 4096


@pytest.mark.parametrize("chain", [b"", CHAIN, make_chain(9, 4)], ids=["empty", "in memory", "nowhere"])
def test_where_nothing_can_be_gained_the_answer_comes_at_once(chain: bytes) -> None:
    with tier_setting() as setting:
        setting.save(CHAIN)
        answers = setting.ask(chain)
        assert [one.outcome for one in answers] == [PromotionOutcome.NOTHING]
        unknown = setting.ask(CHAIN, local=TOKENS)
        assert [(one.outcome, one.boundary) for one in unknown] == [(PromotionOutcome.NOTHING, TOKENS)]


def test_a_prefix_that_comes_partly_in_time_is_used_as_far_as_it_came() -> None:
    with tier_setting(PLAIN, piece_bytes=4 * 4096, under_way_bytes=4 * 4096) as setting:
        setting.save_below(CHAIN)
        setting.tier.takes = 2
        answers = setting.ask(CHAIN, wait_ms=50)
        setting.turn()
        assert answers == []
        assert setting.traffic.next_s() == pytest.approx(setting.now_s - 0.004 + 0.05)
        setting.turn(seconds=0.1)
        assert [one.outcome for one in answers] == [PromotionOutcome.PARTLY]
        assert setting.load(CHAIN) == 8 * 16
        assert setting.traffic.counts.late == 1
        # Records that no request waits for any more are not read.
        setting.tier.takes = 100
        setting.turn()
        assert setting.traffic.counts.promoted == 8


def test_requests_with_the_same_prefix_read_it_once() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        setting.tier.is_held = True
        answers = [setting.ask(CHAIN), setting.ask(CHAIN[: 32 * 10]), setting.ask(CHAIN, wait_ms=20)]
        setting.turn(seconds=0.01)
        assert [len(one) for one in answers] == [0, 0, 1]
        setting.tier.is_held = False
        setting.turn()
        assert [one[0].outcome for one in answers[:2]] == [PromotionOutcome.COMPLETE] * 2
        assert [verb for verb, _ in setting.tier.asked].count("get") == 1
        assert setting.traffic.counts.promoted == 16


def test_a_bad_record_ends_the_prefix_and_is_never_asked_for_again() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        setting.faults[("get", 5)] = RecordOutcome.DAMAGED
        answers = setting.ask(CHAIN)
        setting.turn()
        assert answers[0].outcome is PromotionOutcome.PARTLY
        assert setting.load(CHAIN) == 5 * 16
        assert setting.traffic.counts.quarantined == 1
        setting.faults.clear()
        setting.cache.clear(setting.name_space)
        again = setting.ask(CHAIN)
        assert again == []
        setting.turn()
        assert (again[0].outcome, again[0].boundary) == (PromotionOutcome.COMPLETE, 5 * 16)


def test_what_is_forgotten_while_it_waits_for_its_turn_does_not_come_up() -> None:
    with tier_setting(PLAIN, piece_bytes=4 * 4096, under_way_bytes=4 * 4096) as setting:
        setting.save_below(CHAIN)
        setting.tier.is_held = True
        answers = setting.ask(CHAIN)
        # The tier still has it: it cannot be removed now.
        setting.faults["remove", 0] = RecordOutcome.UNAVAILABLE
        setting.chain.forget(setting.name_space, 0, CHAIN[32 * 9 : 32 * 10])
        setting.tier.is_held = False
        setting.turn(times=16)
        assert answers[0].outcome is PromotionOutcome.PARTLY
        assert setting.load(CHAIN) == 9 * 16
        setting.faults.clear()


def test_what_is_forgotten_is_not_brought_by_its_name_either() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        setting.faults["remove", 0] = RecordOutcome.UNAVAILABLE
        setting.chain.forget(setting.name_space, 0, CHAIN[:32])
        space = setting.traffic.find_space(setting.name_space)
        assert space is not None
        assert setting.chain.find_near(space.names(0, CHAIN[:64])).tolist() == [False, True]
        answers: list[Promoted] = []
        setting.chain.bring(Wanted(setting.name_space, 0, CHAIN[:64], setting.now_s + 1, answers.append), setting.now_s)
        setting.turn()
        assert [one.outcome for one in answers] == [PromotionOutcome.PARTLY]
        assert setting.cache.lookup(setting.name_space, 0, CHAIN[:64]).tolist() == [False, True]
        setting.faults.clear()


def test_what_came_up_while_it_was_removed_from_memory_is_forgotten_with_the_rest() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        setting.ask(CHAIN)
        setting.turn()
        setting.chain.forget(setting.name_space, 0, CHAIN[32:64])
        assert setting.load(CHAIN) == 16


@pytest.mark.parametrize(
    "outcome", [RecordOutcome.MISSING, RecordOutcome.LATE, RecordOutcome.UNAVAILABLE, RecordOutcome.FAILED]
)
def test_a_record_that_does_not_come_is_a_shorter_hit(outcome: RecordOutcome) -> None:
    with tier_setting() as setting:
        setting.save_below(CHAIN)
        setting.faults[("get", 0)] = outcome
        answers = setting.ask(CHAIN)
        setting.turn()
        assert answers[0].outcome is PromotionOutcome.PARTLY
        assert setting.load(CHAIN) == 0
        assert setting.cache.stats.reserved == 0


def test_a_request_that_computing_serves_sooner_does_not_wait() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        # Not measured yet: it is tried.
        first = setting.ask(CHAIN[: 32 * 4], prefill_ns=1)
        setting.turn(seconds=0.1)
        assert first[0].outcome is PromotionOutcome.COMPLETE
        rate = 4 * 4096 / 0.1
        needed_ns = int(12 * 4096 / rate / (12 * 16) * 1e9)
        refused = setting.ask(CHAIN, prefill_ns=needed_ns // 2)
        assert refused[0].outcome is PromotionOutcome.TOO_SLOW
        assert setting.traffic.counts.too_slow == 1
        taken = setting.ask(CHAIN, prefill_ns=needed_ns * 2)
        setting.turn()
        assert taken[0].outcome is PromotionOutcome.COMPLETE


def test_what_is_queued_in_front_of_a_request_counts() -> None:
    with tier_setting(PLAIN, piece_bytes=4096, under_way_bytes=4096) as setting:
        setting.save_below(CHAIN)
        setting.save_below(OTHER)
        first = setting.ask(CHAIN[: 32 * 4])
        setting.turn(seconds=0.1, times=8)
        assert first[0].outcome is PromotionOutcome.COMPLETE
        block_s = 0.1
        alone_ns = int(8 * block_s / (8 * 16) * 1e9)
        setting.tier.is_held = True
        queued = setting.ask(CHAIN, wait_ms=60_000)
        assert setting.ask(OTHER[: 32 * 8], prefill_ns=alone_ns * 2)[0].outcome is PromotionOutcome.TOO_SLOW
        setting.tier.is_held = False
        setting.turn(seconds=0.1, times=40)
        assert queued[0].outcome is PromotionOutcome.COMPLETE
        taken = setting.ask(OTHER[: 32 * 8], wait_ms=60_000, prefill_ns=alone_ns * 2)
        setting.turn(seconds=0.1, times=20)
        assert [one.outcome for one in taken] == [PromotionOutcome.COMPLETE]


def test_what_came_in_time_of_a_hybrid_is_used_where_all_its_layers_were_kept() -> None:
    with tier_setting(piece_bytes=4096, under_way_bytes=4096) as setting:
        setting.save_below(CHAIN)
        setting.tier.takes = 9
        answers = setting.ask(CHAIN, wait_ms=50)
        setting.turn(times=30)
        setting.turn(seconds=0.1)
        assert [one.outcome for one in answers] == [PromotionOutcome.PARTLY]
        assert setting.load(CHAIN) == 0, "none of its states came"
        setting.tier.takes = None
        again = setting.ask(CHAIN, wait_ms=5000)
        setting.turn(times=60)
        assert [one.outcome for one in again] == [PromotionOutcome.COMPLETE]
        assert setting.load(CHAIN) == TOKENS


def test_a_tier_that_was_slow_is_tried_again() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        hung = setting.ask(CHAIN[: 32 * 4])
        setting.turn(seconds=100.0, times=1)  # a disk that has hung
        setting.turn()
        assert hung[0].outcome is PromotionOutcome.COMPLETE
        setting.cache.clear(setting.name_space)
        answers = [setting.ask(CHAIN, prefill_ns=1_000_000) for _ in range(16)]
        assert [one[0].outcome for one in answers[:15]] == [PromotionOutcome.TOO_SLOW] * 15
        setting.turn()
        assert answers[15][0].outcome is PromotionOutcome.COMPLETE
        setting.cache.clear(setting.name_space)
        again = setting.ask(CHAIN, prefill_ns=1_000_000)
        setting.turn()
        assert again[0].outcome is PromotionOutcome.COMPLETE
        assert setting.traffic.counts.too_slow == 15


def test_small_records_are_not_all_asked_for_at_once() -> None:
    with tier_setting(PLAIN, piece_bytes=4096) as setting:
        setting.save_below(CHAIN)
        setting.tier.is_held = True
        setting.tier.asked.clear()
        answers = setting.ask(CHAIN)
        setting.turn()
        assert setting.tier.asked == [("get", 1)] * 8
        setting.tier.is_held = False
        setting.turn()
        assert answers[0].outcome is PromotionOutcome.COMPLETE
        assert setting.load(CHAIN) == TOKENS


def test_without_room_in_memory_a_request_has_what_there_is() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        taken = setting.cache.reserve(setting.session, setting.name_space, 0, count=256)
        answers = setting.ask(CHAIN)
        setting.turn()
        assert answers[0].outcome is PromotionOutcome.PARTLY
        assert setting.traffic.counts.without_room == 1
        setting.cache.abort(setting.session, taken.tickets)


def test_a_tier_that_takes_nothing_now_is_asked_again() -> None:
    with tier_setting() as setting:
        setting.save_below(CHAIN)
        setting.tier.takes = 0
        answers = setting.ask(CHAIN)
        setting.turn()
        assert answers == []
        assert setting.cache.stats.reserved == 0
        setting.tier.takes = 100
        setting.turn()
        assert answers[0].outcome is PromotionOutcome.COMPLETE
        assert setting.load(CHAIN) == TOKENS


def test_a_record_of_which_only_some_shards_can_be_asked_for_is_not_served() -> None:
    with tier_setting() as setting:
        setting.save_below(CHAIN)
        setting.tier.takes = 1
        answers = setting.ask(CHAIN)
        setting.turn()
        setting.tier.takes = 100
        setting.turn()
        assert answers[0].outcome is PromotionOutcome.PARTLY
        assert setting.load(CHAIN) == 0


def test_too_many_requests_have_what_is_in_memory() -> None:
    with tier_setting(PLAIN, promotion_limit=1) as setting:
        setting.save_below(CHAIN)
        setting.tier.is_held = True
        first, second = setting.ask(CHAIN), setting.ask(CHAIN)
        assert first == []
        assert second[0].outcome is PromotionOutcome.NOTHING


def test_peers_and_engines_do_not_keep_one_another_out() -> None:
    with tier_setting(PLAIN, promotion_limit=1) as setting:
        setting.save_below(CHAIN)
        setting.save_below(OTHER)
        setting.tier.is_held = True
        for_peers: list[list[Promoted]] = [[], []]
        for answers in for_peers:
            wanted = Wanted(setting.name_space, 0, OTHER[:64], setting.now_s + 1, answers.append)
            setting.chain.bring(wanted, setting.now_s)
        assert [len(one) for one in for_peers] == [0, 1]
        answers = setting.ask(CHAIN)
        assert answers == []
        setting.tier.is_held = False
        setting.turn()
        assert answers[0].outcome is PromotionOutcome.COMPLETE
        assert for_peers[0][0].outcome is PromotionOutcome.COMPLETE
        wanted = Wanted(setting.name_space, 0, OTHER[64:128], setting.now_s + 1, for_peers[1].append)
        setting.chain.bring(wanted, setting.now_s)
        setting.turn()
        assert for_peers[1][1].outcome is PromotionOutcome.COMPLETE
