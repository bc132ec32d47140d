"""The benchmark of late answers counts every request once."""

from __future__ import annotations

import pytest

from benchmarks.busy.late_answers import DELAYS, measure, wait_for_turns


@pytest.mark.parametrize("delay", DELAYS)
def test_each_request_is_a_hit_late_or_not_asked(delay: str) -> None:
    found = measure(delay, compute_ms=400, requests=3, pause_s=0.001)
    assert found.hits + found.late + found.not_asked == found.asked == 3
    assert 0 < found.wait[0] <= found.wait[1]


def test_an_answer_comes_with_the_next_turn() -> None:
    find_due = wait_for_turns(100)
    assert [round(find_due(at_s), 6) for at_s in (0.0, 0.05, 0.0999, 0.25)] == [0.1, 0.1, 0.1, 0.3]
