"""vLLM's KVCacheConfig as a KVGeometry: what each layer's pages are, and where the backing allocation holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.kept_groups import Fate, find_fate
from kvoffload.errors import GeometryError, StrideError, UnknownLayerError
from kvoffload.kvspec import (
    Allocation,
    GroupSpec,
    KVGeometry,
    LayerKind,
    LayerSpec,
    Padding,
    Placement,
    Quantisation,
    ScalePlacement,
    ScaleView,
    StateSpec,
    find_layout,
    opaque_layer,
    place_dims,
    place_strided,
    resolve_block_dim,
    restride_block_major,
    tensor_dims,
)

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

ALLOCATION = "kv"
SLACK_BYTES = 4096
"""The size in bytes to whose multiples vLLM rounds the backing allocation up on some platforms."""
NULL_BLOCK = 0
DIMS = ("block", "head", "token", "content")
"""The dimensions of every attention layer's tensor, in any layout: vLLM's own declaration since 0.30."""

_NAME_PREFIX = "group "
_KINDS = {
    KVCacheSpecKind.FULL_ATTENTION: LayerKind.FULL_ATTENTION,
    KVCacheSpecKind.SINK_FULL_ATTENTION: LayerKind.FULL_ATTENTION,
    KVCacheSpecKind.MLA_ATTENTION: LayerKind.MLA,
    KVCacheSpecKind.SLIDING_WINDOW: LayerKind.SLIDING_WINDOW,
    KVCacheSpecKind.SLIDING_WINDOW_MLA: LayerKind.SLIDING_WINDOW,
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION: LayerKind.CHUNKED_LOCAL,
    KVCacheSpecKind.MAMBA: LayerKind.RECURRENT,
}
_QUANTISATIONS = {
    KVQuantMode.NONE: Quantisation.NONE,
    KVQuantMode.FP8_PER_TENSOR: Quantisation.FP8_PER_TENSOR,
    KVQuantMode.INT8_PER_TOKEN_HEAD: Quantisation.INT8_PER_TOKEN_HEAD,
    KVQuantMode.FP8_PER_TOKEN_HEAD: Quantisation.FP8_PER_TOKEN_HEAD,
    KVQuantMode.INT4_PER_TOKEN_HEAD: Quantisation.INT4_PER_TOKEN_HEAD,
}


@dataclass(frozen=True, kw_only=True)
class EngineCache:
    """The engine's description of its cache, and the tensors that it registered."""

    config: KVCacheConfig
    tensors: Mapping[str, torch.Tensor]
    sharing: Mapping[str, str]
    """The layers without pages of their own, each with the layer whose pages it reads."""
    layout: str
    hash_block_size: int
    context_ranks: int = 1
    """Number of ranks among which vLLM stripes the tokens of a block (decode context parallelism)."""


def describe_cache(cache: EngineCache) -> KVGeometry:
    """Describes every group, transferable or not: the proof accounts for all bytes, exclusions included."""
    config = cache.config
    # Workers are also told of groups that have no layers on their stage of a pipeline.
    present = [index for index, group in enumerate(config.kv_cache_groups) if group.layer_names]
    groups = tuple(_describe_group(cache, index) for index in present)
    layers = {layer.name: layer for group in groups for layer in group.layers}
    placements = tuple(
        _place_layer(cache, layers[name], tensor, position)
        for tensor in config.kv_cache_tensors
        for position, name in enumerate(tensor.layers)
    )
    return KVGeometry(
        num_blocks=config.num_blocks,
        hash_block_size=cache.hash_block_size,
        groups=groups,
        allocations=(Allocation(name=ALLOCATION, size_bytes=config.kv_cache_tensors[0].size, slack_bytes=SLACK_BYTES),),
        placements=placements,
        paddings=tuple(_row_paddings(cache, groups, placements)),
        overlays=(tuple(group.name for group in groups),) if len(groups) > 1 else (),
        layout=cache.layout,
        null_block=NULL_BLOCK,
    )


def with_scale_views(geometry: KVGeometry, views: Iterable[str]) -> KVGeometry:
    """Adds views over scales inside pages, named `<layer>.<part>`: they are checked and released with the pages."""
    declared = tuple(ScaleView(name=name, layer=name.rpartition(".")[0]) for name in views)
    return replace(geometry, scale_views=declared) if declared else geometry


def group_name(index: int) -> str:
    """Returns our name of a group, from its position in the block tables: vLLM gives groups no names."""
    return f"{_NAME_PREFIX}{index}"


def table_of(name: str) -> int:
    """Returns the position from which `group_name` made this name."""
    return int(name.removeprefix(_NAME_PREFIX))


def _describe_group(cache: EngineCache, index: int) -> GroupSpec:
    group = cache.config.kv_cache_groups[index]
    owned = {name for tensor in cache.config.kv_cache_tensors for name in tensor.layers}
    # The engine tells the connector of its groups before it adds the layers that share pages to them.
    late = [name for name, target in cache.sharing.items() if target in group.layer_names]
    names = list(dict.fromkeys([*group.layer_names, *late]))
    specs: dict[str, LayerSpec] = {}
    for name in sorted(names, key=lambda name: name not in owned):
        if name in owned:
            specs[name] = describe_group_layer(cache.config, index, name, context_ranks=cache.context_ranks)
            continue
        target = cache.sharing.get(name)
        if target not in specs:
            raise UnknownLayerError(
                f"layer {name} has no pages and shares none that its group knows",
                remedy="report it with the model's name",
            )
        specs[name] = replace(specs[target], name=name, alias_of=target)
    block_size = group.kv_cache_spec.block_size * vllm_compat.count_stripes(group.kv_cache_spec, cache.context_ranks)
    return GroupSpec.from_names(group_name(index), layer_names=names, specs=specs, block_size=block_size)


def layer_spec(spec: KVCacheSpec, name: str) -> KVCacheSpec:
    """Returns a layer's own spec: groups with different page sizes keep one for each layer (vLLM #38554)."""
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def describe_group_layer(config: KVCacheConfig, index: int, name: str, *, context_ranks: int = 1) -> LayerSpec:
    """Describes a layer of a group. Layers of groups that are not kept are excluded. A page of a rank holds one stripe
    of a block's tokens, if there are several ranks for the context."""
    treatment, spec = find_fate(config, index), layer_spec(config.kv_cache_groups[index].kv_cache_spec, name)
    layer = describe_layer(name, spec, excluded="" if treatment.fate is Fate.KEPT else treatment.why)
    return replace(layer, block_size=layer.block_size * vllm_compat.count_stripes(spec, context_ranks))


def describe_layer(name: str, spec: KVCacheSpec, *, excluded: str = "") -> LayerSpec:
    """Describes a layer from its spec, with the spec's own byte counts. How pages use these bytes is up to the
    engine."""
    kind = _KINDS.get(get_kv_cache_spec_kind(spec), LayerKind.SCRATCH)
    if isinstance(spec, MambaSpec):
        states = tuple(
            StateSpec(f"s{index}", tuple(shape), _dtype_name(dtype))
            for index, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
        )
        return LayerSpec(
            name=name,
            kind=kind,
            block_size=spec.block_size,
            page_bytes=spec.real_page_size_bytes,
            dtype="+".join(dict.fromkeys(state.dtype for state in states)),
            states=states,
            excluded=excluded,
        )
    if not isinstance(spec, AttentionSpec):
        return opaque_layer(
            name,
            kind=kind,
            block_size=spec.block_size,
            page_bytes=spec.page_size_bytes,
            dtype="uint8",
            excluded=excluded,
        )
    quantisation = _QUANTISATIONS.get(spec.kv_quant_mode, Quantisation.OPAQUE)
    return LayerSpec(
        name=name,
        kind=kind,
        block_size=spec.block_size,
        page_bytes=spec.real_page_size_bytes,
        dtype=_dtype_name(spec.dtype),
        quantisation=quantisation,
        scales=ScalePlacement.INLINE if quantisation.is_per_token_head else ScalePlacement.NONE,
        window=_window(spec, kind),
        excluded=excluded,
    )


def _window(spec: KVCacheSpec, kind: LayerKind) -> int:
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return spec.attention_chunk_size
    if kind is not LayerKind.SLIDING_WINDOW:
        return 0
    assert isinstance(spec, SlidingWindowSpec)
    # Layers that look back a little further for speculative decoding keep that much more.
    return spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)


def _place_layer(cache: EngineCache, layer: LayerSpec, tensor: KVCacheTensor, position: int) -> Placement:
    view = cache.tensors.get(layer.name)
    if view is None and not layer.excluded:
        raise UnknownLayerError(f"layer {layer.name} was not registered", remedy="report it with the model's name")
    offset = tensor.offset + position * tensor.layer_stride
    spec = layer_spec(cache.config.kv_cache_groups[_group_index(cache, layer.name)].kv_cache_spec, layer.name)
    layout = find_layout(cache.layout)
    is_contiguous = layout.is_page_contiguous
    # Blocks of one layer may be further apart than its pages are long; rows of a block hold other layers' pages too.
    slot_bytes = min(spec.page_size_bytes, tensor.block_stride) if layout.is_block_outermost else tensor.block_stride
    if layer.kind.is_recurrent or view is None:
        return place_strided(
            layer,
            allocation=ALLOCATION,
            block_stride=tensor.block_stride,
            offset=offset,
            slot_bytes=slot_bytes,
        )
    if is_contiguous:
        view = _block_major(cache, layer, view, page_stride_bytes=tensor.block_stride)
    return place_dims(
        layer,
        allocation=ALLOCATION,
        dims=tensor_dims(DIMS, shape=view.shape, strides=view.stride(), itemsize=view.element_size()),
        num_blocks=cache.config.num_blocks,
        offset=offset,
        slot_bytes=slot_bytes if is_contiguous else None,
    )


def _block_major(cache: EngineCache, layer: LayerSpec, view: torch.Tensor, *, page_stride_bytes: int) -> torch.Tensor:
    """Returns the layer's tensor as its pages have to lie: each in one piece, as far apart as the configuration says.

    Which dimension counts blocks is vLLM's declaration, never read from a shape (vLLM #37236). The layer is placed by
    this view. Registration then holds the engine's own tensor against it, so other strides pass only over the same
    bytes.
    """
    if view.dim() != len(DIMS):
        raise StrideError(
            f"layer {layer.name}: its tensor has the shape {tuple(view.shape)}, and this engine declares {DIMS}",
            remedy="report it with the model's name and the attention backend",
            layer=layer.name,
        )
    kernel_blocks = max(layer.page_bytes // (view[0].numel() * view.element_size()), 1)
    try:
        block_dim = resolve_block_dim(
            view.shape,
            num_blocks=cache.config.num_blocks,
            kernel_blocks=kernel_blocks,
            declared=DIMS.index("block"),
        )
        return restride_block_major(
            view, block_dim=block_dim, page_stride_bytes=page_stride_bytes, kernel_blocks=kernel_blocks
        )
    except GeometryError as fault:
        raise type(fault)(f"layer {layer.name}: {fault.message}", remedy=fault.remedy, layer=layer.name) from fault


def _row_paddings(
    cache: EngineCache, groups: tuple[GroupSpec, ...], placements: tuple[Placement, ...]
) -> Iterator[Padding]:
    """Yields the space that a block-outermost layout leaves after a group's last page: the row's tail, by group.

    Only the tail: a gap between two pages is no padding of vLLM's, and the proof must call it a hole.
    """
    if not find_layout(cache.layout).is_block_outermost:
        return
    for group in groups:
        names = {layer.name for layer in group.layers}
        runs = [run for p in placements if p.layer in names for run in (*p.runs, *p.padding)]
        end, stride = max(run.base + run.length for run in runs), runs[0].stride
        if end < stride:
            yield Padding(
                allocation=ALLOCATION,
                base=end,
                length=stride - end,
                stride=stride,
                count=cache.config.num_blocks,
                group=group.name,
            )


def _group_index(cache: EngineCache, layer: str) -> int:
    return next(index for index, group in enumerate(cache.config.kv_cache_groups) if layer in group.layer_names)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
