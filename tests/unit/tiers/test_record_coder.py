"""Which records are coded, by what was measured: with a clock that goes on by a fixed time with each look."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvoffload import native
from kvoffload.tiers.coding_choice import KNOWN_BYTES
from kvoffload.tiers.record_coder import FAILURE_LIMIT, GROUPS, SKIPS, Coding, RecordCoder
from tests.kit.tiers.tier_contract import Records

NUMBERS = Records(0, 1, 100_000, filled=True, has_numbers=True).memory[0].tobytes()
NOISE = np.random.default_rng(5).bytes(100_000)
CODE_S = 1e-4
"""Seconds that coding or decoding of a record takes here, at 1 GB/s."""
SLOW, FAST = 1e-8, 1e-9
"""Seconds a byte of a link: 0.1 and 1 GB/s."""


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


def send(coder: TimedCoder, byte_s: float, *, size_bytes: int = KNOWN_BYTES, connections: int = 1) -> None:
    """By so many connections at once, each its part."""
    with ExitStack() as stack:
        for _ in range(connections):
            stack.enter_context(coder.sending())
        coder.clock.now_s += size_bytes * byte_s
        for _ in range(connections):
            coder.told_sent(size_bytes // connections)


def read(
    coder: TimedCoder, byte_s: float, *, is_coded: bool = False, size_bytes: int = KNOWN_BYTES, connections: int = 1
) -> None:
    with ExitStack() as stack:
        for _ in range(connections):
            stack.enter_context(coder.reading())
        coder.clock.now_s += size_bytes * byte_s
        for _ in range(connections):
            coder.told_read(size_bytes // connections, decoding_s=1e-3 if is_coded else None)


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
    ("plain_s", "coded_s", "codes"),
    [(SLOW, None, True), (FAST, None, False), (SLOW, FAST, True), (FAST, SLOW, False), (FAST, FAST / 2, True)],
)
def test_auto_codes_what_is_read_sooner(plain_s: float, coded_s: float | None, codes: bool) -> None:
    coder = make_coder(Coding.AUTO)
    read(coder, plain_s)
    if coded_s is not None:
        read(coder, coded_s, is_coded=True)
    else:
        learn(coder)
    assert is_coded(coder) is codes


def test_auto_waits_until_enough_was_moved() -> None:
    coder = make_coder(Coding.AUTO)
    send(coder, SLOW, size_bytes=KNOWN_BYTES - 1)
    assert not is_coded(coder)
    send(coder, SLOW, size_bytes=1)
    assert is_coded(coder)


@pytest.mark.parametrize("is_read", [True, False])
def test_connections_that_move_at_once_are_one_link(is_read: bool) -> None:
    """Four share a wire that is too fast to code for it; each by itself has a fourth of its speed."""
    coder = make_coder(Coding.AUTO)
    if is_read:
        read(coder, FAST, connections=4)
    else:
        send(coder, FAST, connections=4)
    learn(coder)
    assert not is_coded(coder)


def test_reading_that_never_pauses_is_measured_all_the_same() -> None:
    coder = make_coder(Coding.AUTO)
    with coder.reading():
        read(coder, SLOW)
        assert is_coded(coder)


def test_while_sending_is_behind_auto_codes_nothing_that_would_be_sent_later() -> None:
    coder = make_coder(Coding.AUTO)
    read(coder, SLOW)
    send(coder, FAST)
    learn(coder)
    coded = []
    for waiting in (3, 4, 3, 1, 0, 3):
        coder.told_waiting(waiting, connections=4)
        coded.append(is_coded(coder))
    assert coded == [True, False, False, False, True, True]


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


def test_others_are_asked_to_code_as_it_is_set() -> None:
    assert make_coder(Coding.ON).asks(1)
    assert not make_coder(Coding.OFF).asks(1)
    coder = make_coder(Coding.AUTO)
    assert not coder.asks(1), "nothing is known of the way"
    read(coder, SLOW)
    assert coder.asks(1), "how much sooner coded ones come is learned by it"
    read(coder, 2 * SLOW, is_coded=True)
    assert not coder.asks(1)


def test_what_was_asked_for_coded_and_came_too_late_is_asked_for_plain() -> None:
    for connections, others in ((1, False), (4, True)):
        coder = make_coder(Coding.AUTO)
        read(coder, SLOW)
        with ExitStack() as stack:
            for _ in range(connections):
                stack.enter_context(coder.reading())
            coder.told_late(1000, taken_s=2 * 1000 * SLOW)
        assert coder.asks(1) is others, "of four each has a fourth of the way: plain ones would have been late, too"


def test_auto_codes_what_is_given_while_the_way_is_slower_than_the_code() -> None:
    coder = make_coder(Coding.AUTO)
    assert not coder.gives(1)
    send(coder, SLOW)
    assert coder.gives(1), "how fast the code is, is learned by it"
    for _ in range(KNOWN_BYTES // len(NUMBERS) + 1):
        assert coder.encode(0, NUMBERS, is_wanted=True)
    assert coder.gives(1)
    send(coder, FAST, size_bytes=16 * KNOWN_BYTES)
    assert not coder.gives(1)
    assert coder.encode(0, NUMBERS, is_wanted=True), "whoever asks for it knows why"
    assert [make_coder(coding).gives(1) for coding in (Coding.ON, Coding.OFF)] == [True, False]


def test_what_others_have_coded_for_us_is_counted_with_our_own() -> None:
    coder = make_coder(Coding.ON)
    coder.told_came(4, record_bytes=KNOWN_BYTES, coded_bytes=KNOWN_BYTES * 2 // 3, taken_s=0.01)
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


def test_a_link_on_which_there_is_always_somebody_is_known_while_it_is_busy() -> None:
    """Each begins before the one ahead of it has ended."""
    coder = make_coder(Coding.AUTO)
    send(coder, SLOW)
    with ExitStack() as first:
        first.enter_context(coder.sending())
        for _ in range(16):
            with ExitStack() as following:
                following.enter_context(coder.sending())
                coder.clock.now_s += KNOWN_BYTES * SLOW
                coder.told_sent(KNOWN_BYTES)
        learn(coder)
        coder.told_waiting(100, 1)
        assert is_coded(coder), "the link is slow, so that coding holds up nothing"
