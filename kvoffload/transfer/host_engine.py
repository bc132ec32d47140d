"""The copy engine of machines whose model runs on the processor: a few native threads, no GIL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvoffload import native
from kvoffload.cpus import engine_cpus, running_on
from kvoffload.errors import NativeError, StorageError, UnsupportedError
from kvoffload.kvspec.page_map import PageMap
from kvoffload.transfer.copy_engine import PLAN_LIMIT, NativeCopyEngine, find_addresses, list_runs

if TYPE_CHECKING:
    import torch


class HostEngine(NativeCopyEngine):
    """`memory` maps allocation names to flat uint8 tensors of the host, as `Registration.memory` gives them, or to
    addresses, whose memory the caller keeps until the engine is closed. `after` of a plan means nothing here.

    `threads` 0: one for two processors, at most 8. They may run on all processors of the engine.
    """

    def __init__(
        self,
        page_map: PageMap,
        memory: Mapping[str, torch.Tensor | int],
        *,
        threads: int = 0,
        plan_limit: int = PLAN_LIMIT,
    ) -> None:
        tensors = {name: flat for name, flat in memory.items() if not isinstance(flat, int)}
        for name, flat in tensors.items():
            if flat.device.type != "cpu":
                raise StorageError(
                    f"allocation {name} is on {flat.device}, which the host engine cannot reach",
                    remedy="use the engine of that device",
                )
        runs = list_runs(page_map, find_addresses(page_map, memory))
        try:
            # The core keeps the tensors, so that nothing a copy still touches goes with this object.
            with running_on(engine_cpus()):
                core = native.create_host_engine(page_map.num_blocks, runs, list(tensors.values()), threads, plan_limit)
        except (TypeError, ValueError) as fault:
            raise UnsupportedError(f"no host engine can be made: {fault}", remedy="check threads and pages") from fault
        except RuntimeError as fault:
            raise NativeError(f"no host engine can be made: {fault}") from fault
        super().__init__(page_map, core)
