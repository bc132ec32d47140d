"""The simplest way to copy: torch indexing over the runs of a page map, on any device. It blocks the caller and follows
the device's current stream.

For tests alone: it shares no code with the copy engines, which are checked against it byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from kvoffload.errors import RegistrationError, StorageError, UnsupportedError
from kvoffload.kvspec.page_map import Int64s, PageMap


class PlainCopy:
    """Saves and loads whole records. Used by one thread at a time; `close` lets go of the engine's memory.

    `memory` maps allocation names to flat uint8 tensors over them, as `Registration.memory` gives them.
    """

    def __init__(self, page_map: PageMap, memory: Mapping[str, torch.Tensor]) -> None:
        for allocation in page_map.allocations:
            flat = memory.get(allocation.name)
            if flat is None:
                continue
            if flat.dtype != torch.uint8 or flat.dim() != 1 or flat.numel() < allocation.size_bytes:
                raise StorageError(
                    f"allocation {allocation.name}: {flat.numel()} elements of {flat.dtype}, "
                    f"{flat.dim()} dimensions, expected {allocation.size_bytes} flat uint8",
                    remedy="give the registration's memory",
                )
        self._page_map = page_map
        self._memory: Mapping[str, torch.Tensor] = MappingProxyType(dict(memory))

    def save(self, group: int, block_ids: Sequence[int] | Int64s, records: torch.Tensor) -> None:
        """Fills row i of `records` (uint8, one record per row) with block `block_ids[i]`."""
        ids = self._check(group, block_ids, records)
        for pages, begin, end in self._iter_runs(group):
            rows = _select(pages, ids)
            records[:, begin:end].copy_(rows)

    def load(self, group: int, block_ids: Sequence[int] | Int64s, records: torch.Tensor) -> None:
        """Writes row i of `records` to block `block_ids[i]`, and not one byte elsewhere. Blocks must be distinct."""
        ids = self._check(group, block_ids, records)
        if len(set(ids.tolist())) != len(ids):
            raise UnsupportedError(
                f"group {self._page_map.groups[group].name}: a block is loaded twice in one call",
                remedy="load each block from one record",
            )
        for pages, begin, end in self._iter_runs(group):
            span = _as_span(ids)
            if span is not None:
                pages[span].copy_(records[:, begin:end])
            else:
                pages.index_copy_(0, _to_index(ids, pages), records[:, begin:end].to(pages.device))

    def close(self) -> None:
        """Drops every reference to engine memory. Saving and loading fail from now on."""
        self._memory = MappingProxyType({})

    def _iter_runs(self, group: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yields for each run all its blocks as a (blocks, length) view of engine memory, and its bytes in the
        record."""
        pages = self._page_map.groups[group]
        for allocation, base, stride, length, offset in zip(
            pages.allocation.tolist(),
            pages.base.tolist(),
            pages.stride.tolist(),
            pages.length.tolist(),
            pages.record_offset.tolist(),
            strict=True,
        ):
            flat = self._memory.get(self._page_map.allocations[allocation].name)
            if flat is None:
                raise RegistrationError(
                    f"group {pages.name}: allocation {self._page_map.allocations[allocation].name} is not registered",
                    remedy="register the KV caches again after they were released",
                )
            shape = (self._page_map.count_blocks(group), length)
            yield torch.as_strided(flat, shape, (stride, 1), flat.storage_offset() + base), offset, offset + length

    def _check(self, group: int, block_ids: Sequence[int] | Int64s, records: torch.Tensor) -> Int64s:
        ids = self._page_map.check_blocks(block_ids, group=group)
        expected = (len(ids), self._page_map.groups[group].record_bytes)
        if records.dtype != torch.uint8 or tuple(records.shape) != expected:
            raise StorageError(
                f"group {self._page_map.groups[group].name}: records are {records.dtype} of shape "
                f"{tuple(records.shape)}, expected uint8 of shape {expected}",
                remedy="give one row of record_bytes per block",
            )
        return ids


def _select(pages: torch.Tensor, ids: Int64s) -> torch.Tensor:
    span = _as_span(ids)
    return pages[span] if span is not None else pages.index_select(0, _to_index(ids, pages))


def _as_span(ids: Int64s) -> slice | None:
    """Consecutive ascending ids as a slice: a view instead of a gather."""
    if len(ids) == 0 or (len(ids) > 1 and not bool((ids[1:] - ids[:-1] == 1).all())):
        return None
    return slice(int(ids[0]), int(ids[-1]) + 1)


def _to_index(ids: Int64s, pages: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids.copy()).to(pages.device)
