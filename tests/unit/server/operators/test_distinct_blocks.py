"""The count of different blocks is right to about 1%, whatever their names look like and however often they come."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.server.operators.distinct_blocks import DistinctBlocks


@pytest.mark.parametrize("count", [1, 10, 1000, 30_000, 300_000, 3_000_000])
@pytest.mark.parametrize("is_random", [True, False], ids=["hashes", "numbers"])
def test_it_is_right_to_a_few_percent(count: int, is_random: bool) -> None:
    random = np.random.default_rng(count)
    tags = random.integers(0, 2**64, count, np.uint64) if is_random else np.arange(count, dtype=np.uint64)
    blocks = DistinctBlocks()
    for part in np.array_split(tags, max(count // 10_000, 1)):
        blocks.add(part, space=1)
        blocks.add(part[::2], space=1)
    assert blocks.count == pytest.approx(count, rel=0.03, abs=1)


def test_nothing_is_nothing() -> None:
    blocks = DistinctBlocks()
    assert blocks.count == 0
    blocks.add(np.empty(0, np.uint64), space=0)
    assert blocks.count == 0


def test_the_same_name_in_another_space_is_another_block() -> None:
    blocks, tags = DistinctBlocks(), np.arange(1000, dtype=np.uint64)
    for space in (0, 1, 2, 3):
        blocks.add(tags, space=space)
    assert blocks.count == pytest.approx(4000, rel=0.03)
