"""kvspec's self-test through a copy engine: the very one that will be used, with the plans that it will get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvoffload.errors import SelfTestError
from kvoffload.kvspec.page_map import PageMap
from kvoffload.kvspec.self_test import run_self_test
from kvoffload.transfer.copy_engine import CopyDirection, CopyEngine, CopyItems

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 30.0
"""For one block."""

_Bytes = npt.NDArray[np.uint8]
unended_records: list[_Bytes] = []
"""Records of copies that did not end: they may still be written to."""


def run_copy_self_test(
    engine: CopyEngine,
    page_map: PageMap,
    memory: Mapping[str, torch.Tensor],
    *,
    free_blocks: Mapping[int, int],
    has_digests: bool = False,
    after: int | None = None,
) -> None:
    """`free_blocks` as for `run_self_test`; `has_digests` and `after` as plans will have them.

    Nothing of the engine's is under way. SelfTestError: a byte did not come back, or a copy failed.
    """

    def save(group: int, block: int) -> _Bytes:
        record = np.empty(page_map.groups[group].record_bytes, np.uint8)
        copy(CopyDirection.SAVE, group, block, record)
        return record

    def load(group: int, block: int, record: _Bytes) -> None:
        copy(CopyDirection.LOAD, group, block, record)

    def copy(direction: CopyDirection, group: int, block: int, record: _Bytes) -> None:
        items = CopyItems(
            group=np.array([group]), block=np.array([block]), slot=np.array([record.ctypes.data], np.uint64)
        )
        engine.submit(direction, items, has_digests=has_digests, after=after)
        if engine.fence(TIMEOUT_S):
            (finished,) = engine.poll()
            fault = finished.fault
        else:
            unended_records.append(record)
            fault = f"it did not end within {TIMEOUT_S:.0f} s"
        if fault:
            raise SelfTestError(
                f"group {page_map.groups[group].name}: the {direction.value} of block {block} failed: {fault}",
                remedy="don't serve with this cache; report geometry, device and driver (kvoffload doctor)",
            )

    run_self_test(page_map, memory, free_blocks=free_blocks, save=save, load=load)
