"""How far a prefix may be reused: the longest boundary that every group accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.types import BlockHash, ReuseRule

IsPresent = Callable[[int, int], bool]
"""(group, index of a block in the request) -> its record can be loaded."""


class EntryKey(NamedTuple):
    """One block's records in one group, of one identity."""

    group: int
    block_hash: BlockHash


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    """One group's condition for a boundary. `block_size` and `window` are in tokens."""

    block_size: int
    reuse: ReuseRule
    window: int = 0

    def spare_tokens(self, alignment: int) -> int:
        """Returns how many tokens a request may gain beyond a boundary before the engine drops a block that a hit there
        needs: one of a window that moves on, or of a chunk that is over. Boundaries are multiples of `alignment`."""
        if self.reuse.is_chunked:
            return gcd(alignment, self.window) - 1
        whole_blocks = -(-(self.window - 1) // self.block_size) * self.block_size
        return self.block_size + self.window - 2 - whole_blocks


def needed_blocks(rule: GroupRule, *, local: int, boundary: int) -> range:
    """The blocks of this group that a load up to `boundary` must bring when the engine has `local` tokens itself."""
    end = boundary // rule.block_size
    if rule.reuse is ReuseRule.EXACT_BOUNDARY:
        return range(max(0, end - 1), end)
    if rule.reuse is ReuseRule.NOTHING:
        return range(0)
    first = local // rule.block_size
    if rule.reuse is ReuseRule.WINDOW:
        # The token at `boundary` sees itself and window - 1 tokens before it.
        first = max(first, (boundary - rule.window + 1) // rule.block_size)
    elif rule.reuse is ReuseRule.CHUNK:
        first = max(first, boundary // rule.window * rule.window // rule.block_size)
    return range(first, end)


def longest_boundary(
    rules: Sequence[GroupRule], *, local: int, limit: int, is_present: IsPresent, alignment: int = 1
) -> int:
    """The largest boundary in (local, limit] at which every group finds what it needs; `local` if there is none.

    A boundary is a multiple of every group's block size and of `alignment`. Blocks before `local` are the engine's own.
    Where no group keeps anything there is nothing to reuse, so there is no boundary either.
    """
    if all(rule.reuse is ReuseRule.NOTHING for rule in rules):
        return local
    step = lcm(alignment, *(rule.block_size for rule in rules))
    boundary = limit // step * step
    for group, rule in enumerate(rules):
        if rule.reuse is ReuseRule.PREFIX:
            boundary = min(boundary, _prefix_end(group, rule, local=local, limit=boundary, is_present=is_present))
    boundary = boundary // step * step
    suffix_rules = [(group, rule) for group, rule in enumerate(rules) if rule.reuse is not ReuseRule.PREFIX]
    while boundary > local:
        if all(
            is_present(group, index)
            for group, rule in suffix_rules
            for index in needed_blocks(rule, local=local, boundary=boundary)
        ):
            return boundary
        boundary -= step
    return local


def find_reach(
    rules: Sequence[GroupRule],
    present: Sequence[npt.NDArray[np.bool_]],
    *,
    local: int,
    limit: int,
    alignment: int = 1,
) -> int:
    """`longest_boundary` of what is present by group and position; beyond the end of an array nothing is."""
    kept = [at for at, rule in enumerate(rules) if rule.reuse is not ReuseRule.NOTHING]
    step = lcm(alignment, *(rule.block_size for rule in rules))
    boundary = min((len(present[at]) * rules[at].block_size for at in kept), default=local)
    boundary = min(boundary, limit)
    for at in kept:
        rule = rules[at]
        if rule.reuse is ReuseRule.PREFIX:
            first = local // rule.block_size
            part = present[at][first : boundary // rule.block_size]
            count = len(part) if part.all() else int(part.argmin())
            boundary = min(boundary, (first + count) * rule.block_size)
    boundary = boundary // step * step
    candidates = np.arange(boundary, local, -step)
    is_whole = np.ones(len(candidates), np.bool_)
    for at in kept:
        if rules[at].reuse is not ReuseRule.PREFIX:
            firsts, ends = _needed_ends(rules[at], local=local, boundaries=candidates)
            sums = np.concatenate(([0], np.cumsum(present[at])))
            is_whole &= sums[ends] - sums[firsts] == ends - firsts
    return int(candidates[is_whole.argmax()]) if is_whole.any() else local


def _needed_ends(
    rule: GroupRule, *, local: int, boundaries: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of many boundaries at once where `needed_blocks` begins, and where it ends."""
    ends = boundaries // rule.block_size
    if rule.reuse is ReuseRule.EXACT_BOUNDARY:
        return np.maximum(ends - 1, 0), ends
    firsts = np.full_like(ends, local // rule.block_size)
    if rule.reuse is ReuseRule.WINDOW:
        firsts = np.maximum(firsts, (boundaries - rule.window + 1) // rule.block_size)
    elif rule.reuse is ReuseRule.CHUNK:
        firsts = np.maximum(firsts, boundaries // rule.window * rule.window // rule.block_size)
    return np.minimum(firsts, ends), ends


def _prefix_end(group: int, rule: GroupRule, *, local: int, limit: int, is_present: IsPresent) -> int:
    index = local // rule.block_size
    while index < limit // rule.block_size and is_present(group, index):
        index += 1
    return index * rule.block_size
