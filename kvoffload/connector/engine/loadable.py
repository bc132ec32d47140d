"""Finds the useful blocks of a model with several groups: those needed by a boundary that all groups accept.

A router that knew all blocks of full attention would count too many leading blocks of a prompt: beyond the last block
that has its state, or its window, nothing can be loaded.
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
"""Maximum number of tracked blocks. Further ones are not reported."""
NO_PARENT = bytes(HASH_BYTES)


@dataclass(eq=False, slots=True)
class _Block:
    """The blocks of all groups that end at one token of one prompt."""

    parent: bytes | None = None
    """The name of the block before it; None: it is not known."""
    groups: int = 0
    """The groups that have it, one bit each."""
    depth: int = 0
    """Number of blocks up to its end, if all prefix groups have all of them, else 0."""
    runs: tuple[int, ...] = ()
    """Number of blocks in a row up to here, for each window group; counted up to the most that a boundary needs."""
    is_boundary: bool = False
    uses: int = 0
    """Number of its children that are of use, and one more if it is a boundary itself."""


class _Window(NamedTuple):
    rule: GroupRule
    bit: int
    per_block: int
    """Number of the first prefix group's blocks for each of its own, at least 1."""
    most: int
    """Maximum number of its blocks that a boundary needs."""


class Change(NamedTuple):
    """Blocks of the first prefix group that become useful, each with the one before it, and those that cease to be."""

    gained: list[tuple[bytes, bytes]]
    lost: list[bytes]


class LoadableBlocks:
    """Keeps track of the blocks of one identity. Owned by one thread."""

    def __init__(
        self, rules: Mapping[int, GroupRule], *, first_prefix: int, alignment: int, limit: int = MAX_BLOCKS
    ) -> None:
        """`rules` are those of the groups in events, by group. A boundary is a multiple of `alignment`."""
        self._limit = limit
        self._size = rules[first_prefix].block_size
        self._first_prefix = first_prefix
        self._bits = {group: 1 << at for at, group in enumerate(rules)}
        self._rules = rules
        self._prefixes = self._bits_of(rules, ReuseRule.PREFIX)
        self._states = self._bits_of(rules, ReuseRule.EXACT_BOUNDARY)
        windows = [group for group, rule in rules.items() if rule.reuse.has_window]
        self._windows = tuple(self._describe_window(rules[group], self._bits[group]) for group in windows)
        self._no_runs = (0,) * len(self._windows)
        step = lcm(alignment, *(rule.block_size for rule in rules.values()))
        self._step = step // self._size
        self._blocks: dict[bytes, _Block] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._was_of_use: dict[bytes, bool] = {}
        """Whether each block was useful before the present call, for blocks whose use has changed in it."""

    def __len__(self) -> int:
        """Returns the number of tracked blocks."""
        return len(self._blocks)

    def note_stored(self, group: int, names: list[bytes], parents: list[bytes]) -> Change:
        """Notes that a group has these blocks, with `parents` as in events and listings of the server."""
        bit, is_fine = self._bits[group], self._rules[group].block_size < self._size
        for name, parent in zip(names, parents, strict=True):
            # Such a block ends within one of the first prefix group, where that group has no block.
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
        """Notes that a group has lost these blocks."""
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
        """Updates a block, and those after it as far as they change."""
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
        """Returns how many blocks a boundary needs: the group's own, or the first prefix group's if they are larger."""
        needed = needed_blocks(rule, local=0, boundary=tokens)
        per = max(self._size // rule.block_size, 1)
        return needed.stop // per - needed.start // per

    def _use(self, name: bytes, change: int) -> None:
        """Adds or removes a use of a block. Its first use adds one to the block before it, its last removes one
        there."""
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
        # A gained block has to come after the one before it.
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
