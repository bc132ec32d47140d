"""Parts of a save job: joined by group, and placed among its records."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np

from kvoffload.cache import ReservedSlots
from kvoffload.connector.saves.group_save import GroupSave, join_parts, place_parts, without_blocks
from kvoffload.connector.saves.named_blocks import NamedBlocks


def make_part(group: int, *blocks: int) -> GroupSave:
    numbers = np.array(blocks, np.uint64)
    named = NamedBlocks(group, b"h" * 32 * len(blocks), b"p" * 32 * len(blocks), np.array(blocks, np.int64))
    return GroupSave(named, list(blocks), ReservedSlots(1, 1, group, numbers, numbers))


def test_parts_of_one_group_become_one() -> None:
    first, other = join_parts([make_part(0, 1, 2), make_part(1, 1, 2), make_part(0, 5)])
    assert (first.named.group, first.named.blocks.tolist(), first.words) == (0, [1, 2, 5], [1, 2, 5])
    assert (other.named.group, len(other.slots)) == (1, 2)


def test_records_are_counted_over_all_groups() -> None:
    parts = [make_part(0, 1, 2), make_part(1, 1, 2), make_part(2, 3)]
    assert [part.begin for part in place_parts(parts)] == [0, 2, 4]


def test_without_its_blocks_a_part_keeps_its_slots() -> None:
    part = without_blocks(make_part(0, 1, 2))
    assert (len(part.named.blocks), part.words, len(part.slots)) == (0, [], 2)
