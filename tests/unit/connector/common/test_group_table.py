"""Groups as the scheduler side counts them."""

from __future__ import annotations

from dataclasses import replace
from sys import maxsize

import pytest

from tests.kit.connector.facts import group_facts

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.cache import needed_blocks
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.step_plan import GroupFacts
from kvoffload.errors import BlockAlignmentError
from kvoffload.kvspec import ReuseRule

FINE = {"hash_block_size": 4, "alignment": 4}


def test_groups_are_found_by_what_they_keep() -> None:
    table = GroupTable(
        [
            group_facts(1, ReuseRule.WINDOW, window=6),
            group_facts(2, block_size=8),
            group_facts(4, ReuseRule.CHUNK, window=8),
            group_facts(5),
        ],
        hash_block_size=4,
        alignment=8,
    )
    assert len(table) == 4
    assert table.windows == (0, 2)
    assert table.prefixes == (1, 3)
    assert table.first_prefix == 1
    assert not table.with_states
    assert table.hashes_per_block == (1, 2, 1, 1)
    assert table.of_table == {1: 0, 2: 1, 4: 2, 5: 3}


def test_the_first_stage_with_layers_of_it_stands_for_a_block_table() -> None:
    window = group_facts(3, ReuseRule.WINDOW, window=6)
    table = GroupTable(
        [
            *(replace(group_facts(1), stage=stage) for stage in range(3)),
            *(replace(window, stage=stage) for stage in (1, 2)),
            replace(group_facts(4), stage=2),
        ],
        **FINE,
    )
    assert len(table) == 6
    assert table.of_table == {1: 0, 3: 3, 4: 5}
    assert table.other_stages == {0: (1, 2), 3: (4,), 5: ()}
    assert (table.prefixes, table.windows, table.first_prefix) == ((0, 5), (3,), 0)
    assert table.table_rules == (table.rules[0], table.rules[3], table.rules[5])
    assert (table.stages, table.is_staged, table.is_all_prefix) == ((0, 1, 2), True, False)


def test_without_full_attention_nothing_is_a_parent() -> None:
    table = GroupTable(
        [group_facts(0, ReuseRule.EXACT_BOUNDARY), group_facts(1, ReuseRule.WINDOW, window=6)],
        hash_block_size=4,
        alignment=4,
    )
    assert table.first_prefix is None
    assert table.with_states


@pytest.mark.parametrize(("tokens", "aligned"), [(0, 0), (7, 0), (8, 8), (15, 8), (16, 16)])
def test_a_hit_is_a_multiple_of_the_engines_alignment(tokens: int, aligned: int) -> None:
    assert GroupTable([group_facts(0)], hash_block_size=4, alignment=8).align(tokens) == aligned


def test_a_hit_is_whole_blocks_where_the_engines_own_may_end_within_one() -> None:
    table = GroupTable([group_facts(0, block_size=8), group_facts(1, ReuseRule.EXACT_BOUNDARY, block_size=12)], **FINE)
    assert [table.align(tokens) for tokens in (23, 24, 47, 48)] == [0, 24, 24, 48]
    assert [table.longest_hit(tokens) for tokens in (24, 25, 48, 49)] == [0, 24, 24, 48]


def test_an_engine_that_drops_what_it_matched_last_drops_whole_blocks_of_ours() -> None:
    table = GroupTable([group_facts(0, block_size=8), group_facts(1, block_size=8)], **FINE, drops_last_block=True)
    assert [table.longest_hit(tokens) for tokens in (15, 16, 23, 24)] == [0, 8, 8, 16]


WINDOW = group_facts(1, ReuseRule.WINDOW, window=6)
CHUNK = group_facts(1, ReuseRule.CHUNK, window=8)
STATE = group_facts(1, ReuseRule.EXACT_BOUNDARY)


@pytest.mark.parametrize("others", [(), (group_facts(1),), (WINDOW,), (CHUNK,), (STATE,)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_prompt_is_restored_to_its_end_only_if_that_is_wished_and_all_of_it_is_full_attention(
    others: tuple[GroupFacts, ...], whole: bool
) -> None:
    table = GroupTable([group_facts(0), *others], hash_block_size=4, alignment=8, whole_prompts=whole)
    to_the_end = whole and others in ((), (group_facts(1),))
    assert [table.longest_hit(tokens) for tokens in (1, 8, 9, 16, 17, 23)] == (
        [0, 8, 8, 16, 16, 16] if to_the_end else [0, 0, 8, 8, 16, 16]
    )


def test_a_block_size_that_hashes_do_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(BlockAlignmentError, match=r"group 1.*6 tokens.*4 tokens.*prefix caching"):
        GroupTable([group_facts(0, block_size=8), group_facts(1, block_size=6)], hash_block_size=4, alignment=8)


def test_a_block_takes_as_many_records_as_ranks_hold_different_bytes_of_it() -> None:
    groups = [group_facts(0), group_facts(1, block_size=8)]
    assert GroupTable(groups, **FINE).stored_bytes == (64, 64)
    table = GroupTable(groups, **FINE, shards=[4, 2])
    assert (table.shards, table.stored_bytes) == ((4, 2), (256, 128))


@pytest.mark.parametrize(
    ("block_size", "window", "expected"), [(4, 8, 2), (8, 128, 6), (64, 128, 62), (128, 128, 126), (4, 6, 0), (4, 1, 3)]
)
def test_a_request_may_gain_some_tokens_before_a_window_at_a_boundary_loses_a_block(
    block_size: int, window: int, expected: int
) -> None:
    facts = group_facts(1, ReuseRule.WINDOW, block_size=block_size, window=window)
    table = GroupTable([group_facts(0, block_size=128), facts], hash_block_size=4, alignment=128)
    assert table.spare_tokens == expected
    first = needed_blocks(facts.rule, local=0, boundary=1280).start
    # The engine drops blocks whose last token is a window's length behind the next one.
    dropped = [max(1280 + gained - window + 1, 0) // block_size > first for gained in (expected, expected + 1)]
    assert dropped == [False, True]


def test_the_smallest_spare_counts_and_a_chunk_goes_when_it_is_over() -> None:
    chunk = group_facts(2, ReuseRule.CHUNK, window=24)
    window = group_facts(1, ReuseRule.WINDOW, window=30)
    assert GroupTable([group_facts(0), chunk], hash_block_size=4, alignment=16).spare_tokens == 7
    assert GroupTable([group_facts(0), chunk, window], hash_block_size=4, alignment=16).spare_tokens == 0
    assert GroupTable([group_facts(0)], **FINE).spare_tokens == maxsize
