"""Which blocks of a model with several groups are of use: those that a boundary needs which all groups accept.

A router that counts the leading blocks it knows of a prompt counts too many if it knows all of full attention: behind
the last block that has its state, or its window, nothing can be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from kvoffload.cache import GroupRule, needed_blocks
from kvoffload.kvspec import ReuseRule
from kvoffload.types import HASH_BYTES

MAX_BLOCKS = 1 << 18
"""That are kept track of. Those beyond are not told."""
NO_PARENT = bytes(HASH_BYTES)


@dataclass(eq=False, slots=True)
class _Block:
    """What ends at one token of one prompt, in all groups."""

    parent: bytes | None = None
    """The block before it; None: it is not known."""
    groups: int = 0
    """That have it, one bit each."""
    depth: int = 0
    """How many blocks all prefix groups have up to its end; 0: one of them lacks one."""
    runs: tuple[int, ...] = ()
    """By window group: how many of its blocks follow each other up to here, as many as any boundary needs at most."""
    is_boundary: bool = False
    uses: int = 0
    """Of its children those that are of use, and itself as a boundary."""


class _Window(NamedTuple):
    rule: GroupRule
    bit: int
    per_block: int
    """Blocks of the first prefix group that end before or with one of its own."""
    most: int
    """Of its blocks that any boundary needs."""


class Change(NamedTuple):
    """Blocks of the first prefix group that are of use from now on, with the ones before them, and that are no more."""

    gained: list[tuple[bytes, bytes]]
    lost: list[bytes]


class LoadableBlocks:
    """Keeps track of the blocks of one identity. Owned by one thread."""

    def __init__(
        self, rules: Mapping[int, GroupRule], *, first_prefix: int, alignment: int, limit: int = MAX_BLOCKS
    ) -> None:
        """`rules`: by the groups that are told of. A boundary is a multiple of `alignment`."""
        self._limit = limit
        self._size = rules[first_prefix].block_size
        self._first_prefix = first_prefix
        self._bits = {group: 1 << at for at, group in enumerate(rules)}
        self._rules = rules
        self._prefixes = self._bits_of(rules, ReuseRule.PREFIX)
        self._states = self._bits_of(rules, ReuseRule.EXACT_BOUNDARY)
        windows = [group for group, rule in rules.items() if rule.reuse in (ReuseRule.WINDOW, ReuseRule.CHUNK)]
        self._windows = tuple(self._describe_window(rules[group], self._bits[group]) for group in windows)
        self._no_runs = (0,) * len(self._windows)
        step = lcm(alignment, *(rule.block_size for rule in rules.values()))
        self._step = step // self._size
        self._blocks: dict[bytes, _Block] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._was_of_use: dict[bytes, bool] = {}
        """Of blocks whose use has changed in the present call."""

    def __len__(self) -> int:
        """How many blocks are kept track of."""
        return len(self._blocks)

    def note_stored(self, group: int, names: list[bytes], parents: list[bytes]) -> Change:
        """A group has these blocks. `parents`: as in events and listings of the server."""
        bit, is_fine = self._bits[group], self._rules[group].block_size < self._size
        for name, parent in zip(names, parents, strict=True):
            # Of a block that ends within one of the prefix group nothing is known but that there is none of the latter.
            if is_fine and parent == NO_PARENT:
                continue
            block = self._blocks.get(name)
            if block is None:
                if len(self._blocks) >= self._limit:
                    continue
                block = self._blocks[name] = _Block(runs=self._no_runs)
            block.groups |= bit
            if group == self._first_prefix and parent != name and block.parent is None:
                block.parent = parent
                if parent != NO_PARENT:
                    self._children.setdefault(parent, set()).add(name)
            self._follow(name)
        return self._take_change()

    def note_removed(self, group: int, names: list[bytes]) -> Change:
        """A group has these blocks no more."""
        bit = self._bits[group]
        empty = []
        for name in names:
            block = self._blocks.get(name)
            if block is not None:
                block.groups &= ~bit
                self._follow(name)
                if not block.groups:
                    empty.append(name)
        change = self._take_change()
        for name in empty:
            self._forget(name)
        return change

    def _follow(self, name: bytes) -> None:
        """Works out what is so of a block, and of those behind it as far as it changes there."""
        changed = [name]
        while changed:
            name = changed.pop()
            block = self._blocks.get(name)
            if block is None:
                continue
            before = None if block.parent is None else self._blocks.get(block.parent)
            depth = self._count_depth(block, before)
            runs = self._no_runs
            if depth:
                runs = tuple(
                    self._count_run(window, at, block, before, depth) for at, window in enumerate(self._windows)
                )
            is_boundary = self._is_boundary(block, depth, runs)
            if is_boundary is not block.is_boundary:
                block.is_boundary = is_boundary
                self._use(name, 1 if is_boundary else -1)
            if (depth, runs) != (block.depth, block.runs):
                block.depth, block.runs = depth, runs
                changed.extend(self._children.get(name, ()))

    def _count_depth(self, block: _Block, before: _Block | None) -> int:
        if block.groups & self._prefixes != self._prefixes:
            return 0
        if block.parent == NO_PARENT:
            return 1
        return before.depth + 1 if before is not None and before.depth else 0

    def _count_run(self, window: _Window, at: int, block: _Block, before: _Block | None, depth: int) -> int:
        earlier = 0 if before is None else before.runs[at]
        if depth % window.per_block:
            return earlier
        return min(earlier + 1, window.most) if block.groups & window.bit else 0

    def _is_boundary(self, block: _Block, depth: int, runs: tuple[int, ...]) -> bool:
        if not depth or depth % self._step or block.groups & self._states != self._states:
            return False
        tokens = depth * self._size
        counted = zip(self._windows, runs, strict=True)
        return all(run >= self._count_needed(window.rule, tokens) for window, run in counted)

    def _count_needed(self, rule: GroupRule, tokens: int) -> int:
        """In its own blocks, or in those of the first prefix group where they are larger."""
        needed = needed_blocks(rule, local=0, boundary=tokens)
        per = max(self._size // rule.block_size, 1)
        return needed.stop // per - needed.start // per

    def _use(self, name: bytes, change: int) -> None:
        """A block is needed once more or once less, and those before it with the first need and the last."""
        while name != NO_PARENT:
            block = self._blocks[name]
            self._was_of_use.setdefault(name, block.uses > 0)
            block.uses += change
            if block.uses != (1 if change > 0 else 0):
                return
            assert block.parent is not None
            name = block.parent

    def _take_change(self) -> Change:
        changed, self._was_of_use = self._was_of_use, {}
        moved = [name for name, was_of_use in changed.items() if (self._blocks[name].uses > 0) is not was_of_use]
        gained = [(self._blocks[name].depth, name) for name in moved if not changed[name]]
        # A block comes behind the one before it, and goes ahead of it.
        gained.sort(key=lambda one: one[0])
        lost = [name for name in moved if changed[name]]
        return Change([(name, self._blocks[name].parent or NO_PARENT) for _, name in gained], lost)

    def _forget(self, name: bytes) -> None:
        block = self._blocks.pop(name, None)
        siblings = None if block is None or block.parent is None else self._children.get(block.parent)
        if siblings is not None and block is not None and block.parent is not None:
            siblings.discard(name)
            if not siblings:
                del self._children[block.parent]

    def _bits_of(self, rules: Mapping[int, GroupRule], reuse: ReuseRule) -> int:
        return sum(self._bits[group] for group, rule in rules.items() if rule.reuse is reuse)

    def _describe_window(self, rule: GroupRule, bit: int) -> _Window:
        per_block = max(rule.block_size // self._size, 1)
        unit = max(rule.block_size, self._size)
        return _Window(rule, bit, per_block, -(-rule.window // unit) + 1)
