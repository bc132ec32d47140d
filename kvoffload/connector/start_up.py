"""An engine's start: reads its configuration, refuses engines that we cannot serve, and opens the cache."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from dataclasses import replace
from math import ceil, gcd, lcm
from typing import TYPE_CHECKING, Any

from kvoffload.config.tier_kinds import TIER_KINDS
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.kept_groups import describe_unkept
from kvoffload.connector.identity.agreement import EngineFacts, SharingSettings
from kvoffload.connector.identity.model import loads_what_lies_there
from kvoffload.connector.saves.look_out import MAX_LOOKS
from kvoffload.connector.saves.worth import GATHERED_TOKENS
from kvoffload.connector.scheduler_parts import SchedulerSettings
from kvoffload.connector.worker_side import WorkerSettings
from kvoffload.engines.cache_access import CacheAccess
from kvoffload.errors import KVOffloadError, ServerError, UnsupportedError
from kvoffload.kvspec import HeadUnits, ReuseRule
from kvoffload.private_files import PrivateFiles
from kvoffload.protocol import Role
from kvoffload.units import describe_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvoffload.cache import GroupRule
    from kvoffload.client import Client, Heard
    from kvoffload.config.sources import Settings
    from kvoffload.connector.common.step_plan import GroupFacts
    from kvoffload.protocol import Register

logger = logging.getLogger(__name__)

WINDOWS = 8
"""Number of whole windows for which slots are held ready, for prompts that end in one step."""
_LITTLE_SHARE = 0.5
_SHOWN_DIGITS = 8

_DATA_PARALLEL_RANK = re.compile(r"_dp\d+$")
"""The suffix that vLLM appends to the name that the engines of one deployment share."""


class EngineStart:
    """Starts one process of an engine. UnsupportedError: we cannot serve it; the error tells what to do instead."""

    def __init__(self, settings: Settings, config: VllmConfig, cache: KVCacheConfig) -> None:
        assert config.kv_transfer_config is not None
        self._transfer = config.kv_transfer_config
        self._settings = settings
        self._config = config
        self._units = _find_units(config) if settings.shared_shapes else None
        self._cache = cache
        engine = str(self._transfer.engine_id)
        self.access = CacheAccess(
            settings=settings,
            engine=_name_session(engine, vllm_compat.node_rank(config)),
            machine_key=_DATA_PARALLEL_RANK.sub("", engine),
            engine_bytes=self._cached_bytes(sum(tensor.size for tensor in cache.kv_cache_tensors[:1])),
        )
        self._starting: threading.Thread | None = None
        self._fingerprint = b""
        """The fingerprint with which the engine first registered; empty before that."""

    def begin_for_worker(self) -> None:
        """Begins to start a private server, if one is needed, while the engine goes on to register its caches."""
        if not self._settings.server and self._starting is None:
            self._starting = threading.Thread(target=self._start_private, name="kvoffload-start", daemon=True)
            self._starting.start()

    def scheduler_settings(self) -> SchedulerSettings:
        return SchedulerSettings(
            sharing=self._sharing_settings(),
            hit_alignment=vllm_compat.hit_alignment(self._config, self._cache),
            verify_always=self._settings.verify == "always",
            load_always=self._settings.load_policy == "always",
            promote_wait_s=self._settings.promote_deadline,
            event_kinds=vllm_compat.group_kinds(self._cache) if vllm_compat.wants_events(self._config) else None,
            events_again_s=self._settings.events_interval,
            arrival_wait_s=self._settings.arrival_deadline,
            saves=self._saves,
            hands_over=not self._transfer.is_kv_consumer,
            save_policy=self._settings.save_policy,
            traces_endpoint=self._config.observability_config.otlp_traces_endpoint,
            has_prefix_cache=bool(self._config.cache_config.enable_prefix_caching),
            whole_prompts=self._settings.whole_prompts,
            drops_last_block=vllm_compat.drops_last_block(self._config),
            replayed_tokens=vllm_compat.replayed_tokens(self._cache),
            step_tokens=self._config.scheduler_config.max_num_batched_tokens,
            max_requests=self._config.scheduler_config.max_num_seqs,
            steps_under_way=vllm_compat.steps_under_way(self._config),
            by_priority=vllm_compat.preempts_by_priority(self._config),
            decoded_tokens=1 + vllm_compat.draft_tokens(self._config),
            retention_interval=vllm_compat.retention_interval(self._config),
        )

    def worker_settings(self) -> WorkerSettings:
        return WorkerSettings(
            rank=self._config.parallel_config.rank,
            sharing=self._sharing_settings(),
            has_self_test=self._settings.self_test,
            copy_threads=self._settings.copy_threads,
            has_late_frees=vllm_compat.frees_after_steps(self._config, self._cache),
        )

    def open_for_worker(self, register: Register) -> Client:
        """Opens the cache for a worker. The first rank of an engine without a shared server starts its private one,
        or has begun to."""
        if self._starting is not None:
            self._starting.join()
        return self._open(register, role=Role.WORKER, rank=self._config.parallel_config.rank)

    def exchange(self, frame: bytes) -> Sequence[bytes]:
        """Sends this rank's frame and returns those of all ranks, as `pipeline.Exchange` says."""
        return vllm_compat.exchange_between_ranks(self._config, frame)

    def open_for_scheduler(
        self, register: Register, engine: EngineFacts, on_event: Callable[[Heard, int], None] | None
    ) -> Client:
        stock_slots = self._plan_stock(engine.groups)
        client = self._open(register, role=Role.SCHEDULER, on_event=on_event, stock_slots=stock_slots)
        if on_event is not None:
            client.subscribe(with_inventory=True)
        if register.fingerprint == self._fingerprint:
            self._tell(client, engine)
        return client

    def _open(self, register: Register, **given: Any) -> Client:
        """Opens the cache. If the engine divides its blocks otherwise than at its start, it registers under another
        name, as a server knows one identity of each engine; it then does not wait, because it already runs."""
        self._fingerprint = self._fingerprint or register.fingerprint
        if register.fingerprint == self._fingerprint:
            return self.access.open(register, **given)
        access = replace(self.access, engine=f"{self.access.engine} {register.fingerprint.hex()[:_SHOWN_DIGITS]}")
        return access.open(register, **given, waits=False)

    @property
    def _saves(self) -> bool:
        """Whether the engine saves blocks; one that only decodes does not, and takes no slots."""
        return bool(self._transfer.is_kv_producer)

    def open_for_node(self, register: Register, groups: Sequence[GroupFacts]) -> Client:
        """Opens the cache for the lowest rank of a node on which the scheduler does not run. Half of the slots are held
        ready here, and half by the scheduler side."""
        halves = tuple(ceil(slots / 2) for slots in self._plan_stock(groups))
        return self.access.open(register, role=Role.SCHEDULER, stock_slots=halves)

    def _plan_stock(self, groups: Sequence[GroupFacts]) -> tuple[int, ...]:
        if not self._saves:
            return ()
        return plan_stock(
            groups,
            step_tokens=self._config.scheduler_config.max_num_batched_tokens,
            steps_under_way=vllm_compat.steps_under_way(self._config),
        )

    def _start_private(self) -> None:
        # If this fails, opening the cache later fails for the same reason, and reports it to the engine.
        with contextlib.suppress(KVOffloadError, OSError):
            self.access.start_private()

    def _tell(self, client: Client, engine: EngineFacts) -> None:
        """Logs a line on what is kept, and where, and warns if little of it can be of use."""
        sharing, deployed = self._sharing_settings(), max(self._config.parallel_config.data_parallel_size_local, 1)
        block_bytes = [sharing.shards_of(group) * group.record_bytes for group in engine.groups]
        per_token = sum(n / group.rule.block_size for n, group in zip(block_bytes, engine.groups, strict=True))
        # Ranks of this machine that hold the same bytes count once.
        shards = sharing.stage_ranks * sharing.run
        all_bytes = sum(shards * group.record_bytes / group.rule.block_size for group in engine.groups)
        own = int(engine.cache_bytes / sharing.nodes * deployed * per_token / all_bytes)
        share = None
        place = self._settings.server or _name_private(client)
        try:
            pool = client.stats().capacity_bytes
            share = pool / own if own else None
            where = f"{describe_size(pool)} ({pool / per_token:,.0f} tokens) of {place}"
        except ServerError:
            where = f"the memory of {place}, where no server is yet"
        logger.info(
            "kvoffload keeps KV cache of %s in %s: %s; %.0f bytes per token; the engines that use it cache %s "
            "themselves%s",
            self._config.model_config.model,
            where,
            ", ".join(
                _describe_group(group, sharing, size) for group, size in zip(engine.groups, block_bytes, strict=True)
            )
            + (f" on the first of {sharing.nodes} machines" if sharing.nodes > 1 else ""),
            per_token,
            describe_size(own),
            "" if share is None else f", to which it adds {share:.0%}",
        )
        unkept = describe_unkept(self._cache)
        if unkept:
            logger.info("kvoffload does not keep %s; what it keeps is of use without", unkept)
        self._warn_of_rare_hits([group.rule for group in engine.groups])
        settings = self._settings
        is_apart = self._transfer.kv_role != "kv_both"
        has_store = any(getattr(settings, kind.setting) for kind in TIER_KINDS if kind.is_remote)
        if is_apart and not (settings.server or settings.linger or has_store):
            logger.warning(
                "kvoffload's server is this engine's own, and its kv_role is %s: no other engine can use it; "
                "set `server` to one that the engines share",
                self._transfer.kv_role,
            )
        if share is not None and share < _LITTLE_SHARE:
            logger.warning(
                "kvoffload's memory is %.0f%% of the engines' own caches: little will be found "
                "in it that they do not have; set `memory` to more, or give this process more",
                100 * share,
            )

    def _warn_of_rare_hits(self, rules: Sequence[GroupRule]) -> None:
        """Warns if hits can end at few of the places at which the engine stores its recurrent states. With decode
        context parallelism a block of attention has the tokens of several ranks, and one of states has not."""
        states = [rule.block_size for rule in rules if rule.reuse is ReuseRule.EXACT_BOUNDARY]
        unit = lcm(*(rule.block_size for rule in rules))
        if states and unit > max(states):
            logger.warning(
                "kvoffload will find little of this engine's cache again: hits end at multiples of %d tokens, and the "
                "engine stores its recurrent states at multiples of %d; with --decode-context-parallel-size 1 they "
                "would be the same",
                unit,
                max(states),
            )

    def _cached_bytes(self, rank_bytes: int) -> int:
        """Returns the bytes of different blocks that this deployment's engines cache on this machine. Ranks that hold
        the same bytes count once, as far as the configuration shows it."""
        sharing = self._sharing_settings()
        replicas = vllm_compat.kv_replicas(self._cache) if sharing.units is None else sharing.units.replicas
        engine = rank_bytes * sharing.node_ranks // gcd(replicas, sharing.stage_ranks)
        return engine * max(self._config.parallel_config.data_parallel_size_local, 1)

    def _sharing_settings(self) -> SharingSettings:
        parallel = self._config.parallel_config
        return SharingSettings(
            hash_block_size=vllm_compat.hash_block_size(self._config, self._cache),
            hash_algorithm=str(self._config.cache_config.prefix_caching_hash_algo),
            hash_seed=vllm_compat.hash_seed(self._config),
            tensor_ranks=parallel.tensor_parallel_size,
            pipeline_ranks=parallel.pipeline_parallel_size,
            nodes=vllm_compat.nodes(self._config),
            units=self._units,
        )


def _describe_group(group: GroupFacts, sharing: SharingSettings, size_bytes: int) -> str:
    """Describes a group's blocks as the server keeps them, with the ranks' shares of them."""
    stage = f" of stage {group.stage}" if sharing.pipeline_ranks > 1 else ""
    shards, replicas = sharing.shards_of(group), sharing.replicas_of(group)
    parts = f" in {shards} parts" if shards > 1 else ""
    alike = f", held alike by {replicas} ranks" if replicas > 1 else ""
    rule = f"{group.rule.reuse.label}, {group.rule.block_size} tokens"
    return f"{group.name}{stage} ({rule}, {size_bytes:,} bytes{parts}{alike})"


def _name_session(engine: str, node: int) -> str:
    """Returns a node's session name: each node of an engine has its own session, also if they share a server."""
    return f"{engine}_node{node}" if node else engine


def _find_units(config: VllmConfig) -> HeadUnits:
    """Returns the units by which engines of all tensor-parallel sizes share blocks. UnsupportedError: this engine is
    not certified for it."""
    if config.parallel_config.pipeline_parallel_size > 1:
        raise UnsupportedError(
            "shared_shapes does not serve engines with pipeline stages", remedy="use tensor parallelism alone"
        )
    if config.parallel_config.decode_context_parallel_size > 1:
        raise UnsupportedError(
            "shared_shapes does not serve decode context parallel engines", remedy="use tensor parallelism alone"
        )
    if vllm_compat.nodes(config) > 1:
        raise UnsupportedError(
            "shared_shapes does not serve engines with ranks on several machines",
            remedy="keep an engine on one machine",
        )
    if not loads_what_lies_there(config):
        # Weights are compared by samples that depend on the number of ranks; only equal files prove them equal.
        raise UnsupportedError(
            f"shared_shapes needs weights that are the model's files, and load format {config.load_config.load_format} "
            "may give others",
            remedy="load the model by load_format=auto, or turn shared_shapes off",
        )
    return HeadUnits(heads=vllm_compat.total_kv_heads(config), ranks=config.parallel_config.tensor_parallel_size)


def _name_private(client: Client) -> str:
    """Describes a private server with its log, which has more details than its answers to engines."""
    socket = client.wire.path
    return "a private server" if socket is None else f"a private server (log: {PrivateFiles(socket).log})"


def plan_stock(groups: Sequence[GroupFacts], *, step_tokens: int, steps_under_way: int) -> tuple[int, ...]:
    """Returns how many slots of each group are held ready: enough for all blocks that the steps under way can fill, and
    as many again for the time until more arrive."""
    return tuple(2 * steps_under_way * _count_filled(group.rule, step_tokens) for group in groups)


def _count_filled(rule: GroupRule, step_tokens: int) -> int:
    """Returns how many blocks a step can save: those that it fills with prompts, and those that decoding requests have
    gathered by the time of their look; or the blocks of `WINDOWS` whole windows, if these are more."""
    filled = ceil(step_tokens / rule.block_size) + MAX_LOOKS * max(GATHERED_TOKENS // rule.block_size, 1)
    return max(filled, WINDOWS * (ceil(rule.window / rule.block_size) + 1))
