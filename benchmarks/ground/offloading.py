"""vLLM's own OffloadingConnector with its CPU tier, as it is, on a virtual machine: its copies alone are virtual."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from benchmarks.ground.connector import time_hooks
from benchmarks.ground.machine import MACHINES
from benchmarks.ground.virtual_copy import Link, VirtualCopyEngine
from kvoffload.kvspec import PageMap
from kvoffload.kvspec.page_map import GroupPages
from kvoffload.transfer import CopyDirection, CopyItems
from kvoffload.transfer.copy_engine import CopyTicket


class GroundOffloading(OffloadingConnector):
    """vLLM makes it by name."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        machine = MACHINES[str(vllm_config.kv_transfer_config.engine_id)]
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self.stopwatch = machine.scheduler if is_scheduler else machine.workers[vllm_config.parallel_config.rank]


time_hooks(GroundOffloading, OffloadingConnector)


class GroundSpec(CPUOffloadingSpec):
    """vLLM makes it by name, too. The tier decides as on CUDA, where the ranks of a machine share its memory."""

    def _uses_shared_region(self) -> bool:
        return True

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        machine, rank = MACHINES[self.config.engine_id], self.config.parallel.rank
        pages = [[ref.page_size_bytes for ref in refs] for refs in kv_caches.group_data_refs]
        worker = VirtualWorker(pages, machine.links[rank])
        machine.engines[rank] = worker.copies
        return worker


class VirtualWorker(OffloadingWorker):
    """Copies what it is told to over the virtual link. `pages`: by group, the bytes of a block's page of each layer."""

    def __init__(self, pages: Sequence[Sequence[int]], link: Link) -> None:
        groups = tuple(_make_group(number, lengths) for number, lengths in enumerate(pages))
        page_map = PageMap(num_blocks=0, null_block=0, allocations=(), groups=groups)
        self.copies = VirtualCopyEngine(page_map, link, plan_limit=sys.maxsize)
        self._bytes = np.array([group.record_bytes for group in groups], np.int64)
        self._jobs: dict[CopyTicket, tuple[int, int]] = {}
        """The number of each job under way, and its bytes."""

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(CopyDirection.SAVE, job_id, src_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(CopyDirection.LOAD, job_id, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished = []
        for copy in self.copies.poll():
            job_id, size = self._jobs.pop(copy.ticket)
            finished.append(TransferResult(job_id, success=True, transfer_size=size, transfer_time=copy.copied_s))
        return finished

    def wait(self, job_ids: set[int]) -> None:
        self.copies.wait({ticket for ticket, (job_id, _) in self._jobs.items() if job_id in job_ids})

    def _submit(self, direction: CopyDirection, job_id: int, blocks: GPULoadStoreSpec) -> bool:
        sizes = np.asarray(blocks.group_sizes, np.int64)
        group = np.repeat(np.arange(len(sizes)), sizes)
        items = CopyItems(group=group, block=blocks.block_ids, slot=np.zeros(len(group), np.int64))
        self._jobs[self.copies.submit(direction, items)] = job_id, int(sizes @ self._bytes)
        return True


def _make_group(number: int, lengths: Sequence[int]) -> GroupPages:
    """Each page of a layer is a copy of its own."""
    length = np.array(lengths, np.int64)
    nothing = np.zeros(len(length), np.int64)
    return GroupPages(
        name=str(number),
        record_bytes=int(length.sum()),
        parts=(),
        allocation=nothing,
        base=nothing,
        stride=length,
        length=length,
        record_offset=np.cumsum(length) - length,
    )
