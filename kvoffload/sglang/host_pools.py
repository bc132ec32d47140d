"""SGLang's host pools (HiCache) as a KVGeometry: the same pages as those of the pool that they mirror, elsewhere.

A host pool has one buffer for all layers, which lie in it in one of a few orders. A page of it makes the same record as
a page of the device's pool, so that both doors of a server find each other's pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload.errors import StorageError, UnsupportedError
from kvoffload.kvspec import (
    Allocation,
    Exclusion,
    GroupSpec,
    KVGeometry,
    LayerSpec,
    Placement,
    attention_layer,
    build_page_map,
    mla_layer,
    place_dims,
    tensor_dims,
)
from kvoffload.sglang.pools import DTYPES, LAYOUT, PoolPages, dtype_name

if TYPE_CHECKING:
    import torch

MHA_HOST_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
MLA_HOST_POOL = "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost"
ALLOCATION = "host pool"
DIMS = ("block", "token", "head", "content")

Cut = Callable[["torch.Tensor", int, int], "torch.Tensor"]

LAYOUTS: Mapping[str, Cut] = {
    "layer_first": lambda buffer, layer, page: buffer[layer].view(-1, page, *buffer.shape[2:]),
    "page_first": lambda buffer, layer, page: buffer[:, layer].view(-1, page, *buffer.shape[2:]),
    "page_first_direct": lambda buffer, layer, page: buffer[:, layer],
}
"""By the name that SGLang gives it: a layer's pages, of the buffer of one part."""


def describe_host_pool(pool: Any, *, page_size: int) -> PoolPages:
    """UnsupportedError: this pool or its layout is not one that we know. StorageError: a page is not what SGLang says
    that it is."""
    kind = f"{type(pool).__module__}.{type(pool).__qualname__}"
    if kind not in (MHA_HOST_POOL, MLA_HOST_POOL):
        raise UnsupportedError(
            f"host pool {kind} is not served", remedy=f"pools that are: {MHA_HOST_POOL}, {MLA_HOST_POOL}"
        )
    _check_settings(pool, kind, page_size)
    buffer, is_mha = pool.kv_buffer, kind == MHA_HOST_POOL
    placements, tensors, layers = [], {}, {}
    for layer, part, view in _cut_layers(pool, page_size, is_mha=is_mha):
        name = layer.name if part == "kv" else f"{layer.name}.{part}"
        layers[layer.name], tensors[name] = layer, view
        placements.append(_place(layer, part, name, view))
    size_bytes, used = buffer.untyped_storage().nbytes(), buffer.numel() * buffer.element_size()
    geometry = KVGeometry(
        num_blocks=pool.page_num,
        hash_block_size=page_size,
        groups=(GroupSpec(name="kv", layers=tuple(layers.values()), block_size=page_size),),
        allocations=(Allocation(name=ALLOCATION, size_bytes=size_bytes),),
        placements=tuple(placements),
        exclusions=(Exclusion(allocation=ALLOCATION, base=used, length=size_bytes - used, name="rounding"),)
        if size_bytes > used
        else (),
        layout=LAYOUT,
    )
    _compare_page(pool, kind, geometry, page_size)
    return PoolPages(
        geometry=geometry,
        tensors=tensors,
        first_layer=pool.start_layer,
        end_layer=pool.start_layer + pool.layer_num,
    )


def _check_settings(pool: Any, kind: str, page_size: int) -> None:
    wrong = [
        (pool.layout not in LAYOUTS, f"has layout {pool.layout}"),
        (pool.page_size != page_size, f"has pages of {pool.page_size} tokens, the cache {page_size}"),
        (dtype_name(pool.dtype) not in DTYPES, f"keeps {pool.dtype}"),
        (pool.dcp_size != 1, "is a part of a context parallel one"),
        (pool.storage_format_tag is not None, f"has format {pool.storage_format_tag}"),
        (pool.stores_page_envelope, "keeps envelopes of pages"),
        (pool.layer_num != pool.target_layer_num, "has layers of a draft model"),
        (getattr(pool, "head_dim", 0) != getattr(pool, "v_head_dim", 0), "has values of another size than keys"),
        (pool.kv_buffer is None or not pool.kv_buffer.is_contiguous(), "has no buffer of its own"),
    ]
    for is_wrong, what in wrong:
        if is_wrong:
            raise UnsupportedError(
                f"host pool {kind} {what}, which is not served",
                remedy=f"use --hicache-mem-layout {', '.join(LAYOUTS)} and a KV cache of {', '.join(DTYPES)}",
            )


def _cut_layers(pool: Any, page_size: int, *, is_mha: bool) -> Iterator[tuple[LayerSpec, str, torch.Tensor]]:
    cut, dtype = LAYOUTS[pool.layout], dtype_name(pool.dtype)
    for at in range(pool.layer_num):
        name = f"layer {pool.start_layer + at}"
        if is_mha:
            layer = attention_layer(
                name,
                block_size=page_size,
                num_kv_heads=pool.head_num,
                head_size=pool.head_dim,
                head_size_v=pool.head_dim,
                dtype=dtype,
            )
            yield layer, "k", cut(pool.kv_buffer[0], at, page_size)
            yield layer, "v", cut(pool.kv_buffer[1], at, page_size)
        else:
            layer = mla_layer(name, block_size=page_size, latent_size=pool.kv_cache_dim, dtype=dtype)
            yield layer, "kv", cut(pool.kv_buffer, at, page_size)


def _place(layer: LayerSpec, part: str, name: str, view: torch.Tensor) -> Placement:
    return place_dims(
        layer,
        allocation=ALLOCATION,
        dims=tensor_dims(DIMS, shape=view.shape, strides=view.stride(), itemsize=view.element_size()),
        num_blocks=view.shape[0],
        offset=int(view.storage_offset()) * view.element_size(),
        part=part,
        tensor=name,
    )


def _compare_page(pool: Any, kind: str, geometry: KVGeometry, page_size: int) -> None:
    """Byte for byte, the last page is where SGLang tells its own stores that it is."""
    import torch

    last = pool.page_num - 1
    starts, sizes = pool.get_page_buffer_meta(torch.arange(last * page_size, (last + 1) * page_size))
    told = _list_bytes(starts, sizes, base=pool.kv_buffer.untyped_storage().data_ptr())
    runs = build_page_map(geometry).block_runs(0, last)
    placed = _list_bytes([run.start for run in runs], [run.length for run in runs], base=0)
    if not np.array_equal(told, placed):
        raise StorageError(
            f"host pool {kind}: a page of layout {pool.layout} lies elsewhere than SGLang says",
            remedy="report it with the model's name",
        )


def _list_bytes(starts: list[int], sizes: list[int], *, base: int) -> np.ndarray:
    runs = [np.arange(start - base, start - base + size) for start, size in zip(starts, sizes, strict=True)]
    return np.sort(np.concatenate(runs))
