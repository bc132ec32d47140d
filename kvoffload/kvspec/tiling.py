"""Exact coverage of addresses by claims: which owner covers which bytes, where two collide, and which bytes have none.

Claims are strided families; only as many of their repetitions are expanded as the caller asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NOBODY = -1
"""The group of claims that belong to no group: they never share a byte."""


class ClaimKind(IntEnum):
    """Lower wins where overlaid groups cover the same byte."""

    PAGE = 0
    EXCLUSION = 1
    PADDING = 2


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`count` intervals [base + i * stride, + length) of one owner. `overlay`: claims may meet only in the same one."""

    label: str
    kind: ClaimKind
    base: int
    stride: int
    length: int
    count: int
    group: int = NOBODY
    overlay: int = NOBODY

    @property
    def end(self) -> int:
        return self.base + (self.count - 1) * self.stride + self.length


@dataclass(frozen=True)
class Piece:
    """One interval of one claim."""

    claim: Claim
    block: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Coverage:
    """The address range cut at every claim's edge. Segment i is [points[i], points[i + 1])."""

    points: Int64s
    kind: Int64s
    """The winning ClaimKind of each segment, -1 for a hole."""
    conflict: Bools
    pieces: tuple[Int64s, Int64s, Int64s, Int64s]

    def first_hole(self) -> tuple[int, int] | None:
        holes = np.flatnonzero(self.kind < 0)
        return (int(self.points[holes[0]]), int(self.points[holes[0] + 1])) if len(holes) else None

    def first_conflict(self, claims: Sequence[Claim]) -> tuple[Piece, Piece] | None:
        """Two pieces that collide at the lowest address where any do."""
        bad = np.flatnonzero(self.conflict)
        if not len(bad):
            return None
        start, end, owner, block = self.pieces
        address = self.points[bad[0]]
        here = [
            Piece(claims[owner[i]], int(block[i]), int(start[i]), int(end[i]))
            for i in np.flatnonzero((start <= address) & (address < end))
        ]
        return next((one, other) for i, one in enumerate(here) for other in here[i + 1 :] if not may_share(one, other))

    def bytes_of(self, kind: ClaimKind, *, limit: int) -> int:
        """Bytes below `limit` that end up as this kind."""
        edges = np.minimum(self.points, limit)
        return int((edges[1:] - edges[:-1])[self.kind == kind].sum())


def may_share(one: Piece, other: Piece) -> bool:
    """Whether two pieces may cover the same byte.

    Only pieces of different groups that overlay each other by declaration may. A block id belongs to one of those
    groups at a time, so pages may meet in the same block; pages of different blocks would destroy each other.
    """
    a, b = one.claim, other.claim
    if a.group == b.group or a.overlay == NOBODY or a.overlay != b.overlay:
        return False
    return one.block == other.block or ClaimKind.PADDING in (a.kind, b.kind)


def cover(claims: Sequence[Claim], *, low: int, high: int, repetitions: int) -> Coverage:
    """Coverage of [low, high) by at most the first `repetitions` intervals of every claim."""
    start, end, owner, block = _expand(claims, repetitions)
    start, end = np.maximum(start, low), np.minimum(end, high)
    inside = start < end
    start, end, owner, block = start[inside], end[inside], owner[inside], block[inside]
    points = np.unique(np.concatenate((start, end, np.array([low, high], dtype=np.int64))))
    first, last = np.searchsorted(points, start), np.searchsorted(points, end)

    def depth(selected: Bools, weight: Int64s) -> Int64s:
        """Per segment, the summed weights of the selected pieces that cover it."""
        change = np.zeros(len(points), dtype=np.int64)
        np.add.at(change, first[selected], weight[selected])
        np.add.at(change, last[selected], -weight[selected])
        return np.cumsum(change)[:-1]

    once = np.ones(len(owner), dtype=np.int64)
    kinds = np.array([claim.kind for claim in claims], dtype=np.int64)[owner]
    kind = np.full(len(points) - 1, -1, dtype=np.int64)
    for value in sorted(ClaimKind, reverse=True):
        kind[depth(kinds == value, once) > 0] = value
    conflict = _find_conflicts(claims, owner, block, depth)
    return Coverage(points, kind, conflict, (start, end, owner, block))


def _find_conflicts(
    claims: Sequence[Claim], owner: Int64s, block: Int64s, depth: Callable[[Bools, Int64s], Int64s]
) -> Bools:
    """Segments on which two pieces meet that `may_share` refuses, told from counts alone."""
    group_of = np.array([claim.group for claim in claims], dtype=np.int64)[owner]
    is_page = np.array([claim.kind is not ClaimKind.PADDING for claim in claims])[owner]
    overlay = {claim.group: claim.overlay for claim in claims}
    once = np.ones(len(owner), dtype=np.int64)
    groups = sorted(overlay)
    depths = {group: depth(group_of == group, once) for group in groups}
    conflict: Bools = np.any([value > 1 for value in depths.values()], axis=0)
    # Where a group has one page only (else there is a conflict already), the sum of block numbers is its block.
    pages = {group: depth((group_of == group) & is_page, once) for group in groups}
    blocks = {group: depth((group_of == group) & is_page, block) for group in groups}
    for i, one in enumerate(groups):
        for other in groups[i + 1 :]:
            both = (depths[one] > 0) & (depths[other] > 0)
            if overlay[one] != NOBODY and overlay[one] == overlay[other]:
                both &= (pages[one] > 0) & (pages[other] > 0) & (blocks[one] != blocks[other])
            conflict |= both
    return conflict


def _expand(claims: Sequence[Claim], repetitions: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Start, end, claim index and block number of every piece."""
    base, stride, length, count = (
        np.array([getattr(claim, name) for claim in claims], dtype=np.int64)
        for name in ("base", "stride", "length", "count")
    )
    count = np.minimum(count, repetitions)
    owner = np.repeat(np.arange(len(claims), dtype=np.int64), count)
    block = np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    start = base[owner] + block * stride[owner]
    return start, start + length[owner], owner, block
