"""Which device bytes make the record of one block: pure data, independent of the number of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.errors import BlockCountError, GeometryError
from kvoffload.kvspec.geometry import KVGeometry
from kvoffload.kvspec.group import GroupSpec
from kvoffload.kvspec.placement import Allocation

Int64s = npt.NDArray[np.int64]


class BlockRun(NamedTuple):
    """One piece of one block: where it is in engine memory and in the block's record."""

    allocation: str
    start: int
    length: int
    record_offset: int


class RecordPart(NamedTuple):
    """Bytes [offset, offset + length) of a record are this part of this layer."""

    layer: str
    part: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupPages:
    """One group's runs as parallel arrays, in record order. Row i of block b: `base[i] + b * stride[i]`, `length[i]`.

    `allocation[i]` is a position in `PageMap.allocations`. Runs that touch in memory and in the record are one.
    """

    name: str
    record_bytes: int
    parts: tuple[RecordPart, ...]
    allocation: Int64s
    base: Int64s
    stride: Int64s
    length: Int64s
    record_offset: Int64s
    num_blocks: int = 0
    """0: as many as the page map says."""

    @property
    def num_runs(self) -> int:
        return len(self.base)

    def part_at(self, offset: int) -> RecordPart:
        """The part that a byte of the record belongs to."""
        for part in self.parts:
            if part.offset <= offset < part.offset + part.length:
                return part
        raise GeometryError(f"group {self.name}: a record has no byte {offset}", remedy="", group=self.name)


@dataclass(frozen=True, kw_only=True, eq=False)
class PageMap:
    """All groups' pages. A group whose layers are all excluded has records of 0 bytes and no runs.

    Where records are of units of heads, each group of the geometry has one here for each unit of the rank, in a row.
    """

    num_blocks: int
    null_block: int | None
    allocations: tuple[Allocation, ...]
    groups: tuple[GroupPages, ...]

    def count_blocks(self, group: int) -> int:
        return self.groups[group].num_blocks or self.num_blocks

    def block_runs(self, group: int, block: int) -> list[BlockRun]:
        """The pieces of one block, in record order."""
        (block,) = self.check_blocks([block], group=group)
        pages = self.groups[group]
        starts = pages.base + int(block) * pages.stride
        return [
            BlockRun(self.allocations[allocation].name, start, length, offset)
            for allocation, start, length, offset in zip(
                pages.allocation.tolist(),
                starts.tolist(),
                pages.length.tolist(),
                pages.record_offset.tolist(),
                strict=True,
            )
        ]

    def check_blocks(self, blocks: Sequence[int] | Int64s, *, group: int) -> Int64s:
        """Block ids as an array; BlockCountError for one that is out of range or the null block."""
        ids, count = np.asarray(blocks, dtype=np.int64).reshape(-1), self.count_blocks(group)
        wrong = (ids < 0) | (ids >= count)
        if self.null_block is not None:
            wrong |= ids == self.null_block
        if wrong.any():
            block = int(ids[wrong][0])
            what = "is the null block" if block == self.null_block else f"is not one of 0 to {count - 1}"
            raise BlockCountError(
                f"group {self.groups[group].name}: block {block} {what}",
                remedy="move only blocks that the engine's block table holds",
                block=block,
                group=self.groups[group].name,
            )
        return ids


def build_page_map(geometry: KVGeometry) -> PageMap:
    index = {allocation.name: position for position, allocation in enumerate(geometry.allocations)}
    return PageMap(
        num_blocks=geometry.num_blocks,
        null_block=geometry.null_block,
        allocations=geometry.allocations,
        groups=tuple(
            _build_group(geometry, group, index, unit)
            for group in geometry.groups
            for unit in range(geometry.records_per_block)
        ),
    )


def _build_group(geometry: KVGeometry, group: GroupSpec, index: dict[str, int], unit: int) -> GroupPages:
    rows: list[tuple[int, int, int, int]] = []
    parts: list[RecordPart] = []
    offset = 0
    for layer in group.layers:
        if not layer.is_stored:
            continue
        for placement in geometry.placements_of[layer.name]:
            runs = placement.runs if geometry.units is None else geometry.cuts[placement.label].runs[unit]
            rows += [(index[run.allocation], run.base, run.stride, run.length) for run in runs]
            length = sum(run.length for run in runs)
            parts.append(RecordPart(layer.name, placement.part, offset, length))
            offset += length
    assert offset == geometry.record_bytes(group)
    columns = _merge(np.array(rows, dtype=np.int64).reshape(-1, 4))
    name = group.name if geometry.units is None else f"{group.name}, unit {unit} of the rank"
    return GroupPages(name=name, record_bytes=offset, parts=tuple(parts), num_blocks=group.num_blocks, **columns)


def _merge(rows: Int64s) -> dict[str, Int64s]:
    """Columns of the runs, with runs that follow each other in memory as they do in the record made one."""
    allocation, base, stride, length = rows.T
    follows = (allocation[1:] == allocation[:-1]) & (stride[1:] == stride[:-1]) & (base[1:] == base[:-1] + length[:-1])
    first = np.concatenate(([True], ~follows)) if len(rows) else np.zeros(0, dtype=bool)
    starts = np.flatnonzero(first)
    merged = np.add.reduceat(length, starts) if len(rows) else length
    columns = {
        "allocation": allocation[starts],
        "base": base[starts],
        "stride": stride[starts],
        "length": merged,
        "record_offset": (np.cumsum(length) - length)[starts],
    }
    return {name: _frozen(column) for name, column in columns.items()}


def _frozen(values: Iterable[int] | Int64s) -> Int64s:
    column = np.ascontiguousarray(values, dtype=np.int64).copy()
    column.flags.writeable = False
    return column
