"""An SGLang rank's start: what its arguments mean for us, what cannot be served, and how it comes to its cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from math import ceil
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kvoffload.cache import CacheGeometry, CacheGroup, GroupRule
from kvoffload.client import add_report_text, describe_blocks
from kvoffload.config.sources import load_settings, read_variables
from kvoffload.engines.cache_access import CacheAccess
from kvoffload.errors import ServerError, UnsupportedError
from kvoffload.keys.identity import describe_parts
from kvoffload.kvspec import Registration
from kvoffload.protocol import IdentityField, Role
from kvoffload.sglang.engine_identity import HASH_ALGORITHM, VARIABLES, identify_rank, resolve_arguments
from kvoffload.sglang.host_pages import HostPages
from kvoffload.sglang.host_pools import describe_host_pool
from kvoffload.sglang.linker_metrics import open_metrics
from kvoffload.sglang.page_linker import PageLinker
from kvoffload.sglang.page_settings import PageSettings
from kvoffload.sglang.pools import KV, MAMBA, SWA, PoolPages, describe_pool
from kvoffload.sglang.weight_updates import WeightUpdates
from kvoffload.sglang.weights import WeightMask
from kvoffload.transfer import open_engine, run_copy_self_test
from kvoffload.units import describe_size

if TYPE_CHECKING:
    import torch

    from kvoffload.client import Client
    from kvoffload.config.sources import Settings
    from kvoffload.keys.identity import Identity
    from kvoffload.kvspec import KVGeometry, PageMap
    from kvoffload.protocol import Register
    from kvoffload.transfer import CopyEngine

logger = logging.getLogger(__name__)

PACKAGE = "kvoffload"
DEVICE = "cpu"
DYNAMIC = "dynamic"
PREFILL_TOKENS = 8192
"""Of a step, where the engine does not say."""
STOCK_STEPS = 4
"""Slots are held ready for what so many steps can fill."""
STEP_STATES = 8
"""Recurrent states that are kept of a step: of a prompt one, whatever its length, and of each answer one."""
MULTIMODAL = "multimodal models"
PARTS = {"FULL": KV, "SWA": SWA, "MAMBA": MAMBA}
"""SGLang's names for the parts of its tree, and the pages of each: of every token, of those within a window, states."""


def start_linker(
    arguments: Any,
    params: Any,
    *,
    components: set[Any],
    extra_config: Mapping[str, object] | None,
    version: str,
    updates: WeightUpdates | None = None,
) -> tuple[PageLinker, WeightMask, PoolPages]:
    """UnsupportedError: what we cannot serve, and what to do instead. Whatever else is raised, nothing is held.

    `updates`: those of the engine's weights.
    """
    _join_engine_log()
    settings = load_settings(engine=extra_config or {}).settings
    refuse_multimodal(arguments)
    arguments = resolve_arguments(arguments)
    refuse_unserved(arguments, params, components)
    rank, ranks = _find_rank(params)
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    pages = describe_pool(pool, page_size=params.page_size, window=params.sliding_window_size or 0)
    _refuse_other_parts(pages, components)
    identity = _identify(arguments, pages, version=version, dtype=pool.dtype, rank=rank)
    weights = WeightMask(updates=updates, agree=agree_within(params.tp_cache_group))
    return _link(settings, arguments, pages, identity, weights, rank=rank, ranks=ranks), weights, pages


def start_host_pages(
    arguments: Any,
    pool: Any,
    *,
    rank: int,
    settings: Mapping[str, object],
    is_same_everywhere: bool,
    version: str,
    updates: WeightUpdates | None = None,
    group: Any = None,
) -> HostPages:
    """Starts pages of HiCache's host pool. UnsupportedError, as `start_linker`.

    `is_same_everywhere`: all ranks have the same bytes, and the first of them alone backs them up. `group`: of all
    ranks, if there are others.
    """
    _join_engine_log()
    loaded = load_settings(engine=settings).settings
    refuse_multimodal(arguments)
    arguments = resolve_arguments(arguments)
    refuse_unserved(arguments)
    refuse_late_storage(arguments)
    pages = describe_host_pool(pool, page_size=pool.page_size)
    owner = 0 if is_same_everywhere else rank
    identity = _identify(arguments, pages, version=version, dtype=pool.dtype, rank=owner)
    weights = WeightMask(updates=updates, agree=agree_within(group))
    # Ranks of a storage agree by themselves: each may answer that a load failed.
    linker = _link(loaded, arguments, pages, identity, weights, rank=rank, ranks=1)
    if not weights.is_known:
        linker.close()
        raise UnsupportedError(
            "the engine's weights cannot be looked at, and HiCache does not tell when they change",
            remedy="use the linker, to which SGLang tells when it empties its cache",
        )
    return HostPages(linker, weights)


def _join_engine_log() -> None:
    """SGLang writes by the root logger's handlers, at the level that its arguments say. Its lines do not show the
    logger's name, so that ours begin with it."""
    logging.getLogger(PACKAGE).setLevel(logging.NOTSET)
    for handler in logging.getLogger().handlers:
        handler.addFilter(name_line)


def name_line(record: logging.LogRecord) -> bool:
    """Adds our name to a record of ours that does not have it. Suppresses no record."""
    if record.name.partition(".")[0] == PACKAGE and PACKAGE not in str(record.msg):
        record.msg = f"{PACKAGE}: {record.msg}"
    return True


def _identify(arguments: Any, pages: PoolPages, *, version: str, dtype: Any, rank: int) -> Identity:
    variables = read_variables(VARIABLES)
    return identify_rank(arguments, pages.geometry, version=version, dtype=dtype, rank=rank, variables=variables)


def _link(
    settings: Settings,
    arguments: Any,
    pages: PoolPages,
    identity: Identity,
    weights: WeightMask,
    *,
    rank: int,
    ranks: int,
) -> PageLinker:
    fingerprint = identity.fingerprint()
    registration = Registration()
    copies = _open_copies(registration, pages, settings)
    try:
        register = _describe(pages.geometry, identity, registration)
        client = _open_cache(settings, register, arguments, pages.geometry, rank=rank, ranks=ranks)
    except BaseException:
        copies.close()
        raise
    page_settings = PageSettings(
        page_size=pages.geometry.hash_block_size,
        groups=pages.pool_settings,
        fingerprint=fingerprint,
        ranks=ranks,
        rank=rank,
        verify_always=settings.verify == "always",
    )
    _tell(client, page_settings, rank)
    metrics = open_metrics(arguments, rank=rank)
    return PageLinker(page_settings, client, copies, mask=weights.take(), metrics=metrics)


def refuse_multimodal(arguments: Any) -> None:
    """UnsupportedError: what inputs of this model contain is in no key.

    Of many models it is not an argument that says so. SGLang keeps what it has read of the model with its arguments.
    """
    if getattr(getattr(arguments, "_model_config", None), "is_multimodal", False):
        raise UnsupportedError(
            f"kvoffload does not serve {MULTIMODAL} in SGLang yet", remedy="run this model without kvoffload"
        )


def refuse_late_storage(arguments: Any) -> None:
    """UnsupportedError: HiCache was attached late. It had pages before, and it is unknown of which weights."""
    if arguments.hicache_storage_backend != DYNAMIC:
        raise UnsupportedError(
            "kvoffload does not serve engines to which it is attached while they run",
            remedy=f"start the engine with --hicache-storage-backend {DYNAMIC}",
        )


def refuse_unserved(arguments: Any, params: Any = None, components: Iterable[Any] = ()) -> None:
    """UnsupportedError for the first thing that was not tested, or whose content is in no key."""
    unknown = sorted(str(component.name) for component in components if component.name not in PARTS)
    is_window_usual = params is None or (params.swa_gates_prefix_match and not params.decoder_swa_bounded_replay)
    wrong: list[tuple[object, str, str]] = [
        (unknown, f"models with {', '.join(unknown).lower()} state", "run this model without the linker"),
        (str(arguments.device) != DEVICE, f"engines on {arguments.device}", f"use device {DEVICE}"),
        (arguments.pp_size > 1, "pipeline parallel engines", "use tensor parallelism"),
        (
            arguments.dp_size > 1 or arguments.attn_dp_size > 1 or arguments.enable_dp_attention,
            "data parallel attention",
            "use tensor parallelism",
        ),
        (arguments.attn_cp_size > 1 or arguments.dcp_size > 1, "context parallel engines", "use tensor parallelism"),
        (arguments.nnodes > 1, "engines on several machines", "keep an engine on one machine"),
        (arguments.speculative_algorithm, "speculative decoding", "leave --speculative-algorithm out"),
        (
            params and (not is_window_usual or params.draft_swa_window),
            "windows that are not the model's own",
            "run this model without the linker",
        ),
        (
            # Their states are kept at other places than the ends of what was computed.
            params and params.enable_mamba_extra_buffer,
            "states in extra buffers",
            "use --mamba-radix-cache-strategy no_buffer",
        ),
        (
            params and (params.mtp_draft_device_pools or params.sidecar_draft_device_pools),
            "pools of draft models",
            "leave --speculative-algorithm out",
        ),
        (arguments.enable_multimodal, MULTIMODAL, "leave --enable-multimodal out"),
        (arguments.disaggregation_mode != "null", "disaggregated prefill and decode", "use one engine for both"),
        (arguments.enable_memory_saver, "memory that the engine gives back", "leave --enable-memory-saver out"),
        (arguments.enable_linker_mla_dedup, "pages of one rank for all", "leave --enable-linker-mla-dedup out"),
    ]
    for is_wrong, what, remedy in wrong:
        if is_wrong:
            raise UnsupportedError(f"kvoffload does not serve {what} in SGLang yet", remedy=remedy)


def _refuse_other_parts(pages: PoolPages, components: set[Any]) -> None:
    """UnsupportedError: the engine's tree keeps other pages than its pools have."""
    kept = {PARTS[component.name] for component in components}
    if kept != set(pages.group_names):
        raise UnsupportedError(
            f"SGLang's tree has parts {', '.join(sorted(kept))}, its pools {', '.join(sorted(pages.group_names))}",
            remedy="run this model without the linker",
        )


def _find_rank(params: Any) -> tuple[int, int]:
    """Among the ranks that share requests, and how many they are."""
    group = params.tp_cache_group
    if group is None:
        return 0, 1
    import torch.distributed

    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def agree_within(group: Any) -> Callable[[bytes], bytes] | None:
    """Returns what makes one mask of those of all ranks of this group; each rank calls it as often as the others. A
    page of any rank depends on the weights of all."""
    if group is None:
        return None
    import torch
    import torch.distributed as ranks

    if ranks.get_world_size(group) == 1:
        return None

    def agree(mask: bytes) -> bytes:
        mine = torch.tensor(list(mask), dtype=torch.uint8)
        all_masks = [torch.empty_like(mine) for _ in range(ranks.get_world_size(group))]
        ranks.all_gather(all_masks, mine, group=group)
        return sha256(b"".join(one.numpy().tobytes() for one in all_masks)).digest()

    return agree


def _open_copies(registration: Registration, pages: PoolPages, settings: Settings) -> CopyEngine:
    opened: list[CopyEngine] = []

    def open_tested(page_map: PageMap, memory: Mapping[str, torch.Tensor]) -> None:
        engine = open_engine(page_map, memory, host_threads=settings.copy_threads)
        opened.append(engine)
        if settings.self_test:
            # Before the engine's first request every page is free.
            free = {group: page_map.count_blocks(group) - 1 for group in range(len(page_map.groups))}
            run_copy_self_test(engine, page_map, memory, free_blocks=free, has_digests=True)

    try:
        report = registration.register(pages.geometry, pages.tensors, self_test=open_tested)
    except BaseException:
        for engine in opened:
            engine.close()
        raise
    logger.debug("registered KV pool\n%s", report)
    return opened[0]


def _describe(geometry: KVGeometry, identity: Identity, registration: Registration) -> Register:
    groups = tuple(
        CacheGroup(
            rule=GroupRule(block_size=group.block_size, reuse=group.reuse_rule, window=group.window),
            record_bytes=group.record_bytes,
        )
        for group in geometry.groups
    )
    register = describe_blocks(
        identity.fingerprint(),
        CacheGeometry(hash_block_size=geometry.hash_block_size, groups=groups),
        hash_algorithm=HASH_ALGORITHM,
        identity=tuple(
            IdentityField(name=name, value=value) for name, value in describe_parts(identity.describe()).items()
        ),
    )
    return add_report_text(register, str(registration.report))


def _open_cache(
    settings: Settings, register: Register, arguments: Any, geometry: KVGeometry, *, rank: int, ranks: int
) -> Client:
    """Opens a session for this rank alone, because no process plans for all ranks. A private server belongs to one
    launcher."""
    launcher = f"sglang-{os.getppid()}"
    access = CacheAccess(
        settings=settings,
        engine=f"{launcher}-{uuid4().hex}",
        machine_key=launcher,
        engine_bytes=ranks * sum(allocation.size_bytes for allocation in geometry.allocations),
    )
    stocks = plan_stocks(geometry, arguments.chunked_prefill_size)
    return access.open(register, role=Role.SCHEDULER, rank=rank, stock_slots=stocks)


def plan_stocks(geometry: KVGeometry, step_tokens: int | None) -> tuple[int, ...]:
    """How many slots of each group are held ready, where the pool has room for as many."""
    tokens = step_tokens if isinstance(step_tokens, int) and step_tokens > 0 else PREFILL_TOKENS
    pages = ceil(tokens / geometry.hash_block_size)
    return tuple(STOCK_STEPS * (STEP_STATES if group.has_recurrent else pages) for group in geometry.groups)


def _tell(client: Client, page_settings: PageSettings, rank: int) -> None:
    """One line that says what is kept, and where."""
    try:
        where = describe_size(client.stats().capacity_bytes)
    except ServerError:
        where = "the memory of a server that does not run yet"
    logger.info(
        "kvoffload keeps pages of rank %d in %s: %s a page of %d tokens",
        rank,
        where,
        " + ".join(describe_size(group.record_bytes) for group in page_settings.groups),
        page_settings.page_size,
    )
