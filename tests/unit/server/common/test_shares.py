"""Shares of what is for all."""

from __future__ import annotations

from kvoffload.server.common.shares import has_share, has_shares


def fill(users: int, limit: int) -> list[int]:
    """Returns how much each user gets if all take as much as they can, one after the other."""
    got = [0] * users
    for at in range(users):
        while has_share(got[at], total=sum(got), limit=limit):
            got[at] += 1
    return got


def test_nobody_takes_all_and_the_next_one_gets_most_of_the_rest() -> None:
    assert fill(4, 1024) == [768, 192, 48, 12]


def test_few_are_taken_whole() -> None:
    assert fill(1, 1) == [1]
    assert fill(2, 2) == [2, 0]
    assert sum(fill(2, 3)) == 3


def test_the_limit_is_one() -> None:
    assert not has_share(0, total=5, limit=5)
    assert not has_share(0, total=6, limit=5)


def test_a_domain_gets_more_than_a_user_and_not_all() -> None:
    users = [0, 0]
    for at in range(2):
        while has_shares(users[at], sum(users), total=sum(users), limit=64):
            users[at] += 1
    assert users == [48, 8]
    assert has_shares(0, 0, total=sum(users), limit=64)
