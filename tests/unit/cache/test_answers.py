"""Answers are values: a hit says so, and an outcome's number is what the arrays hold."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.cache import Acquired, AcquireOutcome, CommitOutcome, LeaseId, Reservation


@pytest.mark.parametrize("outcome", list(AcquireOutcome))
def test_only_a_hit_is_a_hit(outcome: AcquireOutcome) -> None:
    answer = Acquired(outcome, 0, LeaseId(1), ())
    assert answer.is_hit == (outcome is AcquireOutcome.HIT)


def test_a_reservation_is_as_long_as_what_was_decided() -> None:
    assert len(Reservation(np.zeros(3, np.uint64), np.zeros(3, np.uint64))) == 3


def test_outcomes_can_be_counted_in_an_array() -> None:
    outcomes = np.array([0, 2, 0], dtype=np.uint8)
    assert int((outcomes == CommitOutcome.READABLE).sum()) == 2
    assert CommitOutcome(int(outcomes[1])) is CommitOutcome.DUPLICATE
