"""Which copy engine reaches an engine's memory, and what its copies come after: decided by device, here alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvoffload.errors import UnsupportedError
from kvoffload.kvspec.page_map import PageMap
from kvoffload.transfer.copy_engine import PLAN_LIMIT, NativeCopyEngine
from kvoffload.transfer.host_engine import HostEngine

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def open_engine(
    page_map: PageMap,
    memory: Mapping[str, torch.Tensor | int],
    *,
    plan_limit: int = PLAN_LIMIT,
    host_threads: int = 0,
) -> NativeCopyEngine:
    """`memory` as the engines take it: flat uint8 tensors, all on one device, or addresses, which are the host's.

    The first engine on a GPU measures the ways to copy, which takes up to two seconds; later ones know them. The caller
    closes the engine. UnsupportedError: no engine reaches this memory; and whatever the engine raises.
    """
    devices = {flat.device for flat in memory.values() if not isinstance(flat, int)}
    kinds = {device.type for device in devices}
    if kinds <= {"cpu"}:
        return HostEngine(page_map, memory, threads=host_threads, plan_limit=plan_limit)
    if kinds == {"cuda"} and len(devices) == 1:
        from kvoffload.transfer.calibration import find_ways
        from kvoffload.transfer.cuda_engine import CudaEngine

        engine = CudaEngine(page_map, memory, plan_limit=plan_limit)
        if engine.kernel_problem:
            logger.warning("small pages are copied slowly, one by one: %s", engine.kernel_problem)
        if table := find_ways(page_map, devices.pop().index or 0):
            engine.set_ways(table)
        return engine
    raise UnsupportedError(
        f"no copy engine reaches memory on {', '.join(sorted(map(str, devices)))}",
        remedy="keep the KV cache on the host or on one CUDA device",
    )


def compute_stream(device: torch.device) -> int | None:
    """`after` of a plan: the stream that this thread gives its work on the device to. None: the work is done already.

    RuntimeError: the device is lost.
    """
    if device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)
