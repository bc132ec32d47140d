"""Events of a hybrid model name the blocks that a load can bring, over any history."""

from __future__ import annotations

import hashlib
from random import Random

import numpy as np
import pytest

from kvoffload.cache import GroupRule, find_reach
from kvoffload.connector.engine.loadable import NO_PARENT, Change, LoadableBlocks
from kvoffload.kvspec import ReuseRule

FULL, OTHER, SMALL = 0, 1, 4
PREFIX = GroupRule(block_size=8, reuse=ReuseRule.PREFIX)
GEOMETRIES = {
    "states": {FULL: PREFIX, OTHER: GroupRule(block_size=16, reuse=ReuseRule.EXACT_BOUNDARY)},
    "windows": {FULL: PREFIX, OTHER: GroupRule(block_size=8, reuse=ReuseRule.WINDOW, window=24)},
    "large windows": {FULL: PREFIX, OTHER: GroupRule(block_size=16, reuse=ReuseRule.WINDOW, window=40)},
    "chunks": {FULL: PREFIX, OTHER: GroupRule(block_size=8, reuse=ReuseRule.CHUNK, window=32)},
    "all of them": {
        FULL: PREFIX,
        1: GroupRule(block_size=8, reuse=ReuseRule.WINDOW, window=17),
        2: GroupRule(block_size=16, reuse=ReuseRule.EXACT_BOUNDARY),
        3: GroupRule(block_size=8, reuse=ReuseRule.PREFIX),
    },
}
BLOCKS = 12


def name_of(prompt: int, tokens: int, fork: int = 0) -> bytes:
    """The name of what ends at a token. Prompts have all up to `fork` in common."""
    return hashlib.sha256(repr((prompt if tokens > fork else -1, tokens)).encode()).digest()


class Pool:
    """The stored blocks, and those that a router is told of."""

    def __init__(self, rules: dict[int, GroupRule], *, fork: int = 0, limit: int = 1 << 18) -> None:
        self.rules = rules
        self.fork = fork
        self.loadable = LoadableBlocks(rules, first_prefix=FULL, alignment=8, limit=limit)
        self.stored: set[tuple[int, bytes]] = set()
        self.known: set[bytes] = set()

    def names(self, prompt: int, group: int) -> list[bytes]:
        size = self.rules[group].block_size
        return [name_of(prompt, end, self.fork) for end in range(size, 8 * BLOCKS + 1, size)]

    def store(self, prompt: int, group: int, first: int, end: int) -> None:
        names = self.names(prompt, group)
        is_prefix = self.rules[group].reuse is ReuseRule.PREFIX
        parents = [NO_PARENT, *names[:-1]] if is_prefix else names
        self.stored.update((group, name) for name in names[first:end])
        self.hear(self.loadable.note_stored(group, names[first:end], parents[first:end]))

    def remove(self, prompt: int, group: int, first: int, end: int) -> None:
        names = self.names(prompt, group)[first:end]
        self.stored.difference_update((group, name) for name in names)
        self.hear(self.loadable.note_removed(group, names))

    def hear(self, change: Change) -> None:
        gained = [name for name, _ in change.gained]
        assert not self.known & set(gained)
        assert self.known >= set(change.lost)
        for name, parent in change.gained:
            assert parent == NO_PARENT or parent in self.known
            self.known.add(name)
        self.known -= set(change.lost)

    def reach(self, prompt: int, limit: int = 8 * BLOCKS) -> int:
        """How far a load of this prompt can go, as the server says."""
        present = [
            np.array([(group, name) in self.stored for name in self.names(prompt, group)]) for group in self.rules
        ]
        return find_reach(list(self.rules.values()), present, local=0, limit=limit, alignment=8)

    def overlap(self, prompt: int) -> int:
        """The tokens that a router expects, which counts the leading blocks that it knows."""
        names = self.names(prompt, FULL)
        return 8 * next((at for at, name in enumerate(names) if name not in self.known), len(names))


@pytest.mark.parametrize("rules", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("seed", range(4))
def test_leading_blocks_that_are_known_are_what_can_be_loaded(rules: dict[int, GroupRule], seed: int) -> None:
    random = Random(seed)
    pool = Pool(rules)
    for _ in range(200):
        prompt, group = random.randrange(3), random.choice(list(rules))
        first = random.randrange(BLOCKS)
        if random.random() < 0.6:
            pool.store(prompt, group, random.choice((0, first)), BLOCKS)
        else:
            pool.remove(prompt, group, first, first + random.randrange(1, 4))
        for each in range(3):
            assert pool.overlap(each) == pool.reach(each)


@pytest.mark.parametrize("rules", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("seed", range(2))
def test_of_prompts_with_a_common_beginning_all_that_one_of_them_can_load_is_known(
    rules: dict[int, GroupRule], seed: int
) -> None:
    random = Random(seed)
    pool = Pool(rules, fork=40)
    for _ in range(200):
        prompt, group = random.randrange(3), random.choice(list(rules))
        first = random.randrange(BLOCKS)
        if random.random() < 0.6:
            pool.store(prompt, group, random.choice((0, first)), BLOCKS)
        else:
            pool.remove(prompt, group, first, first + random.randrange(1, 4))
        wanted = {name for each in range(3) for name in pool.names(each, FULL)[: pool.reach(each) // 8]}
        assert pool.known == wanted


def test_nothing_is_kept_of_what_has_gone() -> None:
    pool = Pool(GEOMETRIES["all of them"])
    for group in pool.rules:
        pool.store(1, group, 0, BLOCKS)
    assert pool.overlap(1) == 8 * BLOCKS
    assert len(pool.loadable) == BLOCKS
    for group in pool.rules:
        pool.remove(1, group, 0, BLOCKS)
    assert (len(pool.loadable), pool.known) == (0, set())


def test_blocks_beyond_the_bound_are_not_told() -> None:
    pool = Pool(GEOMETRIES["windows"], limit=5)
    for group in pool.rules:
        pool.store(1, group, 0, BLOCKS)
        pool.store(2, group, 0, BLOCKS)
    assert (pool.overlap(1), pool.overlap(2)) == (40, 0)
    assert len(pool.loadable) == 5


def test_a_block_whose_beginning_is_not_known_is_of_no_use() -> None:
    """A listing says so by the block's own name."""
    pool = Pool(GEOMETRIES["states"])
    names = pool.names(1, FULL)
    pool.loadable.note_stored(OTHER, pool.names(1, OTHER), pool.names(1, OTHER))
    assert pool.loadable.note_stored(FULL, names, names) == Change([], [])
    gained, _ = pool.loadable.note_stored(FULL, names, [NO_PARENT, *names[:-1]])
    assert [name for name, _ in gained] == names


def test_small_windows_count_where_they_end_with_a_block() -> None:
    """For other windows it is not known in which block they are."""
    rules = {FULL: PREFIX, SMALL: GroupRule(block_size=4, reuse=ReuseRule.WINDOW, window=16)}
    loadable = LoadableBlocks(rules, first_prefix=FULL, alignment=8)
    full = [name_of(1, end) for end in (8, 16)]
    loadable.note_stored(FULL, full, [NO_PARENT, full[0]])
    fine = [name_of(1, end) for end in (4, 8, 12, 16)]
    gained, _ = loadable.note_stored(SMALL, fine, [NO_PARENT, fine[1], NO_PARENT, fine[3]])
    assert [name for name, _ in gained] == full
    assert len(loadable) == 2
