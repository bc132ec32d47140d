"""Blocks and their names stay together."""

from __future__ import annotations

import numpy as np

from kvoffload.connector.saves.named_blocks import NamedBlocks

NAMES = [bytes([number]) * 32 for number in range(8)]


def test_what_is_chosen_keeps_its_name_and_parent() -> None:
    named = NamedBlocks(3, b"".join(NAMES[1:5]), b"".join(NAMES[:4]), np.array([10, 20, 30, 40]))
    some = named.choose(np.array([1, 3]))
    assert (some.group, some.hashes, some.parents) == (3, NAMES[2] + NAMES[4], NAMES[1] + NAMES[3])
    assert some.blocks.tolist() == [20, 40]
    everything = named.choose(np.arange(4))
    assert (everything.hashes, everything.blocks.tolist()) == (named.hashes, [10, 20, 30, 40])
