"""The bound of all policies' hits, and the optimum that an exhaustive search finds in small cases."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from math import inf

import pytest

from benchmarks.ground.bound import HitBound, Passage
from kvoffload.cache import GroupRule, needed_blocks
from kvoffload.kvspec import ReuseRule

Groups = Sequence[tuple[GroupRule, int]]
PREFIX = GroupRule(block_size=1, reuse=ReuseRule.PREFIX)
WINDOW = GroupRule(block_size=1, reuse=ReuseRule.WINDOW, window=3)
STATE = GroupRule(block_size=1, reuse=ReuseRule.EXACT_BOUNDARY)
PAIRS = GroupRule(block_size=2, reuse=ReuseRule.PREFIX)


def find_optimum(groups: Groups, passages: Sequence[Passage], *, step: int = 1) -> int:
    """The most tokens hit, by a search over all hits and all that can be kept. A block is there if the request before
    has computed or hit it, or if it was kept; of a hit's windows and states only those at its end are."""
    coming: list[set[object]] = [set() for _ in passages]
    for number in reversed(range(len(passages) - 1)):
        coming[number] = coming[number + 1] | set(passages[number + 1].names)

    def list_blocks(passage: Passage, group: int, positions: range) -> frozenset[tuple[int, object]]:
        size = groups[group][0].block_size
        return frozenset((group, passage.names[(at + 1) * size - 1]) for at in positions)

    @cache
    def search(number: int, kept: frozenset[tuple[int, object]]) -> int:
        if number == len(passages):
            return 0
        passage, best = passages[number], 0
        for boundary in range(0, passage.limit + 1, step):
            there = kept
            needed = frozenset[tuple[int, object]]().union(
                *(
                    list_blocks(passage, group, needed_blocks(rule, local=0, boundary=boundary))
                    for group, (rule, _) in enumerate(groups)
                )
            )
            if not needed <= kept:
                continue
            for group, (rule, _) in enumerate(groups):
                size = rule.block_size
                computed = range(boundary // size, len(passage.names) // size)
                ends = passage.state_ends if rule.reuse is ReuseRule.EXACT_BOUNDARY else None
                for at in computed if ends is None else [end - 1 for end in ends if end - 1 in computed]:
                    there |= list_blocks(passage, group, range(at, at + 1))
            useful = sorted((one for one in there if one[1] in coming[number]), key=repr)
            best = max(best, boundary + max(search(number + 1, some) for some in choose(useful, passage.room_bytes)))
        return best

    def choose(blocks: Sequence[tuple[int, object]], room_bytes: float) -> list[frozenset[tuple[int, object]]]:
        if sum(groups[group][1] for group, _ in blocks) <= room_bytes:
            return [frozenset(blocks)]
        return [
            frozenset(some)
            for count in range(len(blocks) + 1)
            for some in combinations(blocks, count)
            if sum(groups[group][1] for group, _ in some) <= room_bytes
        ]

    return search(0, frozenset())


def make_passages(
    chance: random.Random, *, requests: int, tokens: int, room: Sequence[float], has_few_states: bool = False
) -> list[Passage]:
    """Requests that go on where others ended or part from them, in an engine whose room changes."""
    prompts: list[str] = []
    for _ in range(requests):
        old = chance.choice(prompts) if prompts and chance.random() < 0.8 else ""
        prompt = old[: chance.randint(0, len(old))]
        while len(prompt) < chance.randint(1, tokens):
            prompt += chance.choice("ab")
        prompts.append(prompt)
    return [
        Passage(
            [prompt[: at + 1] for at in range(len(prompt))],
            max(len(prompt) - 1, 0),
            chance.choice(room),
            [max(len(prompt) - 1, 0)] if has_few_states else None,
        )
        for prompt in prompts
    ]


@pytest.mark.parametrize("seed", range(25))
def test_with_one_group_the_bound_is_the_optimum(seed: int) -> None:
    chance = random.Random(seed)
    groups = [(PREFIX, 10)]
    passages = make_passages(chance, requests=6, tokens=5, room=[20, 30, 40, inf])
    assert HitBound(groups, passages, unit=1, step=1).count() == find_optimum(groups, passages)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(
    "groups",
    [[(PREFIX, 10), (WINDOW, 10)], [(PREFIX, 10), (STATE, 35)], [(PREFIX, 8), (WINDOW, 3), (STATE, 20)], [(STATE, 10)]],
    ids=["windows", "states", "both", "states alone"],
)
def test_with_windows_and_states_no_policy_hits_more(groups: Groups, seed: int) -> None:
    chance = random.Random(seed)
    passages = make_passages(chance, requests=4, tokens=4, room=[20, 40, 60, inf])
    bound = HitBound(groups, passages, unit=1, step=1)
    optimum = find_optimum(groups, passages)
    assert optimum <= bound.count() <= bound.all_tokens


@pytest.mark.parametrize("seed", range(25))
def test_states_are_hit_only_where_the_engine_makes_them(seed: int) -> None:
    groups = [(PREFIX, 10), (STATE, 35)]
    few, all_states = (
        make_passages(random.Random(seed), requests=5, tokens=4, room=[60, 90, inf], has_few_states=has_few)
        for has_few in (True, False)
    )
    bound = HitBound(groups, few, unit=1, step=1).count()
    assert find_optimum(groups, few) <= bound <= HitBound(groups, all_states, unit=1, step=1).count()


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_unequal_size_end_together(seed: int) -> None:
    groups = [(PAIRS, 15), (WINDOW, 4)]
    passages = make_passages(random.Random(seed), requests=4, tokens=6, room=[20, 30, 40])
    assert HitBound(groups, passages, unit=1, step=2).count() >= find_optimum(groups, passages, step=2)


def test_groups_of_the_same_rule_count_together() -> None:
    passages = make_passages(random.Random(1), requests=20, tokens=12, room=[60, 90])
    one, three = [(PREFIX, 10), (WINDOW, 9)], [(PREFIX, 10), (WINDOW, 2), (WINDOW, 3), (WINDOW, 4)]
    found = [HitBound(groups, passages, unit=1, step=1).count() for groups in (one, three)]
    assert found[0] == found[1] > 0


def test_with_room_for_everything_all_is_hit_that_was_there() -> None:
    passages = [Passage("abcd", 3), Passage("abxy", 3), Passage("abxyz", 4), Passage("q", 0)]
    bound = HitBound([(PREFIX, 10), (STATE, 100)], passages, unit=1, step=1)
    assert bound.count() == bound.all_tokens == 2 + 4


def test_nothing_is_hit_without_requests() -> None:
    assert HitBound([(PREFIX, 10)], [], unit=1, step=1).count() == 0
