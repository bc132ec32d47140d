"""The rules for saving that are compared: what each of them keeps of a trace that a person can follow."""

from __future__ import annotations

import pytest

from benchmarks.save_rules import RULES, count_hits

ONCE = [(1, 2), (3, 4), (5, 6)]


@pytest.mark.parametrize("name", RULES)
def test_a_pool_with_room_brings_back_what_the_engine_has_lost(name: str) -> None:
    rule, admits = RULES[name]
    assert count_hits([*ONCE, *ONCE], engine=2, pool=6, rule=rule, admits=admits) == (0, 6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The pool has what the engine has.
        ("eager", (2, 0)),
        # It has what the engine has lost.
        ("on_evict", (2, 2)),
        ("auto", (2, 2)),
        # It keeps what was used more often.
        ("auto, asking the pool", (2, 0)),
        ("used twice alone", (2, 0)),
    ],
)
def test_of_a_full_pool_rules_keep_different_blocks(name: str, expected: tuple[int, int]) -> None:
    rule, admits = RULES[name]
    requests = [(1, 2), (1, 2), (3, 4), (5, 6), (3, 4)]
    assert count_hits(requests, engine=2, pool=2, rule=rule, admits=admits) == expected
