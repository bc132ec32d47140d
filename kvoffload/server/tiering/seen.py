"""Finds what memory and tiers have of a request's blocks, in parts: a long request holds up neither the event loop nor
other users."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from kvoffload.cache import LocalCache
from kvoffload.hash_rows import Rows
from kvoffload.server.common.steps import Steps, Unfinished, run_steps, take_parts
from kvoffload.server.tiering.looks import Found
from kvoffload.server.tiering.settings import FindNear, TierSpace

LOOKS_AT_ONCE = 1024
"""Number of looks that the event loop makes for one request, at most. Requests with more go to the thread for long
calls. A look takes 0.1 us, or 1 us for names that were chosen to share a chain of the index."""
PART_LOOKS = 4096
"""Number of looks after which that thread serves the next user."""
MAX_LOOKS = 524_288
"""Number of looks that one request may cost. What comes behind them in its chain is not looked for."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Seen:
    """The blocks of a request that memory has, and those that tiers have of the others."""

    in_memory: Found
    in_tiers: Mapping[int, Found]
    """Blocks by the tier's number. Tiers that have to be asked are left out."""

    def cut(self, rows: Sequence[Rows]) -> Seen:
        """Returns the same for the beginning of the request, of which each group has these rows."""
        in_tiers = {at: _cut(found, rows) for at, found in self.in_tiers.items()}
        return Seen(_cut(self.in_memory, rows), in_tiers)


def bound_tokens(space: TierSpace) -> int:
    """Returns how many tokens of a chain are looked for, so that it costs at most MAX_LOOKS."""
    groups = range(len(space.rules))
    return int(MAX_LOOKS / sum(_price(space, group) / space.rules[group].block_size for group in groups))


def count_looks(space: TierSpace, rows: Sequence[Rows]) -> int:
    """Returns the price of a request: a look into memory for each of its blocks, and one into a tier for each of their
    records."""
    return sum(len(names) * _price(space, group) for group, names in enumerate(rows))


def look_for(
    cache: LocalCache | None, space: TierSpace, rows: Sequence[Rows], tiers: Mapping[int, FindNear]
) -> Steps[Seen]:
    """Looks for the blocks of a request in memory, and in tiers that need not be asked, which are given by their
    numbers. Without a cache, memory counts as empty. From any thread."""
    left = PART_LOOKS
    in_memory = [np.zeros(len(names), np.bool_) for names in rows]
    for group, names in enumerate(rows if cache is not None else ()):
        assert cache is not None
        for first in range(0, len(names), PART_LOOKS):
            part = slice(first, first + min(PART_LOOKS, len(names) - first))
            in_memory[group][part] = cache.lookup(space.number, group, names[part].tobytes())
            if (left := left - len(names[part])) <= 0:
                left = PART_LOOKS
                yield
    in_tiers = {at: [np.zeros(len(names), np.bool_) for names in rows] for at in tiers}
    for at, find_near in tiers.items():
        for group, names in enumerate(rows):
            lacking = np.flatnonzero(~in_memory[group])
            for first in range(0, len(lacking), PART_LOOKS):
                part_at = lacking[first : first + PART_LOOKS]
                hashes, is_there = names[part_at].tobytes(), np.ones(len(part_at), np.bool_)
                for shard in range(space.shards(group)):
                    is_there &= find_near(space.names(group, hashes, shard))
                    if (left := left - len(part_at)) <= 0:
                        left = PART_LOOKS
                        yield
                in_tiers[at][group][part_at] = is_there
    return Seen(in_memory, in_tiers)


def serve_in_parts(
    steps: Steps[T], then: Callable[[T], R], *, looks: int
) -> R | Callable[[], Callable[[], R] | Unfinished]:
    """Looks at once where that is short, and returns the answer. Else it returns a callable for the thread for long
    calls. `then` is called with what was found, on the core's thread."""
    if looks <= LOOKS_AT_ONCE:
        return then(run_steps(steps))

    def conclude() -> Steps[Callable[[], R]]:
        found = yield from steps
        return partial(then, found)

    return take_parts(conclude())


def _cut(found: Found, rows: Sequence[Rows]) -> Found:
    return [there[: len(names)] for there, names in zip(found, rows, strict=True)]


def _price(space: TierSpace, group: int) -> int:
    return 1 + space.shards(group)
