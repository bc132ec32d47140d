"""Our cache as a secondary tier of vLLM's own OffloadingConnector: the class that vLLM makes by name.

All of it runs in the scheduler's process. This is the second place where a fault becomes a miss: nothing that goes
wrong here after the start may reach the engine, and every job is answered.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, SecondaryTierManager, TransferJob

from kvoffload.cache import GroupRule
from kvoffload.config.sources import load_settings
from kvoffload.connector.common.step_plan import GroupFacts
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine_log import join_engine_log
from kvoffload.connector.identity.agreement import SharingSettings, make_register
from kvoffload.connector.secondary.identity import describe_tier, find_prefix_groups, names_are_private
from kvoffload.connector.secondary.lookups import TierLookups
from kvoffload.connector.secondary.transfers import ROWS, TierTransfers, TransferSettings, map_rows
from kvoffload.engines.cache_access import CacheAccess
from kvoffload.engines.degrade import degrade
from kvoffload.errors import ServerError, UnsupportedError
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import Role
from kvoffload.transfer.host_engine import HostEngine
from kvoffload.units import describe_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

    from kvoffload.client import Client
    from kvoffload.config.sources import Settings
    from kvoffload.keys.identity import Identity

logger = logging.getLogger(__name__)

SPARE_SLOTS = 16
"""Number of slots held ready in addition to those for the chunks of two steps."""
_DATA_PARALLEL_RANK = re.compile(r"_dp\d+$")


class KVOffloadTier(SecondaryTierManager):
    """Called by the engine's scheduler, one call at a time. Nothing waits but the start, `drain_jobs` and `shutdown`.

    vLLM reuses a job's chunks only after the job is answered.
    """

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        locality: str | None = None,
        **settings: object,
    ) -> None:
        """`settings` are ours, by the names in `docs/reference.md`. Raises if the engine must not start: a setting
        is unknown, the engine cannot be told from others, or a server refuses it."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        join_engine_log()
        self.locality = None if locality is None else Locality(locality)
        loaded = load_settings(engine=settings).settings
        rows = offloading_spec.config
        found = vllm_compat.find_engine_of_tier(rows.engine_id)
        if found is None:
            raise UnsupportedError(
                f"vLLM {vllm.__version__} does not show its configuration to secondary tiers, so that the owner of "
                "these chunks is not known",
                remedy="use KVOffloadConnector",
            )
        config, cache = found
        identity = describe_tier(config, cache, rows, row_bytes=self._block_size_bytes)
        self._salt = os.urandom(16) if names_are_private(config) else b""
        self._settings = TransferSettings(
            fingerprint=bytes(identity.fingerprint()),
            record_bytes=self._block_size_bytes,
            block_tokens=max(offloading_spec.tokens_per_block) * offloading_spec.blocks_per_chunk,
            verify_always=loaded.verify == "always",
            promote_wait_s=loaded.promote_deadline,
        )
        self._faults: dict[str, int] = {}
        self._results: list[JobResult] = []
        self._jobs: dict[JobId, TransferJob] = {}
        self.cache = self._open(loaded, config, cache, identity)
        try:
            # The engine gets addresses and not the view: vLLM closes the memory right after our shutdown.
            engine = HostEngine(
                map_rows(rows=len(primary_kv_view), row_bytes=self._block_size_bytes),
                {ROWS: int(np.asarray(primary_kv_view).ctypes.data)},
                threads=loaded.copy_threads,
            )
        except BaseException:
            self.cache.close()
            raise
        self.transfers = TierTransfers(self.cache, engine, self._settings)
        self.lookups = TierLookups(self.cache, self._settings, prefix_groups=find_prefix_groups(cache))

    @property
    def faults(self) -> dict[str, int]:
        """How often each hook turned a fault into a miss."""
        return dict(self._faults)

    def note_fault(self, hook: str, fault: Exception) -> None:
        """Counts a fault; the first of a hook is logged with its trace, the rest are only counted."""
        self._faults[hook] = self._faults.get(hook, 0) + 1
        if self._faults[hook] == 1:
            line = "kvoffload's tier: a fault in %s is a miss; more of them are counted only"
            logger.error(line, hook, exc_info=fault)

    # ---- what vLLM asks ----

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Returns the default context: chunks are stored as they become full, also those already in the CPU tier."""
        return RequestOffloadingContext()

    @degrade(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Looks a chunk up in mapped memory; returns RETRY while tiers slower than the server's memory are asked."""
        found = self.lookups.look(req_context.req_id, get_offload_group_idx(key), self.name_key(key))
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to store chunks; those that the cache has are not copied again."""
        self._submit(job_metadata, self.transfers.store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to load chunks. For chunks that are gone by now the job fails, and the request computes them."""
        self._submit(job_metadata, self.transfers.load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that have ended. vLLM asks once a step, before the first look-up."""
        self._collect()
        results, self._results = self._results, []
        return results

    @degrade(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self.lookups.forget(req_context.req_id)

    @degrade(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.lookups.send()

    def drain_jobs(self) -> None:
        """Ends all jobs, because vLLM resets its caches: for a sleep, for other weights, or by a user's request. Chunks
        have other names from now on, because a tier does not learn whether the weights are still the same."""
        self.transfers.drain()
        self.lookups.clear()
        self._salt = os.urandom(16)

    def shutdown(self) -> None:
        """Ends the tier. NativeError: a copy still runs, and vLLM keeps the memory."""
        self.lookups.clear()
        try:
            self.transfers.close()
        finally:
            self.cache.close()

    # ---- inside ----

    def _open(self, settings: Settings, config: VllmConfig, cache: KVCacheConfig, identity: Identity) -> Client:
        rows, transfer_settings = self._offloading_spec.config, self._settings
        access = CacheAccess(
            settings=settings,
            # A name of its own, because MultiConnector may run our connector in the same engine.
            engine=f"{rows.engine_id} tier",
            machine_key=_DATA_PARALLEL_RANK.sub("", rows.engine_id),
            engine_bytes=rows.worker_kv_bytes_per_block * rows.parallel.world_size * cache.num_blocks,
        )
        register = make_register(
            transfer_settings.fingerprint,
            (
                GroupFacts(
                    index=0,
                    name="chunks",
                    rule=GroupRule(block_size=transfer_settings.block_tokens, reuse=ReuseRule.PREFIX),
                    record_bytes=transfer_settings.record_bytes,
                ),
            ),
            SharingSettings(
                hash_block_size=transfer_settings.block_tokens,
                hash_algorithm=identity.hash_algorithm,
                hash_seed=identity.hash_seed,
                tensor_ranks=1,
            ),
            description=identity.describe(),
        )
        chunks = ceil(config.scheduler_config.max_num_batched_tokens / transfer_settings.block_tokens) * len(
            rows.groups
        )
        client = access.open(register, role=Role.SCHEDULER, stock_slots=(2 * chunks + SPARE_SLOTS,))
        self._tell(client, settings)
        return client

    def _tell(self, client: Client, settings: Settings) -> None:
        try:
            where = describe_size(client.stats().capacity_bytes)
        except ServerError:
            where = "the memory, once a server is there,"
        logger.info(
            "kvoffload keeps chunks of %s for vLLM's OffloadingConnector in %s of %s",
            describe_size(self._block_size_bytes),
            where,
            settings.server or "a private server",
        )
        if self._salt:
            logger.warning(
                "kvoffload's tier shares nothing with other engines, nor with this one after its restart: vLLM does "
                "not tell its tiers the contents of LoRA adapters; KVOffloadConnector reads them"
            )

    def name_key(self, key: OffloadKey) -> bytes:
        """Names a chunk in the cache: vLLM's key has the length of its hash, and the group's number."""
        return hashlib.sha256(self._salt + key).digest()

    def _submit(self, job: TransferJob, begin: Callable[[JobId, list[bytes], Any], None]) -> None:
        if not self._begin(job, begin) and not self.transfers.knows(job.job_id):
            self._jobs.pop(job.job_id, None)
            self._results.append(JobResult(job_id=job.job_id, success=False))

    @degrade(lambda: False)
    def _begin(self, job: TransferJob, begin: Callable[[JobId, list[bytes], Any], None]) -> bool:
        names = [self.name_key(key) for key in job.keys]
        self._jobs[job.job_id] = job
        begin(job.job_id, names, job.chunk_ids)
        return True

    @degrade(lambda: None)
    def _collect(self) -> None:
        self.lookups.harvest()
        for ended in self.transfers.poll():
            job = self._jobs.pop(ended.job)
            keys = list(job.keys)
            kept = [keys[position] for position in sorted(ended.kept)]
            if job.is_promotion and not ended.is_whole:
                lost = (self.name_key(key) for position, key in enumerate(keys) if position not in ended.kept)
                self.lookups.note_lost(job.req_context.req_id, lost)
            self._results.append(
                JobResult(
                    job_id=ended.job,
                    success=ended.is_whole,
                    successful_keys=tuple(kept) if job.is_promotion and not ended.is_whole and kept else None,
                    transfer_time=ended.seconds,
                    transfer_bytes=len(kept) * self._block_size_bytes,
                )
            )
