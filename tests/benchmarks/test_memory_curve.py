"""A pool's figures for less and more memory agree with replays."""

from __future__ import annotations

import pytest

from benchmarks.evictions.traces import Chat
from benchmarks.memory_curve import measure


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_where_each_block_is_followed_it_is_what_replays_say(*, is_hybrid: bool) -> None:
    found = measure("chat", Chat(requests=1000).make(1), percent=10.0, is_hybrid=is_hybrid)
    assert found.one_in == 1
    assert list(found.told) == [0.25, 0.5, 1.0, 2.0, 4.0]
    # Blocks behind the last state are computed again and not saved again, so they are not counted.
    most = 8.0 if is_hybrid else 1.0
    assert max(map(abs, found.errors.values())) < most, found
    assert found.told[4.0] > found.told[0.25]
