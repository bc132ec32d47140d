"""Which records are coded, by what was measured: with a clock that goes on by a fixed time with each look."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvoffload import native
from kvoffload.tiers.record_coder import FAILURE_LIMIT, KNOWN_BYTES, SKIPS, Coding, RecordCoder
from tests.kit.tiers.tier_contract import Records

NUMBERS = Records(0, 1, 100_000, filled=True, has_numbers=True).memory[0].tobytes()
NOISE = np.random.default_rng(5).bytes(100_000)
CODE_S = 1e-4
"""What coding or decoding takes here: 1 GB/s."""
SLOW, FAST = 1e-8, 1e-9
"""Seconds a byte of a link: 0.1 and 1 GB/s. With a code of 1 GB/s and a ratio of 1.5 the border lies at 0.3."""


def make_coder(coding: Coding) -> RecordCoder:
    def tick() -> Iterator[float]:
        now_s = 0.0
        while True:
            yield now_s
            now_s += CODE_S

    return RecordCoder(coding, clock=tick().__next__)


def is_coded(coder: RecordCoder, record: bytes = NUMBERS, group: int = 0) -> bool:
    coded = coder.encode(group, record)
    if coded is None:
        return False
    decoded = bytearray(len(record))
    assert native.decode_record(coded, decoded)
    assert decoded == record
    return True


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
    ],
)
def test_auto_codes_while_it_is_faster_both_ways(sent_s: float | None, read_s: float | None, codes: bool) -> None:
    coder = make_coder(Coding.AUTO)
    if sent_s is not None:
        coder.told_sent(KNOWN_BYTES, KNOWN_BYTES * sent_s)
    if read_s is not None:
        coder.told_read(KNOWN_BYTES, KNOWN_BYTES * read_s)
    # By the first one it is learned how fast the code is.
    is_coded(coder)
    assert is_coded(coder) is codes


def test_auto_waits_until_enough_was_moved() -> None:
    coder = make_coder(Coding.AUTO)
    coder.told_sent(KNOWN_BYTES - 1, KNOWN_BYTES * SLOW)
    assert not is_coded(coder)
    coder.told_sent(1, SLOW)
    assert is_coded(coder)


def test_auto_follows_a_link_that_becomes_faster() -> None:
    coder = make_coder(Coding.AUTO)
    coder.told_sent(KNOWN_BYTES, KNOWN_BYTES * SLOW)
    assert is_coded(coder)
    for _ in range(100):
        coder.told_sent(KNOWN_BYTES, KNOWN_BYTES * FAST)
    assert not is_coded(coder)


def test_a_group_whose_records_do_not_become_shorter_is_tried_rarely() -> None:
    coder = make_coder(Coding.ON)
    for _ in range(FAILURE_LIMIT):
        assert not is_coded(coder, NOISE)
    assert [is_coded(coder) for _ in range(SKIPS + 2)] == [False] * SKIPS + [True, True]
    assert is_coded(coder, group=1)


def test_many_groups_take_no_more_room() -> None:
    coder = make_coder(Coding.ON)
    for group in range(1000):
        assert is_coded(coder, group=group)
    assert len(coder._groups) <= 64
