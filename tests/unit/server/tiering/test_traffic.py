"""Counts of a tier's traffic, and its end."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from kvoffload.errors import TierError
from kvoffload.protocol import Prefetch, PromotionOutcome
from kvoffload.tiers import TierState
from tests.kit.cache.cache_model import HYBRID, PLAIN, make_chain
from tests.kit.server.tier_setting import CHAIN, TierSetting, tier_setting


def test_every_change_of_a_place_is_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    with tier_setting(PLAIN) as setting:
        states = [
            (TierState.OPENING, ""),
            (TierState.READY, ""),
            (TierState.READY, ""),
            (TierState.READ_ONLY, "the disk is full"),
            (TierState.READ_ONLY, "the disk is full"),
            (TierState.READY, ""),
            (TierState.READY, "there is room for 4 of 8 segments"),
            (TierState.READY, "there is room for 4 of 8 segments"),
            (TierState.READY, ""),
        ]
        (healthy,) = setting.tier.inner.health()
        for state, reason in states:
            found = [replace(healthy, state=state, reason=reason)]
            monkeypatch.setattr(setting.tier.inner, "health", found.copy)
            setting.traffic.look()
    said = [record.message for record in caplog.records if "disk tier" in record.message]
    assert said == [
        "disk tier memory is ready: 0 records",
        "disk tier memory is read_only: the disk is full",
        "disk tier memory is ready: 0 records",
        "disk tier memory is ready: there is room for 4 of 8 segments",
        "disk tier memory is ready: 0 records",
    ]


def test_places_that_come_and_go_are_told_by_their_names(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members of a fleet do."""
    caplog.set_level(logging.INFO)
    with tier_setting(PLAIN) as setting:
        (healthy,) = setting.tier.inner.health()
        gone = {"state": TierState.ABSENT, "reason": "no answer"}
        for places in (
            {},
            {"a": {}},
            {"a": {}, "b": {}, "c": gone},
            {"c": gone},
            {"a": {}, "c": gone},
        ):
            found = [replace(healthy, name=name, **changed) for name, changed in places.items()]
            monkeypatch.setattr(setting.tier.inner, "health", found.copy)
            setting.traffic.look()
    said = [record.message for record in caplog.records if "disk tier" in record.message]
    assert said == [
        "disk tier a is ready: 0 records",
        "disk tier b is ready: 0 records",
        "disk tier c is absent: no answer",
        "disk tier a is ready: 0 records",
    ]


def test_a_prefetch_brings_up_what_a_request_will_ask_for() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        setting.chain.prefetch(Prefetch(name_space=setting.name_space, chain=CHAIN), setting.now_s)
        setting.turn()
        assert setting.load(CHAIN) == 256


def test_at_the_end_everybody_is_answered_and_no_slot_is_touched_afterwards() -> None:
    setting = TierSetting(PLAIN)
    setting.save_below(CHAIN)
    setting.tier.is_held = True
    answers: list[Any] = setting.ask(CHAIN, wait_ms=60_000)
    setting.turn()
    setting.close()
    assert [one.outcome for one in answers] == [PromotionOutcome.PARTLY]


def test_without_memory_nothing_is_asked() -> None:
    with tier_setting(PLAIN) as setting:
        assert setting.ask(CHAIN)[0].outcome is PromotionOutcome.NOTHING
        assert setting.traffic.next_s() is None
        assert setting.traffic.fileno() == setting.tier.inner.fileno()


@pytest.mark.parametrize("geometry", [PLAIN, HYBRID], ids=["attention", "hybrid"])
def test_what_an_engine_does_not_trust_is_removed_below_too(geometry: Any) -> None:
    with tier_setting(geometry) as setting:
        setting.save_below(CHAIN)
        setting.traffic.forget(setting.name_space, 0, CHAIN[32 * 4 : 32 * 6])
        # At once, though the tier has not removed it yet.
        setting.tier.is_held = True
        answers = setting.ask(CHAIN)
        setting.tier.is_held = False
        setting.turn()
        assert setting.load(CHAIN) == 4 * 16
        assert answers[0].boundary == 4 * 16
        setting.traffic.forget(999, 0, CHAIN)


def test_what_is_forgotten_on_its_way_down_does_not_stay_there() -> None:
    with tier_setting(PLAIN) as setting:
        setting.tier.is_held = True
        setting.save(CHAIN)
        setting.turn()
        setting.traffic.forget(setting.name_space, 0, CHAIN[:32])
        setting.tier.is_held = False
        setting.turn()
        setting.cache.clear(setting.name_space)
        assert setting.ask(CHAIN)[0].outcome is PromotionOutcome.NOTHING
        # It may be written again.
        setting.save_below(CHAIN)
        setting.ask(CHAIN)
        setting.turn()
        assert setting.load(CHAIN) == 256


def test_what_is_forgotten_on_its_way_up_does_not_arrive() -> None:
    with tier_setting(PLAIN) as setting:
        setting.save_below(CHAIN)
        setting.tier.is_held = True
        setting.ask(CHAIN)
        setting.turn()
        setting.traffic.forget(setting.name_space, 0, CHAIN[32 * 3 : 32 * 4])
        setting.tier.is_held = False
        setting.turn()
        assert setting.load(CHAIN) == 3 * 16


def test_what_is_held_for_those_who_wait_is_bounded() -> None:
    """Engines have room to save, however many wait."""
    with tier_setting(PLAIN, held_share=0.25) as setting:
        chains = [make_chain(number, 16) for number in range(8)]
        for chain in chains:
            setting.save_below(chain)
        setting.tier.is_held = True
        answers = [setting.ask(chain) for chain in chains]
        setting.turn()
        stats = setting.cache.stats
        assert 0 < stats.reserved * 4096 <= stats.capacity_bytes // 4
        room = setting.cache.reserve(setting.session, setting.name_space, 0, count=128)
        assert len(room) == 128
        setting.cache.abort(setting.session, room.tickets)
        setting.tier.is_held = False
        setting.turn()
        assert all(len(one) == 1 for one in answers)
        assert setting.traffic.counts.without_room > 0


def test_a_place_that_hangs_at_the_end_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = TierSetting(PLAIN)

    def hang(timeout_s: float = 0.0) -> None:
        raise TierError("the disk tier was not closed: it hangs", remedy="")

    monkeypatch.setattr(setting.tier.inner, "close", hang)
    setting.close()
    assert [record.message for record in caplog.records] == ["disk tier: the disk tier was not closed: it hangs"]
