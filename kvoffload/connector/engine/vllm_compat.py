"""The differences between the vLLM versions that we support (0.31 to 0.33), in one place."""

from __future__ import annotations

import platform
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from kvoffload.errors import UnsupportedError
from kvoffload.kvspec import find_scheme

if TYPE_CHECKING:
    from types import FrameType

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import KVConnectorBlockState
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


def hash_block_size(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Returns the number of tokens per block hash. vLLM 0.32 tells both sides; 0.31 has to be asked."""
    known = getattr(cache, "hash_block_size", None)
    return int(known or kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)[1])


def hit_alignment(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Returns the number of tokens of which every hit must be a multiple."""
    known = getattr(cache, "cache_hit_alignment_tokens", None)
    return int(known or kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)[0])


def retention_interval(config: VllmConfig) -> int | None:
    """Returns the number of tokens between the boundaries whose windows and states the engine retains; 0: it retains
    only boundaries with a meaning to it, None: all."""
    interval = getattr(config.cache_config, "prefix_cache_retention_interval", 0)
    return None if interval is None else int(interval)


def wants_events(config: VllmConfig) -> bool:
    """Whether the engine publishes events about cached blocks."""
    return bool(getattr(config.kv_events_config, "enable_kv_cache_events", False))


class GroupKind(NamedTuple):
    """The fields of events that describe a group of the engine's block tables, under their names in events."""

    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None


def group_kinds(cache: KVCacheConfig) -> tuple[GroupKind, ...]:
    """Returns the kinds of all groups; empty if the engine's events have no such fields."""
    find_kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    find_window = getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)
    if find_kind is None or find_window is None:
        return ()
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    return tuple(GroupKind(str(find_kind(spec).value), find_window(spec)) for spec in specs)


def draft_tokens(config: VllmConfig) -> int:
    """Returns the maximum number of tokens that speculative decoding adds to a step."""
    speculation = getattr(config, "speculative_config", None)
    return int(getattr(speculation, "num_speculative_tokens", None) or 0)


def drops_last_block(config: VllmConfig) -> bool:
    """Whether the engine computes the last block of each of its hits again, for drafting from the model's hidden states
    (EAGLE, MTP): no cache has these, and the last token's KV there depends on the token that follows."""
    speculation = getattr(config, "speculative_config", None)
    asks = getattr(speculation, "use_eagle_block_drop", None) or getattr(speculation, "use_eagle", None)
    return bool(asks and asks())


def replayed_tokens(cache: KVCacheConfig) -> int:
    """Returns the number of tokens before the end of each hit that the engine computes again, to rebuild windows that
    no cache holds (`swa_bounded_replay`). It drops hits that are not longer than that."""
    return max(int(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0)) for group in cache.kv_cache_groups)


def look_ahead_tokens(config: VllmConfig) -> int:
    """Returns for how many positions beyond a step's tokens the drafting part writes KV of its own."""
    return int(getattr(config, "num_lookahead_tokens", None) or 0)


def preempts_by_priority(config: VllmConfig) -> bool:
    """Whether the engine preempts the request of the least priority first. Otherwise it is the one admitted last."""
    return str(getattr(config.scheduler_config, "policy", "")) == "priority"


def steps_under_way(config: VllmConfig) -> int:
    """Returns the maximum number of steps that are scheduled before the first of them is known to have ended."""
    return int(getattr(config, "max_concurrent_batches", None) or 1)


def frees_after_steps(config: VllmConfig, cache: KVCacheConfig) -> bool:
    """Whether nothing that the engine has launched or is about to launch touches a block that it gives to a load.

    With several steps under way vLLM 0.32 frees the blocks of a request when the last of its steps has ended, and those
    that a window has left behind when no step reads them any more, if its connector may load. It does not wait for work
    that goes on after a step's tokens are known: a draft model's forward. Some models zero new blocks in the step in
    which a load into them begins.
    """
    # Imported here because the engine's scheduler imports connectors, and so this module.
    from vllm.v1.core.sched.scheduler import Scheduler

    transfer = config.kv_transfer_config
    defers = hasattr(Scheduler, "_request_blocks_can_be_freed") and hasattr(Scheduler, "_drain_deferred_frees")
    return (
        defers
        and transfer is not None
        and bool(transfer.is_kv_consumer)
        and steps_under_way(config) > 1
        and draft_tokens(config) == 0
        and not getattr(cache, "needs_kv_cache_zeroing", True)
    )


def kv_replicas(cache: KVCacheConfig) -> int:
    """Returns how many tensor ranks in a row hold identical KV of all layers, as far as vLLM tells; else 1."""
    return int(getattr(cache, "kv_tp_replicas", None) or 1)


def count_stripes(spec: Any, context_ranks: int) -> int:
    """Returns among how many ranks the tokens of a block are striped. A block of the engine's tables has so many times
    the tokens of a rank's page. vLLM 0.31 stripes every attention layer."""
    is_striped = getattr(spec, "dcp_sharded", isinstance(spec, kv_cache_interface.AttentionSpec))
    return context_ranks if is_striped else 1


def most_shards(spec: Any) -> int | None:
    """Returns how many tensor ranks at most hold different bytes of a layer's pages; None: vLLM (0.31) does not
    tell."""
    said = getattr(spec, "max_tp_shards", None)
    return None if said is None else int(said)


def has_latent(layer: Any) -> bool:
    """Whether this is one of vLLM's MLA layers: all tensor ranks compute the same KV for these."""
    from vllm.model_executor.layers.attention import MLAAttention

    return isinstance(layer, MLAAttention)


def find_projections(modules: Iterable[torch.nn.Module]) -> dict[int, Any]:
    """Returns, by the id of an attention layer, the module that projects to its queries, keys and values, and so knows
    how heads are divided. Modules of the model that do not have exactly one layer and one projection are left out,
    since the projection may belong to another layer."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import QKVParallelLinear

    found = {}
    for module in modules:
        # An adapter takes the place of a projection, and keeps it.
        children = [getattr(child, "base_layer", child) for child in module.children()]
        layers = [child for child in children if isinstance(child, Attention)]
        projections = [child for child in children if isinstance(child, QKVParallelLinear)]
        if len(layers) == len(projections) == 1:
            found[id(layers[0])] = projections[0]
    return found


def nodes(config: VllmConfig) -> int:
    """Returns the number of machines with ranks of this engine."""
    return int(getattr(config.parallel_config, "nnodes_within_dp", None) or 1)


def node_rank(config: VllmConfig) -> int:
    """Returns the number of the machine on which this process runs; the scheduler runs on 0, the first."""
    return int(getattr(config.parallel_config, "node_rank_within_dp", None) or 0)


def total_kv_heads(config: VllmConfig) -> int:
    """Returns the number of KV heads of a layer over all tensor-parallel ranks. A latent counts as one head, which all
    ranks hold."""
    model = config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def exchange_between_ranks(config: VllmConfig, frame: bytes) -> Sequence[bytes]:
    """Returns the frames of all ranks of this engine, stage by stage; all have the same length. First the ranks of each
    stage exchange theirs, then the stages.

    Each rank has to call this, and waits for the last. An engine of one rank has no group to ask.
    """
    frames = frame
    if config.parallel_config.tensor_parallel_size > 1:
        frames = _gather(get_tp_group(), frames)
    if config.parallel_config.pipeline_parallel_size > 1:
        frames = _gather(get_pp_group(), frames)
    return [frames[at : at + len(frame)] for at in range(0, len(frames), len(frame))]


def _gather(group: Any, frame: bytes) -> bytes:
    """Returns the frames of a group's ranks, joined in the order of the ranks."""
    given = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    taken = [torch.empty_like(given) for _ in range(group.world_size)]
    torch.distributed.all_gather(taken, given, group=group.cpu_group)
    return b"".join(one.numpy().tobytes() for one in taken)


_id_of = attrgetter("block_id")


class _TableView(Sequence[int]):
    """The ids of some of a request's blocks, without a copy of all of them: a long prompt has thousands."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, part: Any) -> Any:
        if isinstance(part, slice):
            return list(map(_id_of, self._blocks[part]))
        return self._blocks[part].block_id


def block_tables(
    state: KVConnectorBlockState, request_id: str, *, is_left_out: bool = False
) -> Sequence[Sequence[int]] | None:
    """Returns a request's blocks by group of the engine; None if the engine does not offer them in this step.
    `is_left_out`: the request runs, and the engine had no room for it in this step; it has its blocks nevertheless."""
    manager: Any = getattr(state.resolve_block_ids, "__self__", None)
    if is_left_out and not hasattr(manager, "get_blocks"):
        return state.resolve_block_ids(request_id)
    if (request_id not in state.req_ids and not is_left_out) or not hasattr(manager, "get_blocks"):
        return state.get_block_ids(request_id)
    return [_TableView(blocks) for blocks in manager.get_blocks(request_id).blocks]


def on_sigterm(hear: Callable[[], None]) -> None:
    """Calls `hear` before the engine's own handler when the engine is told to stop. vLLM installs its handler before it
    makes connectors, and goes on stepping for as long as one of them has something to do. If the engine has no handler,
    there is no step after the signal, and `hear` is not installed."""
    former = signal.getsignal(signal.SIGTERM)
    if not callable(former) or threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, frame: FrameType | None) -> None:
        hear()
        former(number, frame)

    signal.signal(signal.SIGTERM, handle)


def next_free_blocks(pool: BlockPool, limit: int) -> list[KVCacheBlock]:
    """Returns the blocks that the engine takes next, in that order."""
    queue = pool.free_block_queue
    return list(islice(queue.iter_blocks_after(None), limit))


def has_cached_blocks(pool: BlockPool) -> bool:
    """Returns whether the engine's own cache has any block."""
    return any(block.block_hash is not None for block in pool.blocks)


def full_block_key(block: KVCacheBlock, block_sizes: Mapping[int, int]) -> tuple[int, bytes] | None:
    """Returns the group and hash of a block that is cached as a full one; None for others, and groups without a
    size."""
    key = block.block_hash
    if key is None:
        return None
    group = kv_cache_utils.get_group_id(key)
    size = block_sizes.get(group)
    tokens = getattr(block, "block_hash_num_tokens", None)
    if size is None or (tokens is not None and tokens % size):
        return None
    return group, bytes(kv_cache_utils.get_block_hash(key))


def free_first(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> None:
    """Frees blocks like `free_blocks`, but the engine takes them before all others, the first one first."""
    freed = []
    for block in blocks:
        block.ref_cnt -= 1
        if block.ref_cnt == 0 and not block.is_null:
            freed.append(block)
    pool.free_block_queue.prepend_n(freed)


def cache_layout(cache: KVCacheConfig) -> str:
    """Returns the layout that the engine has resolved for all workers; shapes and strides would not show it."""
    if not cache.kv_cache_layout:
        raise UnsupportedError("the engine has not resolved a KV cache layout", remedy="use vLLM 0.31 or newer")
    return cache.kv_cache_layout


def hash_seed(config: VllmConfig) -> str:
    """Returns the seed of block hashes, the same in every rank.

    Algorithms that are not collision resistant draw a random seed in the scheduler's process, which no worker can know:
    such hashes mean nothing to any other engine, so the engine's own id stands for their seed.
    """
    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    first, second = (str(kv_cache_utils.resolve_none_hash_seed(function)) for _ in range(2))
    if first == second:
        return first
    assert config.kv_transfer_config is not None
    return f"drawn by engine {config.kv_transfer_config.engine_id}"


def find_hints(request: Request) -> object:
    """Returns the envelope of hints that came with the request, in vLLM 0.32's field or in ours; None: there is
    none."""
    envelope = getattr(request, "kv_hints", None)
    if envelope is None and request.kv_transfer_params:
        return request.kv_transfer_params.get("kv_hints")
    return envelope


def find_session(request: Request) -> str:
    """Returns the name of the request's session; empty if it has none, or before vLLM 0.32."""
    return getattr(request, "session_id", None) or ""


def has_extra_keys(request: Request) -> bool:
    """Whether the names of a request's blocks depend on more than tokens: an adapter, a salt, images or embeddings."""
    is_plain = request.lora_request is None and getattr(request, "prompt_embeds", None) is None
    return not is_plain or bool(request.cache_salt or request.mm_features)


def needs_encoder(request: Request, tokens: range) -> bool:
    """Whether an encoder computes an image, a sound or a film for these tokens of a request that no later token
    needs."""
    ends = (media.mm_position.offset + media.mm_position.length for media in request.mm_features or ())
    return any(tokens.start < end <= tokens.stop for end in ends)


def list_extra_keys(request: Request, positions: range, block_size: int) -> Sequence[tuple[Any, ...] | None] | None:
    """Returns the keys on which the names of these blocks depend besides tokens, as events have them; None: none."""
    if not has_extra_keys(request):
        return None
    keys, media = [], 0
    for position in positions:
        begin = position * block_size
        key, media = kv_cache_utils.generate_block_hash_extra_keys(request, begin, begin + block_size, media)
        keys.append(key)
    # Events of older releases have the keys as they are hashed.
    as_told: Callable[[Any], Any] = getattr(kv_cache_utils, "to_event_extra_keys", list)
    return as_told(keys)  # type: ignore[no-any-return]


def find_layers(config: VllmConfig) -> dict[str, Any]:
    """Returns the model's attention and recurrent layers by the names of their KV caches."""
    return dict(config.compilation_config.static_forward_context)


def loaded_modules() -> list[torch.nn.Module]:
    """Returns all modules of all models that this process has loaded and still has, models before their parts.

    vLLM hands a worker's connector no model. It notes every module that it makes, to be able to load weights again; the
    notes keep nothing alive. Empty if this vLLM makes no such notes.
    """
    try:
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    except ImportError:
        return []
    return list(LAYERWISE_INFO)


def expert_layers(config: VllmConfig) -> list[Any]:
    """Returns the layers of experts of which each data parallel replica of this engine holds another part, or that move
    between its ranks while it runs."""
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1 and not getattr(parallel, "enable_eplb", False):
        return []
    known = find_layers(config)
    return [known[name] for name in getattr(config.compilation_config, "static_all_moe_layers", ()) if name in known]


_AS_THE_SPEC_SAYS = frozenset({"", "auto", "half", "float", "float16", "bfloat16", "float32"})
_FP8_SYNONYMS = frozenset({"fp8", "fp8_e4m3"})


def quantised_name(layer: Any) -> str:
    """Returns the engine's name for the format of a layer's quantised values; empty if the spec's dtype says it.

    A spec has uint8 for every format that torch has no use for, among them fp8 of both kinds.
    """
    name = str(getattr(layer, "kv_cache_dtype", ""))
    return "" if name in _AS_THE_SPEC_SAYS else name


def page_format(layer: Any) -> str:
    """Returns the format that is really in a layer's pages: some of `quantised_name`'s mean other bits on some
    devices."""
    name = quantised_name(layer)
    if name in _FP8_SYNONYMS:
        # Some AMD devices have an exponent that is off by one.
        return "fp8_e4m3fnuz" if current_platform.is_fp8_fnuz() else "fp8_e4m3"
    return name


@dataclass(frozen=True, kw_only=True)
class DtypeWishes:
    """The settings that decide the dtype of a model's KV cache."""

    explicit: str
    """The user's choice, or `auto`."""
    scheme: Mapping[str, object] | str | None
    """The checkpoint's quantisation scheme; None: it has none."""
    model_dtype: str
    skip_layers: tuple[str, ...]


def dtype_wishes(config: VllmConfig) -> list[DtypeWishes]:
    """Returns the settings of the model, and of the draft model if there is one: a layer does not show its model."""
    cache, quantisation = config.cache_config, config.quant_config
    kinds = ("kv_cache_scheme", "kv_cache_quant_algo")
    model = DtypeWishes(
        explicit=str(cache.cache_dtype),
        scheme=find_scheme({kind: getattr(quantisation, kind, None) for kind in kinds}),
        model_dtype=str(config.model_config.dtype),
        skip_layers=tuple(getattr(cache, "kv_cache_dtype_skip_layers", ())),
    )
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    if draft is None:
        return [model]
    explicit = getattr(config.speculative_config, "kv_cache_dtype", None) or model.explicit
    scheme = find_scheme(getattr(draft.hf_config, "quantization_config", None))
    return [model, replace(model, explicit=str(explicit), scheme=scheme, model_dtype=str(draft.dtype))]


def calculates_scales(config: VllmConfig) -> bool:
    """Whether the engine makes KV scales from the results of its calibration pass."""
    return bool(getattr(config.cache_config, "calculate_kv_scales", False))


def follows_cache_dtype(layer: Any) -> bool:
    """Whether this is one of vLLM's own attention layers, whose dtype its configuration decides."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return isinstance(layer, Attention | MLAAttention)


def skip_kind(layer: Any) -> str:
    """Returns the kind by which a skip list may name a layer; empty: by its number alone, as for MLA layers."""
    from vllm.model_executor.layers.attention import Attention

    has_window = isinstance(layer, Attention) and layer.sliding_window is not None
    return "sliding_window" if has_window else ""


def page_writer(layer: Any) -> str:
    """Returns the name of the kernels that fill a layer's pages; empty if it has none.

    Shapes and strides do not show how kernels arrange a page inside: the CPU's have one arrangement for each
    instruction set, which the engine notes on the layer. Other kernels with equal shapes need not agree, either.
    """
    if not hasattr(layer, "get_attn_backend"):
        return ""
    return f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}".rstrip()


def page_scales(layer: Any) -> tuple[tuple[float, ...], ...]:
    """Returns the scales by which keys, then values, are divided before they are written; pages do not hold these."""
    found = (getattr(layer, name, None) for name in ("_k_scale", "_v_scale"))
    return tuple(tuple(scale.detach().double().reshape(-1).tolist()) for scale in found if scale is not None)


def find_sharing(config: VllmConfig) -> dict[str, str]:
    """Returns the layers that read another layer's pages, each with that layer."""
    layers = find_layers(config).items()
    targets = {name: getattr(layer, "kv_sharing_target_layer_name", None) for name, layer in layers}
    return {name: target for name, target in targets.items() if target is not None}


def create_scale_views(config: VllmConfig, tensors: Mapping[str, Any], layers: Collection[str]) -> dict[str, Any]:
    """Makes views over the scales inside these layers' per-token-head pages; called before anything is loaded.

    vLLM makes them at a layer's first forward and then overwrites every scale with 1.0, restored ones too
    (vLLM #51091). Once made they are left alone. A backend without such views keeps its scales in its own way.
    """
    views = {}
    known = find_layers(config)
    for name in layers:
        impl: Any = getattr(known.get(name), "impl", None)
        if hasattr(impl, "_ensure_scale_caches"):
            impl._ensure_scale_caches(tensors[name])
            views[f"{name}.k_scales"] = impl._k_scale_cache
            views[f"{name}.v_scales"] = impl._v_scale_cache
    return views


def find_engine_of_tier(engine_id: str) -> tuple[VllmConfig, KVCacheConfig] | None:
    """Returns the configuration of the engine that is making a secondary tier on this thread now; None: not found.

    vLLM hands a tier a summary that has neither the model's revision nor the content of its pages. The connector that
    has all of it is on the call stack; nothing else shows which of a process's engines this is.
    """
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        config, cache = frame.f_locals.get("vllm_config"), frame.f_locals.get("kv_cache_config")
        if isinstance(config, VllmConfig) and isinstance(cache, KVCacheConfig):
            transfer = config.kv_transfer_config
            return (config, cache) if transfer is not None and transfer.engine_id == engine_id else None
        frame = frame.f_back
    return None


def attention_choice(config: VllmConfig) -> str:
    """Returns the engine's setting for its attention kernels."""
    return repr(getattr(config, "attention_config", None))


def describe_platform() -> dict[str, str]:
    """Returns the properties of this machine on which a kernel's arrangement of pages may depend, for a process that
    has no layer to ask."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    try:
        device = str(current_platform.get_device_name())
    except (NotImplementedError, RuntimeError):
        device = ""
    return {
        "device": f"{current_platform.device_type} {device}".rstrip(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{' AMX' if has_amx() else ''}",
        "fp8": "fnuz" if current_platform.is_fp8_fnuz() else "fn",
    }


_HIT_SOURCES = {"memory": "HOST", "disk": "DISK", "peer": "P2P"}
"""vLLM's names for sources of hits. Remote stores have none: vLLM counts them as unspecified."""


def label_hit(sources: Iterable[tuple[str, int]], tokens: int) -> dict[Any, int]:
    """Returns how many of a hit's tokens came from each source, as vLLM's own metrics name them. They always sum up to
    `tokens`: tokens without a source are unspecified. Empty: vLLM (0.31) has no such names."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return {}
    labelled: dict[Any, int] = {}
    for name, count in (*sources, ("", tokens)):
        label, more = CacheHitSource[_HIT_SOURCES.get(name, "EXTERNAL_UNSPECIFIED")], min(count, tokens)
        if more > 0:
            labelled[label] = labelled.get(label, 0) + more
            tokens -= more
    return labelled
