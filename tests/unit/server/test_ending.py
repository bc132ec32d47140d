"""A private server's end, look by look."""

from __future__ import annotations

import pytest

from kvoffload.server.ending import Ending, EndingTerms

S = 1_000_000_000


@pytest.mark.parametrize(
    ("linger_s", "looks", "due"),
    [
        # Nobody comes: the first engine is waited for, and no longer.
        (0, [(0, False), (59, False), (60, False)], [False, False, True]),
        (600, [(0, False), (60, False)], [False, True]),
        # It is used for longer than anybody would be waited for.
        (0, [(1, True), (100, True), (101, False)], [False, False, True]),
        # It lingers, from the last one's end on.
        (10, [(1, True), (100, False), (109, False), (110, False)], [False, False, False, True]),
        # A newcomer stops that, and it begins anew behind him.
        (
            10,
            [(1, True), (2, False), (11, True), (500, True), (501, False), (510, False), (511, False)],
            [False, False, False, False, False, False, True],
        ),
        # It was due and could not end yet: somebody came.
        (0, [(1, True), (2, False), (3, True), (4, False)], [False, True, False, True]),
    ],
)
def test_when_it_is_due(linger_s: float, looks: list[tuple[int, bool]], due: list[bool]) -> None:
    ending = Ending(EndingTerms(linger_s=linger_s, first_engine_s=60), 0)
    assert [ending.is_due(now * S, is_used=is_used) for now, is_used in looks] == due


def test_the_wait_begins_with_the_start() -> None:
    ending = Ending(EndingTerms(linger_s=0, first_engine_s=5), 100 * S)
    assert not ending.is_due(104 * S, is_used=False)
    assert ending.is_due(105 * S, is_used=False)
