"""Which records are coded, by speeds that are made up: in bytes a second."""

from __future__ import annotations

import pytest

from kvoffload.tiers.coding_choice import (
    FIRST_TRIAL_BYTES,
    KNOWN_BYTES,
    TRIAL_BYTES,
    TRIAL_EVERY_BYTES,
    CodingChoice,
    Speed,
)

RECORD_BYTES = 1 << 20
RATIO = 1.5
GB = 1e9


def read(choice: CodingChoice, *, plain: float | None = None, coded: float | None = None, times: int = 8) -> None:
    """Reports reads at these rates to the choice."""
    for _ in range(times):
        if plain is not None:
            choice.told_read(KNOWN_BYTES, 0, KNOWN_BYTES / plain)
        if coded is not None:
            choice.told_read(0, KNOWN_BYTES, KNOWN_BYTES / coded)


def tell(speed: Speed, rate: float) -> None:
    speed.add(KNOWN_BYTES, KNOWN_BYTES / rate)


def wants(choice: CodingChoice, ratio: float = RATIO) -> bool:
    return choice.wants(RECORD_BYTES, ratio)


@pytest.mark.parametrize(
    ("plain", "coded", "codes"),
    [
        (1.0, 1.4, True),
        (1.0, 1.05, True),
        (1.0, 1.02, False),
        (1.0, 0.7, False),
        # Decoding by several threads may be faster than one of them decodes.
        (3.0, 4.4, True),
    ],
)
def test_what_was_read_sooner_is_sent(plain: float, coded: float, codes: bool) -> None:
    choice = CodingChoice()
    read(choice, plain=plain * GB, coded=coded * GB)
    tell(choice.decoding, 3 * GB)
    assert wants(choice) is codes


def test_sending_later_does_not_matter_while_sending_keeps_up() -> None:
    choice = CodingChoice()
    read(choice, plain=1.0 * GB, coded=1.4 * GB)
    tell(choice.sending, 1.2 * GB)
    tell(choice.encoding, 0.8 * GB)
    assert wants(choice)
    choice.is_behind = True
    assert not wants(choice)
    choice.is_behind = False
    assert wants(choice)


def test_what_is_sent_sooner_if_it_is_coded_is_coded_when_sending_is_behind() -> None:
    choice = CodingChoice()
    read(choice, plain=0.1 * GB, coded=0.15 * GB)
    tell(choice.sending, 0.1 * GB)
    tell(choice.encoding, 1.5 * GB)
    choice.is_behind = True
    assert wants(choice)


def test_nothing_is_coded_before_enough_was_moved() -> None:
    choice = CodingChoice()
    assert not wants(choice)
    choice.told_read(KNOWN_BYTES - 1, 0, 1.0)
    assert not wants(choice)
    choice.told_read(1, 0, 0.0)
    assert wants(choice)


@pytest.mark.parametrize(("link", "ratio", "codes"), [(1.0, 1.5, True), (1.9, 1.5, False), (1.9, 1.2, True)])
@pytest.mark.parametrize("is_read", [True, False])
def test_before_coded_records_were_read_decoding_must_keep_up(
    link: float, ratio: float, codes: bool, is_read: bool
) -> None:
    """A server that only sends assumes that readers have the same link."""
    choice = CodingChoice()
    if is_read:
        read(choice, plain=link * GB)
        tell(choice.sending, 0.01 * GB)
    else:
        tell(choice.sending, link * GB)
    tell(choice.decoding, 3 * GB)
    assert wants(choice, ratio) is codes


def test_periods_with_records_of_both_kinds_say_nothing() -> None:
    choice = CodingChoice()
    for _ in range(8):
        choice.told_read(KNOWN_BYTES, KNOWN_BYTES, 1.0)
    choice.told_read(0, 0, 1.0)
    assert not choice.plain.is_known
    assert not choice.coded.is_known
    choice.told_read(KNOWN_BYTES, KNOWN_BYTES // 8, 1.0)
    assert choice.plain.is_known


@pytest.mark.parametrize("codes", [True, False])
def test_now_and_then_some_go_the_other_way(codes: bool) -> None:
    choice = CodingChoice()
    read(choice, plain=1.0 * GB, coded=(1.4 if codes else 0.9) * GB)
    asked = [wants(choice) for _ in range(5 * TRIAL_EVERY_BYTES // RECORD_BYTES)]
    trials = TRIAL_BYTES // RECORD_BYTES
    begun = [at for at in range(1, len(asked)) if asked[at] is not codes and asked[at - 1] is codes]
    assert begun == [FIRST_TRIAL_BYTES * times // RECORD_BYTES for times in (1, 2, 4, 8, 16, 24, 32)]
    # All of a trial together, so that they are read together.
    assert all(asked[at : at + trials] == [not codes] * trials for at in begun)
    assert asked.count(not codes) == trials * len(begun)


def test_a_link_that_has_become_faster_is_seen() -> None:
    choice = CodingChoice()
    read(choice, plain=0.1 * GB, coded=0.15 * GB)
    assert wants(choice)
    read(choice, plain=5.0 * GB, coded=3.0 * GB, times=100)
    assert not wants(choice)


def test_others_are_asked_to_code_while_coded_records_come_sooner() -> None:
    choice = CodingChoice()
    assert not choice.asks(RECORD_BYTES, RATIO)
    read(choice, plain=0.1 * GB)
    assert choice.asks(RECORD_BYTES, RATIO)
    read(choice, coded=0.05 * GB)
    assert not choice.asks(RECORD_BYTES, RATIO)
    asked = [choice.asks(RECORD_BYTES, RATIO) for _ in range((FIRST_TRIAL_BYTES + TRIAL_BYTES) // RECORD_BYTES)]
    assert sum(asked) == TRIAL_BYTES // RECORD_BYTES, "once in a while, because that may have changed"


def test_one_get_of_coded_records_that_was_late_is_enough_to_ask_for_plain_ones() -> None:
    choice = CodingChoice()
    choice.told_late(RECORD_BYTES, 1.0)
    assert not choice.coded.is_known, "nothing is known of plain ones either"
    read(choice, plain=0.1 * GB)
    # Plain ones would not have come either.
    choice.told_late(RECORD_BYTES, 0.9 * RECORD_BYTES / (0.1 * GB))
    assert choice.asks(RECORD_BYTES, RATIO)
    choice.told_late(RECORD_BYTES, 1.1 * RECORD_BYTES / (0.1 * GB))
    assert not choice.asks(RECORD_BYTES, RATIO)


@pytest.mark.parametrize("size_bytes", [1, RECORD_BYTES])
def test_a_bad_moment_in_which_coded_records_were_late_is_put_right_by_some_trials(size_bytes: int) -> None:
    choice = CodingChoice()
    read(choice, plain=0.1 * GB)
    choice.told_late(size_bytes, 60.0)
    trials = 0
    while not choice.asks(0, RATIO):
        read(choice, coded=0.15 * GB, times=1)
        trials += 1
        assert trials < 8
    assert trials > 1
