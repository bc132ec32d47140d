"""The longest boundary that all groups accept, against tables and against a definition by brute force."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.cache import GroupRule, find_reach, longest_boundary, needed_blocks
from kvoffload.kvspec import ReuseRule

Present = set[tuple[int, int]]


def prefix(block_size: int) -> GroupRule:
    return GroupRule(block_size=block_size, reuse=ReuseRule.PREFIX)


def window(block_size: int, tokens: int) -> GroupRule:
    return GroupRule(block_size=block_size, reuse=ReuseRule.WINDOW, window=tokens)


def chunk(block_size: int, tokens: int) -> GroupRule:
    return GroupRule(block_size=block_size, reuse=ReuseRule.CHUNK, window=tokens)


def recurrent(block_size: int) -> GroupRule:
    return GroupRule(block_size=block_size, reuse=ReuseRule.EXACT_BOUNDARY)


NOTHING = GroupRule(block_size=4, reuse=ReuseRule.NOTHING)


def tokens_needed(rule: GroupRule, boundary: int) -> range:
    """The tokens of this group that the token at `boundary` reads: the definition, without blocks."""
    if rule.reuse is ReuseRule.NOTHING:
        return range(0)
    if rule.reuse is ReuseRule.EXACT_BOUNDARY:
        return range(boundary - 1, boundary)
    if rule.reuse is ReuseRule.WINDOW:
        return range(max(0, boundary - rule.window + 1), boundary)
    if rule.reuse is ReuseRule.CHUNK:
        return range(boundary - boundary % rule.window, boundary)
    return range(boundary)


def accepts(rule: GroupRule, group: int, boundary: int, local: int, present: Present) -> bool:
    """Every block of a needed token is present, or is the engine's own; a state is never the engine's own."""
    blocks = {token // rule.block_size for token in tokens_needed(rule, boundary)}
    if rule.reuse is not ReuseRule.EXACT_BOUNDARY:
        blocks = {block for block in blocks if block >= local // rule.block_size}
    return all((group, block) in present for block in blocks)


def search(rules: list[GroupRule], *, local: int, limit: int, present: Present, alignment: int = 1) -> int:
    """Searches by the definition: tries every boundary."""
    if all(rule.reuse is ReuseRule.NOTHING for rule in rules):
        return local
    step = lcm(alignment, *(rule.block_size for rule in rules))
    return max(
        (
            boundary
            for boundary in range(local + 1, limit + 1)
            if boundary % step == 0
            and all(accepts(rule, group, boundary, local, present) for group, rule in enumerate(rules))
        ),
        default=local,
    )


@pytest.mark.parametrize(
    ("rule", "local", "boundary", "expected"),
    [
        (prefix(4), 0, 16, range(4)),
        (prefix(4), 8, 16, range(2, 4)),
        (window(4, 8), 0, 16, range(2, 4)),  # the token at 16 sees 9 to 15 and itself: blocks 2 and 3
        (window(4, 9), 0, 16, range(2, 4)),
        (window(4, 10), 0, 16, range(1, 4)),
        (window(4, 1), 0, 16, range(4, 4)),  # it sees itself only
        (window(4, 2), 0, 16, range(3, 4)),
        (window(4, 100), 0, 16, range(4)),
        (window(4, 100), 8, 16, range(2, 4)),
        (window(4, 4), 8, 16, range(3, 4)),
        (chunk(4, 8), 0, 12, range(2, 3)),
        (chunk(4, 8), 0, 16, range(4, 4)),  # a new chunk begins: nothing before it is seen
        (chunk(4, 12), 4, 20, range(3, 5)),
        (recurrent(4), 0, 16, range(3, 4)),
        (recurrent(4), 12, 16, range(3, 4)),
        (NOTHING, 0, 16, range(0)),
    ],
)
def test_needed_blocks_of_each_rule(rule: GroupRule, local: int, boundary: int, expected: range) -> None:
    assert list(needed_blocks(rule, local=local, boundary=boundary)) == list(expected)


def present_in(*blocks: tuple[int, int]) -> Callable[[int, int], bool]:
    return lambda group, index: (group, index) in blocks


def test_a_prefix_ends_at_its_first_missing_block() -> None:
    assert longest_boundary([prefix(4)], local=0, limit=40, is_present=present_in((0, 0), (0, 1), (0, 3))) == 8


def test_the_boundary_never_exceeds_the_limit() -> None:
    assert longest_boundary([prefix(4)], local=0, limit=15, is_present=lambda group, index: True) == 12
    assert longest_boundary([prefix(4)], local=0, limit=16, is_present=lambda group, index: True) == 16
    assert longest_boundary([prefix(4)], local=0, limit=3, is_present=lambda group, index: True) == 0


def test_a_recurrent_state_counts_at_its_own_boundary_only() -> None:
    rules = [prefix(4), recurrent(4)]
    blocks = [(0, index) for index in range(5)]
    assert longest_boundary(rules, local=0, limit=20, is_present=present_in(*blocks, (1, 2))) == 12
    assert longest_boundary(rules, local=0, limit=20, is_present=present_in(*blocks)) == 0


def test_a_recurrent_state_at_the_local_boundary_is_no_hit() -> None:
    rules = [prefix(4), recurrent(4)]
    blocks = [(0, index) for index in range(5)]
    assert longest_boundary(rules, local=12, limit=20, is_present=present_in(*blocks, (1, 2))) == 12


def test_groups_with_different_block_sizes_meet_at_common_multiples() -> None:
    rules = [prefix(4), prefix(6)]
    everything = [(0, index) for index in range(10)] + [(1, index) for index in range(4)]
    assert longest_boundary(rules, local=0, limit=40, is_present=present_in(*everything)) == 24
    assert longest_boundary(rules, local=0, limit=40, is_present=present_in(*everything[:-1])) == 12


def test_the_engines_alignment_is_respected() -> None:
    assert longest_boundary([prefix(4)], local=0, limit=40, is_present=lambda g, i: True, alignment=16) == 32


def test_a_window_may_lack_its_beginning() -> None:
    rules = [prefix(4), window(4, 8)]
    full = [(0, index) for index in range(5)]
    assert longest_boundary(rules, local=0, limit=20, is_present=present_in(*full, (1, 3), (1, 4))) == 20
    # The last block is missing: an earlier boundary, whose window is present.
    assert longest_boundary(rules, local=0, limit=20, is_present=present_in(*full, (1, 1), (1, 2))) == 12


def test_without_a_group_that_keeps_anything_nothing_is_reused() -> None:
    """All groups would accept every boundary, and a whole prompt would count as restored with no byte of it loaded."""
    assert longest_boundary([NOTHING, NOTHING], local=4, limit=40, is_present=lambda group, index: True) == 4
    assert longest_boundary([], local=0, limit=40, is_present=lambda group, index: True) == 0


def test_a_group_that_keeps_nothing_asks_for_nothing() -> None:
    asked: list[int] = []

    def is_present(group: int, index: int) -> bool:
        asked.append(group)
        return True

    assert longest_boundary([prefix(4), NOTHING], local=0, limit=17, is_present=is_present) == 16
    assert set(asked) == {0}


sizes = st.sampled_from([1, 2, 3, 4, 6])
rules = st.one_of(
    sizes.map(prefix),
    sizes.map(recurrent),
    st.builds(window, sizes, st.integers(1, 20)),
    st.builds(lambda size, times: chunk(size, size * times), sizes, st.integers(1, 4)),
    sizes.map(lambda size: GroupRule(block_size=size, reuse=ReuseRule.NOTHING)),
)


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[GroupRule], int, int, int, Present]:
    """Groups, the engine's own tokens (at a boundary of all groups), a limit, an alignment, and what is present."""
    chosen = draw(st.lists(rules, min_size=1, max_size=3))
    alignment = draw(sizes)
    step = lcm(alignment, *(rule.block_size for rule in chosen))
    limit = draw(st.integers(0, 5 * step))
    local = draw(st.integers(0, 3)) * step
    # Few holes: with many of them every answer is the local boundary.
    holes = draw(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5 * step)), max_size=4))
    blocks = {(g, i) for g, rule in enumerate(chosen) for i in range(5 * step // rule.block_size + 1)}
    return chosen, local, limit, alignment, blocks - holes


@given(caches())
def test_equals_the_longest_boundary_by_definition(cache: tuple[list[GroupRule], int, int, int, Present]) -> None:
    chosen, local, limit, alignment, present = cache
    found = longest_boundary(
        chosen,
        local=local,
        limit=limit,
        is_present=lambda group, index: (group, index) in present,
        alignment=alignment,
    )
    assert found == search(chosen, local=local, limit=limit, present=present, alignment=alignment)


@given(caches())
def test_every_block_of_a_found_boundary_is_present(cache: tuple[list[GroupRule], int, int, int, Present]) -> None:
    """`needed_blocks` can load every boundary that `longest_boundary` accepts."""
    chosen, local, limit, alignment, present = cache
    found = longest_boundary(
        chosen, local=local, limit=limit, is_present=lambda group, index: (group, index) in present, alignment=alignment
    )
    if found > local:
        for group, rule in enumerate(chosen):
            assert {(group, index) for index in needed_blocks(rule, local=local, boundary=found)} <= present


@given(caches())
def test_arrays_of_what_is_present_reach_as_far(cache: tuple[list[GroupRule], int, int, int, Present]) -> None:
    chosen, local, limit, alignment, present = cache
    counts = [max((i for g, i in present if g == group), default=-1) + 1 for group in range(len(chosen))]
    arrays = [np.array([(group, i) in present for i in range(count)], np.bool_) for group, count in enumerate(counts)]
    found = find_reach(chosen, arrays, local=local, limit=limit, alignment=alignment)
    assert found == search(chosen, local=local, limit=limit, present=present, alignment=alignment)
