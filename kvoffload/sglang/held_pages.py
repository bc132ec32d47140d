"""Which pages of a prompt are held, group by group, and what lengths of it can be restored from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from kvoffload.cache import LeasedGroup


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Describes the pages of one pool. `trailing_pages`: how many of them a length needs, its last ones; 0: all of
    them."""

    record_bytes: int
    page_rows: int
    """The engine names so many rows for a page."""
    trailing_pages: int = 0

    def first_needed(self, length: int) -> int:
        """Returns the first page that a length of so many pages needs."""
        return max(0, length - self.trailing_pages) if self.trailing_pages else 0


@dataclass(frozen=True, eq=False)
class HeldPages:
    """Knows of one group, by position in the prompt, whether the page is leased, where its record is, and its
    digest."""

    is_held: npt.NDArray[np.bool_]
    addresses: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint64]
    """0 is one that is not known."""

    @classmethod
    def of(cls, pages: int, group: LeasedGroup) -> Self:
        held = cls(np.zeros(pages, np.bool_), np.zeros(pages, np.uint64), np.zeros(pages, np.uint64))
        held.add(np.arange(group.first, group.first + len(group.addresses)), group)
        return held

    def add(self, positions: npt.NDArray[np.int64], group: LeasedGroup) -> None:
        """Adds leased pages at these positions, in the order of the group's addresses."""
        self.is_held[positions] = True
        self.addresses[positions] = group.addresses
        if len(group.digests):
            self.digests[positions] = group.digests[0]


def list_lengths(settings: Sequence[PoolSettings], is_there: Sequence[npt.NDArray[np.bool_]]) -> list[int]:
    """Every number of pages, from the first on, at which each group has what it needs."""
    pages = min(len(one) for one in is_there)
    if len(settings) == 1 and not settings[0].trailing_pages:
        (there,) = is_there
        return list(range(1, (pages if there.all() else int(there.argmin())) + 1))
    ends = np.arange(1, pages + 1)
    is_whole = np.ones(pages, np.bool_)
    for group, there in zip(settings, is_there, strict=True):
        firsts = np.maximum(ends - group.trailing_pages, 0) if group.trailing_pages else np.zeros_like(ends)
        sums = np.concatenate(([0], np.cumsum(there)))
        is_whole &= sums[ends] - sums[firsts] == ends - firsts
    lengths: list[int] = ends[is_whole].tolist()
    return lengths
