"""Which records are coded, by what was measured: with a clock that goes on by a fixed time with each look."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvoffload import native
from kvoffload.tiers.record_coder import (
    AGAIN,
    FAILURE_LIMIT,
    GROUPS,
    KNOWN_BYTES,
    SKIPS,
    SLOW_SKIPS,
    Coding,
    RecordCoder,
    Way,
)
from tests.kit.tiers.tier_contract import Records

NUMBERS = Records(0, 1, 100_000, filled=True, has_numbers=True).memory[0].tobytes()
NOISE = np.random.default_rng(5).bytes(100_000)
CODE_S = 1e-4
"""What coding or decoding takes here: 1 GB/s."""
SLOW, MIDDLE, FAST = 1e-8, 2.5e-9, 1e-9
"""Seconds a byte of a link: 0.1, 0.4 and 1 GB/s. With a code of 1 GB/s the border lies at 0.5 for what is sent, and at
0.3 for what is read with a ratio of 1.5."""


class Clock:
    """Goes on with each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += CODE_S
        return self.now_s


class TimedCoder(RecordCoder):
    """It has a clock of its own."""

    def __init__(self, coding: Coding) -> None:
        self.clock = Clock()
        super().__init__(coding, clock=self.clock)


def make_coder(coding: Coding) -> TimedCoder:
    return TimedCoder(coding)


def move(coder: TimedCoder, way: Way, byte_s: float, *, size_bytes: int = KNOWN_BYTES, connections: int = 1) -> None:
    """By so many connections at once, each its part."""
    with ExitStack() as stack:
        for _ in range(connections):
            stack.enter_context(coder.moving(way))
        coder.clock.now_s += size_bytes * byte_s
    for _ in range(connections):
        coder.told_moved(way, size_bytes // connections)


def learn(coder: RecordCoder) -> None:
    """How fast the code is, by as many records as that takes."""
    for _ in range(KNOWN_BYTES // len(NUMBERS) + 1):
        coder.encode(0, NUMBERS)


def is_coded(coder: RecordCoder, record: bytes = NUMBERS, group: int = 0) -> bool:
    coded = coder.encode(group, record)
    if coded is None:
        return False
    decoded = bytearray(len(record))
    assert native.decode_record(coded, decoded)
    assert decoded == record
    return True


def find_coding_threads() -> set[int]:
    """Returns the threads of this process that code."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(task.name) for task in tasks if (task / "comm").read_text().strip() == "kvoffload-code"}


def test_what_codes_has_a_lower_priority_than_what_sends() -> None:
    before = find_coding_threads()
    coder = make_coder(Coding.ON)
    assert is_coded(coder)
    (started,) = find_coding_threads() - before
    assert os.getpriority(os.PRIO_PROCESS, started) == os.getpriority(os.PRIO_PROCESS, 0) + 5


def test_what_codes_nothing_has_no_thread_for_it() -> None:
    before = find_coding_threads()
    coder = make_coder(Coding.OFF)
    assert not is_coded(coder)
    assert find_coding_threads() <= before


def test_off_codes_nothing_and_on_whatever_becomes_shorter() -> None:
    assert not is_coded(make_coder(Coding.OFF))
    coder = make_coder(Coding.ON)
    assert is_coded(coder)
    assert not is_coded(coder, NOISE)
    assert (coder.counts["coded_records"], coder.counts["coded_bytes"]) == (1, len(NUMBERS))
    assert 0 < coder.counts["coded_stored_bytes"] < 0.8 * len(NUMBERS)


@pytest.mark.parametrize(
    ("sent_s", "read_s", "codes"),
    [
        (None, None, False),
        (SLOW, None, True),
        (None, SLOW, True),
        (SLOW, SLOW, True),
        (FAST, None, False),
        (None, FAST, False),
        (SLOW, FAST, False),
        (FAST, SLOW, False),
        (MIDDLE, SLOW, True),
        (SLOW, MIDDLE, False),
        (MIDDLE, None, False),
    ],
)
def test_auto_codes_while_it_is_faster_both_ways(sent_s: float | None, read_s: float | None, codes: bool) -> None:
    coder = make_coder(Coding.AUTO)
    if sent_s is not None:
        move(coder, Way.SEND, sent_s)
    if read_s is not None:
        move(coder, Way.READ, read_s)
    learn(coder)
    assert is_coded(coder) is codes


def test_auto_waits_until_enough_was_moved() -> None:
    coder = make_coder(Coding.AUTO)
    move(coder, Way.SEND, SLOW, size_bytes=KNOWN_BYTES - 1)
    assert not is_coded(coder)
    move(coder, Way.SEND, SLOW, size_bytes=1)
    assert is_coded(coder)


def test_auto_follows_a_link_that_becomes_faster() -> None:
    coder = make_coder(Coding.AUTO)
    move(coder, Way.SEND, SLOW)
    learn(coder)
    assert is_coded(coder)
    for _ in range(100):
        move(coder, Way.SEND, FAST)
    # Now and then it is tried.
    assert [is_coded(coder) for _ in range(SLOW_SKIPS + 1)] == [False] * SLOW_SKIPS + [True]


def test_connections_that_move_at_once_are_one_link() -> None:
    """Four share a wire that is too fast to code for it; each by itself has a fourth of its speed."""
    coder = make_coder(Coding.AUTO)
    move(coder, Way.SEND, FAST, connections=4)
    learn(coder)
    assert not is_coded(coder)


def test_a_group_whose_records_do_not_become_shorter_is_tried_rarely() -> None:
    coder = make_coder(Coding.ON)
    for _ in range(FAILURE_LIMIT):
        assert not is_coded(coder, NOISE)
    assert [is_coded(coder) for _ in range(SKIPS + 2)] == [False] * SKIPS + [True, True]
    assert is_coded(coder, group=1)


def test_many_groups_take_no_more_room() -> None:
    coder = make_coder(Coding.ON)
    for _ in range(FAILURE_LIMIT):
        assert not is_coded(coder, NOISE)
    # So many have one place: what is known of one is taken for known of the others.
    assert [group for group in range(1000) if not is_coded(coder, group=group)] == list(range(0, 1000, GROUPS))


def come(coder: RecordCoder, *, taken_s: float) -> None:
    """Somebody codes enough for us to know how fast that is decoded."""
    coder.told_came(4, record_bytes=KNOWN_BYTES, coded_bytes=KNOWN_BYTES * 2 // 3, taken_s=taken_s)


def test_others_are_asked_to_code_as_it_is_set() -> None:
    assert make_coder(Coding.ON).asks()
    assert not make_coder(Coding.OFF).asks()
    assert make_coder(Coding.AUTO).asks(), "they know whether their way is slow; how fast we decode is learned by it"


@pytest.mark.parametrize(("read_s", "asks"), [(SLOW, True), (MIDDLE, False), (FAST, False)])
def test_auto_asks_others_to_code_while_records_come_sooner(read_s: float, asks: bool) -> None:
    coder = make_coder(Coding.AUTO)
    move(coder, Way.READ, read_s)
    come(coder, taken_s=KNOWN_BYTES * 1e-9)
    assert [coder.asks() for _ in range(SLOW_SKIPS)] == [asks] * SLOW_SKIPS
    assert coder.asks(), "one of 64 is asked for all the same"
    again = [coder.asks() for _ in range(AGAIN)]
    assert again == [asks] * (AGAIN - 1) + [True], "and soon again if that is not heard"
    come(coder, taken_s=KNOWN_BYTES * 1e-9)
    assert [coder.asks() for _ in range(AGAIN)] == [asks] * AGAIN


def test_auto_stops_asking_when_decoding_is_slow() -> None:
    coder = make_coder(Coding.AUTO)
    move(coder, Way.READ, SLOW)
    come(coder, taken_s=KNOWN_BYTES * SLOW)
    assert not coder.asks()


def test_what_others_have_coded_for_us_is_counted_with_our_own() -> None:
    coder = make_coder(Coding.ON)
    come(coder, taken_s=0.01)
    assert coder.counts == {
        "coded_records": 4,
        "coded_bytes": KNOWN_BYTES,
        "coded_stored_bytes": KNOWN_BYTES * 2 // 3,
    }
    assert is_coded(coder)
    assert coder.counts["coded_records"] == 5


def test_coders_that_share_an_encoder_share_its_thread() -> None:
    before = find_coding_threads()
    encoder = native.BackgroundEncoder()
    assert is_coded(RecordCoder(Coding.ON, encoder=encoder))
    assert is_coded(RecordCoder(Coding.ON, encoder=encoder))
    assert len(find_coding_threads() - before) == 1


def test_what_it_wants_to_code_is_coded_if_the_other_side_takes_it() -> None:
    assert not make_coder(Coding.OFF).wants(0)
    assert not make_coder(Coding.AUTO).wants(0), "nothing is known of the link"
    coder = make_coder(Coding.ON)
    assert coder.wants(0)
    assert coder.encode(0, NUMBERS, is_wanted=True) is not None


def test_a_trial_that_the_other_side_did_not_take_is_due_again_soon() -> None:
    """Both sides try rarely; a trial needs both at once."""
    coder = make_coder(Coding.AUTO)
    move(coder, Way.SEND, FAST)
    learn(coder)
    assert any(coder.wants(0) for _ in range(SLOW_SKIPS + 1))
    assert [coder.wants(0) for _ in range(AGAIN + 1)] == [False] * AGAIN + [True]
    assert coder.encode(0, NUMBERS, is_wanted=True) is not None
    assert [coder.wants(0) for _ in range(SLOW_SKIPS + 1)] == [False] * SLOW_SKIPS + [True]


def test_a_group_that_does_not_become_shorter_is_hardly_wanted() -> None:
    coder = make_coder(Coding.ON)
    for _ in range(FAILURE_LIMIT):
        assert coder.encode(0, NOISE, is_wanted=True) is None
    assert [coder.wants(0) for _ in range(SKIPS + 1)] == [False] * SKIPS + [True]
