"""SGLang's KV pools as a KVGeometry: every tensor of a pool is placed, or the pool is refused by name.

A pool keeps rows of tokens, one buffer for each layer; a page is `page_size` rows that follow each other. Page 0 takes
the writes of padded tokens and is never a page of a request. Layers that see a window have a pool of their own, whose
pages the engine numbers anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvoffload.errors import StorageError, UnknownLayerError, UnsupportedError
from kvoffload.kvspec import (
    Allocation,
    Exclusion,
    GroupSpec,
    KVGeometry,
    LayerKind,
    LayerSpec,
    Placement,
    attention_layer,
    mla_layer,
    place_dims,
    tensor_dims,
)
from kvoffload.sglang.held_pages import GroupTerms

if TYPE_CHECKING:
    import torch

PADDING_PAGE = 0
"""Its name in SGLang is the padded page: what a batch is filled up with is written there."""
MHA_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
MLA_POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"
SWA_POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"
POOLS = (MHA_POOL, MLA_POOL, SWA_POOL)
KV = "kv"
SWA = "swa"
"""SGLang's names of what an offer moves: pages of all tokens, and of those within a window."""
LAYOUT = "nhd"
DTYPES = ("bfloat16", "float16", "float32")
"""What pages may hold: of others the scales lie elsewhere."""
ADDRESS_TABLES = frozenset({"k_data_ptrs", "v_data_ptrs", "data_ptrs", "data_strides", "full_to_swa_index_mapping"})
"""Tensors of a pool that say where others lie; they are made again in every process."""
_MAX_DEPTH = 4
_OFF = (
    "k_scale_buffer",
    "v_scale_buffer",
    "kv_scale_buffer",
    "native_k_scale_buffer",
    "native_v_scale_buffer",
    "dq_k_buffer",
    "dq_v_buffer",
    "use_dsa",
    "dcp_replicated",
    "layer_shard_enabled",
    "post_capture_active",
    "custom_mem_pool",
    "requires_physical_write_loc",
    "swa_req_ring_size",
    "request_window",
    "swa_uses_full_indices",
)
"""Attributes that are absent, None or False in a pool that is served."""


@dataclass(frozen=True, kw_only=True)
class PoolPages:
    """What a pool's pages are, and the tensors to register for them."""

    geometry: KVGeometry
    tensors: Mapping[str, torch.Tensor]
    first_layer: int

    @property
    def num_layers(self) -> int:
        return len(self.geometry.layers)

    @property
    def group_names(self) -> tuple[str, ...]:
        """As SGLang names them in its offers."""
        return tuple(group.name for group in self.geometry.groups)

    @property
    def group_terms(self) -> tuple[GroupTerms, ...]:
        return tuple(
            GroupTerms(
                record_bytes=group.record_bytes,
                page_rows=group.block_size,
                trailing_pages=-(-(group.window - 1) // group.block_size) if group.window else 0,
            )
            for group in self.geometry.groups
        )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A pool of tokens' rows, whose pages are one group."""

    name: str
    pool: Any
    kind: str
    layers: Sequence[int]
    """By their numbers in the model."""
    window: int = 0
    """Tokens that a boundary needs behind it; 0: all."""

    @property
    def num_pages(self) -> int:
        return int(self.pool.size + self.pool.page_size) // int(self.pool.page_size)


@dataclass(frozen=True, kw_only=True)
class _Buffer:
    """One layer's rows of one part."""

    layer: LayerSpec
    part: str
    rows: torch.Tensor

    @property
    def name(self) -> str:
        return self.layer.name if self.part == "kv" else f"{self.layer.name}.{self.part}"


def describe_pool(pool: Any, *, page_size: int, window: int = 0) -> PoolPages:
    """`window`: how many tokens behind a boundary layers with a window see, as SGLang counts them.

    UnsupportedError: this pool is not one that we know, or is not as we know it. HoleError and its like: a byte of its
    storages belongs to nobody.
    """
    kind = _kind_of(pool)
    if kind not in POOLS:
        raise UnsupportedError(f"KV pool {kind} is not served", remedy=f"pools that are: {', '.join(POOLS)}")
    _check_settings(pool, kind, page_size)
    if kind == SWA_POOL:
        parts = _split_windows(pool, page_size, window)
    else:
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        parts = (_Part(name=KV, pool=pool, kind=kind, layers=layers),)
    num_pages = max(part.num_pages for part in parts)
    groups, allocations, placements, exclusions = [], [], [], []
    tensors: dict[str, torch.Tensor] = {}
    for part in parts:
        buffers = list(_mha_buffers(part) if part.kind == MHA_POOL else _mla_buffers(part))
        _check_sizes(part.pool, part.kind, buffers)
        _refuse_unplaced(vars(part.pool), part.kind, {buffer.rows.untyped_storage().data_ptr() for buffer in buffers})
        own_layers = {buffer.layer.name: buffer.layer for buffer in buffers}
        own_pages = part.num_pages if part.num_pages < num_pages else 0
        groups.append(
            GroupSpec(name=part.name, layers=tuple(own_layers.values()), block_size=page_size, num_blocks=own_pages)
        )
        placed = _place(buffers, num_pages=part.num_pages, page_size=page_size)
        allocations += placed[0]
        placements += placed[1]
        exclusions += placed[2]
        tensors |= {buffer.name: _as_pages(buffer.rows, part.num_pages, page_size) for buffer in buffers}
    return PoolPages(
        geometry=KVGeometry(
            num_blocks=num_pages,
            hash_block_size=page_size,
            groups=tuple(groups),
            allocations=tuple(allocations),
            placements=tuple(placements),
            exclusions=tuple(exclusions),
            layout=LAYOUT,
            null_block=PADDING_PAGE,
        ),
        tensors=tensors,
        first_layer=pool.start_layer,
    )


def _kind_of(pool: Any) -> str:
    return f"{type(pool).__module__}.{type(pool).__qualname__}"


def _split_windows(pool: Any, page_size: int, window: int) -> tuple[_Part, ...]:
    """Of a pool for layers of both kinds. Its other tensors say where rows lie, or it is refused."""
    inner = {KV: pool.full_kv_pool, SWA: pool.swa_kv_pool}
    others = {name: value for name, value in vars(pool).items() if not any(value is one for one in inner.values())}
    _refuse_unplaced(others, SWA_POOL, set())
    numbers: dict[str, list[tuple[int, int]]] = {KV: [], SWA: []}
    for number, (at, is_window) in pool.layers_mapping.items():
        numbers[SWA if is_window else KV].append((at, number))
    if sorted(pool.layers_mapping) != list(range(pool.layer_num)) or not all(numbers.values()) or window < 1:
        raise UnsupportedError(
            f"KV pool {SWA_POOL} has layers {sorted(pool.layers_mapping)}, a window of {window}: it is not served",
            remedy="models with windows have full attention too",
        )
    parts = []
    for name, one in inner.items():
        kind = _kind_of(one)
        if kind != MHA_POOL:
            raise UnsupportedError(
                f"KV pool {kind} in {SWA_POOL} is not served", remedy=f"the pool that is: {MHA_POOL}"
            )
        _check_settings(one, kind, page_size)
        layers = [number for _, number in sorted(numbers[name])]
        parts.append(_Part(name=name, pool=one, kind=kind, layers=layers, window=window if name == SWA else 0))
    return tuple(parts)


def _check_settings(pool: Any, kind: str, page_size: int) -> None:
    wrong = [
        (pool.page_size != page_size, f"has pages of {pool.page_size} tokens, the cache {page_size}"),
        (getattr(pool, "kv_cache_layout", LAYOUT) != LAYOUT, f"has layout {getattr(pool, 'kv_cache_layout', '')}"),
        (_stored_dtype(pool) != pool.dtype, f"keeps {pool.dtype} as {_stored_dtype(pool)}"),
        (dtype_name(pool.dtype) not in DTYPES, f"keeps {pool.dtype}"),
        (pool.layer_num < 1, "has no layers"),
        (getattr(pool, "is_quantized_kv_cache", False), "is quantised"),
        *((_is_on(pool, name), f"has {name}") for name in _OFF),
    ]
    for is_wrong, what in wrong:
        if is_wrong:
            raise UnsupportedError(
                f"KV pool {kind} {what}, which is not served",
                remedy=f"use layout {LAYOUT} and a KV cache of {', '.join(DTYPES)}",
            )


def _stored_dtype(pool: Any) -> Any:
    """A pool of pools leaves it to them."""
    return getattr(pool, "store_dtype", pool.dtype)


def _is_on(pool: Any, name: str) -> bool:
    value = getattr(pool, name, None)
    return value is not None and value is not False


def _mha_buffers(part: _Part) -> Iterator[_Buffer]:
    pool = part.pool
    for number, keys, values in zip(part.layers, pool.k_buffer, pool.v_buffer, strict=True):
        layer = attention_layer(
            f"layer {number}",
            block_size=pool.page_size,
            num_kv_heads=pool.head_num,
            head_size=pool.head_dim,
            head_size_v=pool.v_head_dim,
            dtype=dtype_name(pool.dtype),
            kind=LayerKind.SLIDING_WINDOW if part.window else LayerKind.FULL_ATTENTION,
            # Here a token sees itself too.
            window=part.window + 1 if part.window else 0,
        )
        yield _Buffer(layer=layer, part="k", rows=keys)
        yield _Buffer(layer=layer, part="v", rows=values)


def _mla_buffers(part: _Part) -> Iterator[_Buffer]:
    pool = part.pool
    for number, rows in zip(part.layers, pool.kv_buffer, strict=True):
        layer = mla_layer(
            f"layer {number}", block_size=pool.page_size, latent_size=pool.kv_cache_dim, dtype=dtype_name(pool.dtype)
        )
        yield _Buffer(layer=layer, part="kv", rows=rows)


def _check_sizes(pool: Any, kind: str, buffers: Sequence[_Buffer]) -> None:
    """The pool counts as many bytes as we found, and every buffer has the rows that it says."""
    rows = pool.size + pool.page_size
    for buffer in buffers:
        if buffer.rows.dim() != 3 or buffer.rows.shape[0] != rows:
            raise StorageError(
                f"KV pool {kind}: {buffer.name} has shape {tuple(buffer.rows.shape)}, expected {rows} rows of heads",
                remedy="report it with the model's name",
            )
    counted = pool.get_kv_size_bytes()
    counted = sum(counted) if isinstance(counted, tuple) else counted
    found = sum(buffer.rows.numel() * buffer.rows.element_size() for buffer in buffers)
    if counted != found:
        raise StorageError(
            f"KV pool {kind} says that it has {counted} bytes, and {found} were found",
            remedy="report it with the model's name",
        )


def _place(
    buffers: Sequence[_Buffer], *, num_pages: int, page_size: int
) -> tuple[tuple[Allocation, ...], tuple[Placement, ...], tuple[Exclusion, ...]]:
    """Storage by storage; what lies between and after the buffers' pages is rounding, and excluded by that name."""
    by_storage: dict[int, list[_Buffer]] = {}
    for buffer in buffers:
        by_storage.setdefault(buffer.rows.untyped_storage().data_ptr(), []).append(buffer)
    allocations, placements, exclusions = [], [], []
    for members in by_storage.values():
        name = f"pool {members[0].name}"
        size_bytes = members[0].rows.untyped_storage().nbytes()
        allocations.append(Allocation(name=name, size_bytes=size_bytes))
        at = 0
        for buffer in sorted(members, key=lambda buffer: int(buffer.rows.storage_offset())):
            pages = _as_pages(buffer.rows, num_pages, page_size)
            offset = int(pages.storage_offset()) * pages.element_size()
            exclusions += _rounding(name, at, offset, f"rounding before {buffer.name}")
            names = ("block", "token", "head", "content")
            dims = tensor_dims(names, shape=pages.shape, strides=pages.stride(), itemsize=pages.element_size())
            placements.append(
                place_dims(
                    buffer.layer,
                    allocation=name,
                    dims=dims,
                    num_blocks=num_pages,
                    offset=offset,
                    part=buffer.part,
                    tensor=buffer.name,
                )
            )
            at = offset + pages.numel() * pages.element_size()
        exclusions += _rounding(name, at, size_bytes, f"rounding after {members[-1].name}")
    return tuple(allocations), tuple(placements), tuple(exclusions)


def _rounding(allocation: str, begin: int, end: int, name: str) -> list[Exclusion]:
    return [Exclusion(allocation=allocation, base=begin, length=end - begin, name=name)] if end > begin else []


def _as_pages(rows: torch.Tensor, num_pages: int, page_size: int) -> torch.Tensor:
    """The same storage; rows beyond the last whole page are left out. RuntimeError: its rows are not one behind the
    other."""
    return rows[: num_pages * page_size].view(num_pages, page_size, *rows.shape[1:])


def _refuse_unplaced(members: Mapping[str, Any], kind: str, placed: set[int]) -> None:
    for name, tensor in _find_tensors(members, "", _MAX_DEPTH):
        is_table = name.partition(".")[0] in ADDRESS_TABLES
        if not is_table and tensor.numel() and tensor.untyped_storage().data_ptr() not in placed:
            raise UnknownLayerError(
                f"KV pool {kind}: tensor {name} of shape {tuple(tensor.shape)} is not known, and would be forgotten",
                remedy="report it with the model's name",
                tensor=name,
            )


def _find_tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """In containers and in the engine's own objects, as deep as pools keep them."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth == 0:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_tensors(item, f"{name}.{key}" if name else str(key), depth - 1)
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _find_tensors(item, f"{name}.{at}", depth - 1)
    elif type(value).__module__.startswith("sglang.") and hasattr(value, "__dict__"):
        yield from _find_tensors(vars(value), name, depth - 1)


def dtype_name(dtype: Any) -> str:
    """As kvspec has it."""
    return str(dtype).removeprefix("torch.")
