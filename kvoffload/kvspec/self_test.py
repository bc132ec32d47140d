"""Before the first request: does a block come back as it was saved, through the copy path that will be used?"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.errors import SelfTestError
from kvoffload.kvspec.page_map import PageMap

if TYPE_CHECKING:
    import torch

Handle = TypeVar("Handle")
Save = Callable[[int, int], Handle]
"""(group, block) -> whatever `Load` needs. Returns when the bytes are safe."""
Load = Callable[[int, int, Handle], None]
"""(group, block, handle) -> None. Returns when the bytes are back."""

_Bytes = npt.NDArray[np.uint8]


def run_self_test(
    page_map: PageMap,
    memory: Mapping[str, torch.Tensor],
    *,
    free_blocks: Mapping[int, int],
    save: Save[Handle],
    load: Load[Handle],
) -> None:
    """Writes a pattern to one free block of every group, saves it, scrubs the block, loads it and compares.

    `free_blocks` names a block per stored group that no request uses. It is read and written here by plain slicing,
    apart from the copy path under test, and holds its former bytes again when this returns or raises.
    SelfTestError names group, layer and the first differing bytes; errors of `save` and `load` pass through.
    """
    for group, pages in enumerate(page_map.groups):
        if pages.record_bytes == 0:
            continue
        if group not in free_blocks:
            raise SelfTestError(f"group {pages.name}: no free block to test with", remedy="name one block per group")
        block = free_blocks[group]
        before = _read_block(page_map, memory, group=group, block=block)
        try:
            _try_block(page_map, memory, group=group, block=block, save=save, load=load)
        finally:
            _write_block(page_map, memory, group=group, block=block, data=before)


def _try_block(
    page_map: PageMap,
    memory: Mapping[str, torch.Tensor],
    *,
    group: int,
    block: int,
    save: Save[Handle],
    load: Load[Handle],
) -> None:
    pages = page_map.groups[group]
    # Random bytes, other ones for every group: a run at the wrong place cannot look right.
    random = np.random.default_rng(zlib.crc32(f"{group} {pages.name}".encode()))
    pattern = random.integers(0, 256, pages.record_bytes, dtype=np.uint8)
    _write_block(page_map, memory, group=group, block=block, data=pattern)
    handle = save(group, block)
    # The complement differs in every byte, so a byte that load leaves out is seen.
    _write_block(page_map, memory, group=group, block=block, data=np.bitwise_not(pattern))
    load(group, block, handle)
    after = _read_block(page_map, memory, group=group, block=block)
    wrong = np.flatnonzero(after != pattern)
    if not len(wrong):
        return
    part = pages.part_at(int(wrong[0]))
    in_part = wrong[wrong < part.offset + part.length]
    breaks = np.flatnonzero(np.diff(in_part) != 1)
    start, end = int(wrong[0]), int(in_part[breaks[0] if len(breaks) else -1]) + 1
    raise SelfTestError(
        f"group {pages.name}, layer {part.layer}, part {part.part}: bytes {start - part.offset} to {end - part.offset} "
        f"of block {block} did not come back as saved ({len(wrong)} of {pages.record_bytes} record bytes differ)",
        remedy="don't serve with this cache; report geometry, device and driver (kvoffload doctor)",
        group=pages.name,
        layer=part.layer,
        start=start - part.offset,
        end=end - part.offset,
    )


def _read_block(page_map: PageMap, memory: Mapping[str, torch.Tensor], *, group: int, block: int) -> _Bytes:
    import torch

    data = np.empty(page_map.groups[group].record_bytes, dtype=np.uint8)
    into = torch.from_numpy(data)
    for run in page_map.block_runs(group, block):
        flat = memory[run.allocation]
        _wait(flat)
        into[run.record_offset : run.record_offset + run.length].copy_(flat[run.start : run.start + run.length])
    return data


def _write_block(
    page_map: PageMap, memory: Mapping[str, torch.Tensor], *, group: int, block: int, data: _Bytes
) -> None:
    import torch

    source = torch.from_numpy(data)
    for run in page_map.block_runs(group, block):
        flat = memory[run.allocation]
        flat[run.start : run.start + run.length].copy_(source[run.record_offset : run.record_offset + run.length])
    for name in {run.allocation for run in page_map.block_runs(group, block)}:
        _wait(memory[name])


def _wait(tensor: torch.Tensor) -> None:
    """The copy path under test may use streams of its own, and knows nothing of ours."""
    if tensor.is_cuda:
        import torch

        torch.cuda.synchronize(tensor.device)
