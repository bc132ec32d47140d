"""How far the engine's own cache reaches, found in few looks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.loads.engine_prefix import EnginePrefix
from kvoffload.kvspec import ReuseRule
from tests.kit.connector.facts import group_facts


class Pool:
    """A pool that has the first blocks of a prompt."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.looks = 0

    def get_cached_block(self, name: bytes, tables: list[int]) -> Any:
        assert tables == [3]
        self.looks += 1
        return object() if int.from_bytes(name, "big") < self.blocks else None


HASHES = [number.to_bytes(32, "big") for number in range(1000)]


@pytest.mark.parametrize("blocks", [0, 1, 2, 7, 500, 998, 1000])
def test_the_boundary_is_found_in_few_looks(blocks: int) -> None:
    pool = Pool(blocks)
    prefix = EnginePrefix(pool, GroupTable([group_facts(3)], hash_block_size=4, alignment=8))  # type: ignore[arg-type]
    assert prefix.find(HASHES, 3999) == min(blocks * 4, 3999) // 8 * 8
    assert pool.looks <= 10
    assert prefix.has(HASHES, 8) == (blocks >= 2)
    assert not prefix.has(HASHES, 0)


@pytest.mark.parametrize("blocks", [0, 1, 2, 300])
def test_blocks_are_looked_for_where_they_end(blocks: int) -> None:
    """With `prefix_match_unit` hashes, and the engine's own hits, are finer than blocks."""

    class WholeBlocks(Pool):
        def get_cached_block(self, name: bytes, tables: list[int]) -> Any:
            found = super().get_cached_block(name, tables)
            return found if int.from_bytes(name, "big") % 3 == 2 else None

    groups = GroupTable([group_facts(3, block_size=12)], hash_block_size=4, alignment=4)
    prefix = EnginePrefix(WholeBlocks(3 * blocks), groups)  # type: ignore[arg-type]
    assert prefix.find(HASHES, 3999) == 12 * blocks


def test_without_full_attention_nothing_is_known() -> None:
    groups = GroupTable([group_facts(3, ReuseRule.EXACT_BOUNDARY)], hash_block_size=4, alignment=4)
    prefix = EnginePrefix(Pool(1000), groups)  # type: ignore[arg-type]
    assert prefix.find(HASHES, 400) == 0
    assert not prefix.has(HASHES, 400)
