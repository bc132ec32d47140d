"""SGLang's KV pools as a KVGeometry: every tensor of a pool is placed, or the pool is refused by name.

A pool keeps rows of tokens, one buffer for each layer; a page is `page_size` rows that follow each other. Page 0 takes
the writes of padded tokens and is never a page of a request. Layers with a sliding window have a pool of their own, in
which the engine gives pages other numbers. Recurrent layers have slots, one for each length that a state was kept of;
slot 0 takes the writes that page 0 takes elsewhere.
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
    StateSpec,
    attention_layer,
    mla_layer,
    place_dims,
    recurrent_layer,
    tensor_dims,
)
from kvoffload.sglang.held_pages import PoolSettings

if TYPE_CHECKING:
    import torch

PADDING_PAGE = 0
"""Its name in SGLang is the padded page: what a batch is filled up with is written there."""
MHA_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
MLA_POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"
SWA_POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"
LINEAR_POOL = "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool"
POOLS = (MHA_POOL, MLA_POOL, SWA_POOL, LINEAR_POOL)
STATE_POOL = "sglang.srt.mem_cache.memory_pool.MambaPool"
STATES = "sglang.srt.mem_cache.memory_pool.MambaPool.State"
KV = "kv"
SWA = "swa"
MAMBA = "mamba"
"""SGLang's names of what an offer moves: pages of all tokens, of those within a window, and states."""
LAYOUT = "nhd"
DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that pages may have. Pages of other dtypes have their scales elsewhere."""
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
    "enable_linear_replayssm",
    "enable_linear_replayssm_spec",
)
"""Attributes that are absent, None or False in a pool that is served."""


@dataclass(frozen=True, kw_only=True)
class PoolPages:
    """The geometry of a pool's pages, and the tensors to register for them."""

    geometry: KVGeometry
    tensors: Mapping[str, torch.Tensor]
    first_layer: int
    end_layer: int
    """After the last one that keeps something. Between them may be some that keep nothing."""

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer

    @property
    def group_names(self) -> tuple[str, ...]:
        """Returns the groups' names as SGLang has them in its offers."""
        return tuple(group.name for group in self.geometry.groups)

    @property
    def pool_settings(self) -> tuple[PoolSettings, ...]:
        return tuple(
            PoolSettings(
                record_bytes=group.record_bytes,
                page_rows=1 if group.has_recurrent else group.block_size,
                trailing_pages=_count_trailing(group),
            )
            for group in self.geometry.groups
        )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A pool whose pages are one group."""

    name: str
    pool: Any
    kind: str
    layers: Sequence[int]
    """The layers' numbers in the model."""
    window: int = 0
    """Tokens that a boundary needs behind it; 0: all."""

    @property
    def page_rows(self) -> int:
        return 1 if self.kind == STATE_POOL else int(self.pool.page_size)

    @property
    def num_pages(self) -> int:
        return int(self.pool.size + self.page_rows) // self.page_rows

    def list_buffers(self, page_size: int) -> list[_Buffer]:
        if self.kind == STATE_POOL:
            return list(_state_buffers(self, page_size))
        buffers = list(_mha_buffers(self) if self.kind == MHA_POOL else _mla_buffers(self))
        _check_sizes(self.pool, self.kind, buffers)
        return buffers

    def as_pages(self, buffer: _Buffer) -> torch.Tensor:
        """The same storage; rows beyond the last whole page are left out. RuntimeError: its rows are not one behind the
        other."""
        rows, pages = buffer.rows, self.num_pages
        if self.kind == STATE_POOL:
            return rows.view(pages, -1)
        return rows[: pages * self.page_rows].view(pages, self.page_rows, *rows.shape[1:])


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
    storages has no owner.
    """
    kind = _kind_of(pool)
    if kind not in POOLS:
        raise UnsupportedError(f"KV pool {kind} is not served", remedy=f"pools that are: {', '.join(POOLS)}")
    if kind == SWA_POOL:
        parts = _split_windows(pool, page_size, window)
    elif kind == LINEAR_POOL:
        parts = _split_states(pool, page_size)
    else:
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        parts = (_make_part(KV, pool, page_size, layers),)
    num_pages = max(part.num_pages for part in parts)
    groups: list[GroupSpec] = []
    allocations: list[Allocation] = []
    placements: list[Placement] = []
    exclusions: list[Exclusion] = []
    tensors: dict[str, torch.Tensor] = {}
    for part in parts:
        buffers = part.list_buffers(page_size)
        _refuse_unplaced(vars(part.pool), part.kind, {buffer.rows.untyped_storage().data_ptr() for buffer in buffers})
        own_layers = {buffer.layer.name: buffer.layer for buffer in buffers}
        own_pages = part.num_pages if part.num_pages < num_pages else 0
        groups.append(
            GroupSpec(name=part.name, layers=tuple(own_layers.values()), block_size=page_size, num_blocks=own_pages)
        )
        placed = _place(part, buffers)
        allocations += placed[0]
        placements += placed[1]
        exclusions += placed[2]
        tensors |= {buffer.name: part.as_pages(buffer) for buffer in buffers}
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
        end_layer=1 + max(number for part in parts for number in part.layers),
    )


def _count_trailing(group: GroupSpec) -> int:
    if group.has_recurrent:
        return 1
    return -(-(group.window - 1) // group.block_size) if group.window else 0


def _kind_of(pool: Any) -> str:
    return f"{type(pool).__module__}.{type(pool).__qualname__}"


def _make_part(name: str, pool: Any, page_size: int, layers: Sequence[int], window: int = 0) -> _Part:
    kind = _kind_of(pool)
    _check_settings(pool, kind, page_size)
    return _Part(name=name, pool=pool, kind=kind, layers=layers, window=window)


def _split_windows(pool: Any, page_size: int, window: int) -> tuple[_Part, ...]:
    """Splits a pool for layers of both kinds."""
    _check_outer(pool, SWA_POOL, page_size, {"full_kv_pool": MHA_POOL, "swa_kv_pool": MHA_POOL})
    numbers: dict[str, list[tuple[int, int]]] = {KV: [], SWA: []}
    for number, (at, is_window) in pool.layers_mapping.items():
        numbers[SWA if is_window else KV].append((at, number))
    if sorted(pool.layers_mapping) != list(range(pool.layer_num)) or not all(numbers.values()) or window < 1:
        raise UnsupportedError(
            f"KV pool {SWA_POOL} has layers {sorted(pool.layers_mapping)}, a window of {window}: it is not served",
            remedy="models with windows have full attention too",
        )
    full, swa = ([number for _, number in sorted(numbers[name])] for name in (KV, SWA))
    return (
        _make_part(KV, pool.full_kv_pool, page_size, full),
        _make_part(SWA, pool.swa_kv_pool, page_size, swa, window),
    )


def _split_states(pool: Any, page_size: int) -> tuple[_Part, ...]:
    """Splits the pool of a model with attention and recurrent layers; the recurrent layers keep their states in a pool
    of their own."""
    _check_outer(pool, LINEAR_POOL, page_size, {"full_kv_pool": MHA_POOL, "mamba_pool": STATE_POOL})
    states, mapping = pool.mamba_pool, pool.full_attention_layer_id_mapping
    attention = sorted(mapping, key=mapping.__getitem__)
    layers = sorted((*attention, *states.mamba_layer_ids))
    found = _kind_of(states.mamba_cache)
    is_twofold = len(set(layers)) < len(layers)
    if is_twofold or not attention or pool.use_mla or found != STATES:
        raise UnsupportedError(
            f"KV pool {LINEAR_POOL} has layers {layers} and states {found}, which is not served",
            remedy="run this model without the linker",
        )
    for name in _OFF:
        if _is_on(states, name):
            raise UnsupportedError(f"pool {STATE_POOL} has {name}, which is not served", remedy="leave it off")
    return (
        _make_part(KV, pool.full_kv_pool, page_size, attention),
        _Part(name=MAMBA, pool=states, kind=STATE_POOL, layers=states.mamba_layer_ids),
    )


def _check_outer(pool: Any, kind: str, page_size: int, inner: Mapping[str, str]) -> None:
    """Checks which pools a pool of pools has. Its other tensors say where rows lie, or it is refused."""
    _check_settings(pool, kind, page_size)
    for name, wanted in inner.items():
        found = _kind_of(getattr(pool, name))
        if found != wanted:
            raise UnsupportedError(f"KV pool {found} in {kind} is not served", remedy=f"the one that is: {wanted}")
    _refuse_unplaced({name: value for name, value in vars(pool).items() if name not in inner}, kind, set())


def _check_settings(pool: Any, kind: str, page_size: int) -> None:
    wrong = [
        (pool.page_size != page_size, f"has pages of {pool.page_size} tokens, the cache {page_size}"),
        (getattr(pool, "kv_cache_layout", LAYOUT) != LAYOUT, f"has layout {getattr(pool, 'kv_cache_layout', '')}"),
        (_stored_dtype(pool) != pool.dtype, f"keeps {pool.dtype} as {_stored_dtype(pool)}"),
        (dtype_name(pool.dtype) not in DTYPES, f"keeps {pool.dtype}"),
        (getattr(pool, "layer_num", 1) < 1, "has no layers"),
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


def _state_buffers(part: _Part, page_size: int) -> Iterator[_Buffer]:
    """Returns a buffer of every kind for each layer: what its convolution saw last, and what it has gathered."""
    states = part.pool.mamba_cache
    kinds = {f"conv{at}": tensor for at, tensor in enumerate(states.conv)} | {"temporal": states.temporal}
    slots = part.num_pages
    for at, number in enumerate(part.layers):
        layer = recurrent_layer(
            f"layer {number}",
            block_size=page_size,
            states=[
                StateSpec(name, tuple(tensor.shape[2:]), dtype_name(tensor.dtype)) for name, tensor in kinds.items()
            ],
        )
        for name, tensor in kinds.items():
            if tuple(tensor.shape[:2]) != (len(part.layers), slots):
                raise StorageError(
                    f"pool {STATE_POOL}: {name} has shape {tuple(tensor.shape)}, expected {len(part.layers)} layers of "
                    f"{slots} slots",
                    remedy="report it with the model's name",
                )
            if not tensor.is_contiguous():
                raise UnsupportedError(
                    f"states {name} of {STATE_POOL} do not lie one behind the other, as on processors with AMX",
                    remedy="run this model without the linker",
                )
            yield _Buffer(layer=layer, part=f"state.{name}", rows=tensor[at])


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
    part: _Part, buffers: Sequence[_Buffer]
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
            pages = part.as_pages(buffer)
            offset = int(pages.storage_offset()) * pages.element_size()
            exclusions += _rounding(name, at, offset, f"rounding before {buffer.name}")
            names = ("block", "token", "head", "content") if pages.dim() > 2 else ("block", "content")
            dims = tensor_dims(names, shape=pages.shape, strides=pages.stride(), itemsize=pages.element_size())
            placements.append(
                place_dims(
                    buffer.layer,
                    allocation=name,
                    dims=dims,
                    num_blocks=part.num_pages,
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
    """Yields tensors in containers and in the engine's own objects, as deep as pools keep them."""
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
    """Returns the name that kvspec has for it."""
    return str(dtype).removeprefix("torch.")
