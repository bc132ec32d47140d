"""One layer of an engine's KV cache: what it is, and how many bytes one block of it has; `placement` says where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from kvoffload.errors import DtypeError, GeometryError
from kvoffload.kvspec.dtype import STATE_BYTES, Quantisation, canonical_dtype, find_kv_dtype
from kvoffload.types import ReuseRule

SCALE_BYTES = 4
"""A per-token-head scale is one fp32."""

PART_KINDS = ("kv", "k", "v", "state", "scales", "k_scales", "v_scales")
"""The kinds of part that a placement can hold, in the order of a record. `state.<name>` is one of several states."""


class LayerKind(StrEnum):
    """Decides what of a layer may be reused; the bytes are moved alike."""

    FULL_ATTENTION = "full_attention"
    MLA = "mla"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    RECURRENT = "recurrent"
    SCRATCH = "scratch"
    """Memory in which an engine works on one request; never stored."""

    @property
    def is_recurrent(self) -> bool:
        return self is LayerKind.RECURRENT

    @property
    def reuse_rule(self) -> ReuseRule:
        return _RULES[self]

    @property
    def has_window(self) -> bool:
        return self.reuse_rule.has_window


_RULES = {
    LayerKind.FULL_ATTENTION: ReuseRule.PREFIX,
    LayerKind.MLA: ReuseRule.PREFIX,
    LayerKind.SLIDING_WINDOW: ReuseRule.WINDOW,
    LayerKind.CHUNKED_LOCAL: ReuseRule.CHUNK,
    LayerKind.RECURRENT: ReuseRule.EXACT_BOUNDARY,
    LayerKind.SCRATCH: ReuseRule.NOTHING,
}


class ScalePlacement(StrEnum):
    """Where per-token-head scales are."""

    NONE = "none"
    INLINE = "inline"
    BESIDE = "beside"


@dataclass(frozen=True)
class StateSpec:
    """One tensor of a recurrent layer's state, for one block."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        if not self.shape or any(size < 1 for size in self.shape):
            raise GeometryError(f"state {self.name}: shape {self.shape}", remedy="every size is at least 1")
        if self.dtype not in STATE_BYTES:
            raise DtypeError(
                f"state {self.name}: dtype {self.dtype!r} is not allowed", remedy=f"use one of {', '.join(STATE_BYTES)}"
            )

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * STATE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """`page_bytes` is the content of one block: inline scales included, padding not. Constructors below compute it.

    `alias_of` names the layer whose pages this one uses (cross-layer sharing): it has none of its own. `excluded`
    says why a layer is not transferred; its bytes are still accounted for.
    """

    name: str
    kind: LayerKind
    block_size: int
    page_bytes: int
    dtype: str
    quantisation: Quantisation = Quantisation.NONE
    scales: ScalePlacement = ScalePlacement.NONE
    scale_bytes: int = 0
    part_sizes: tuple[tuple[str, int], ...] = ()
    """Bytes of the parts of a page that an engine may keep apart: keys, values, their scales, single states."""
    window: int = 0
    states: tuple[StateSpec, ...] = ()
    alias_of: str | None = None
    excluded: str = ""

    def __post_init__(self) -> None:
        faults = [
            (not self.name, "has no name"),
            (self.block_size < 1, f"block_size is {self.block_size}, must be at least 1 token"),
            (self.page_bytes < 1, f"page_bytes is {self.page_bytes}, must be at least 1"),
            (self.scale_bytes < 0, f"scale_bytes is {self.scale_bytes}"),
            (
                (self.scales is ScalePlacement.BESIDE) != (self.scale_bytes > 0),
                f"scale_bytes is {self.scale_bytes} with scales {self.scales}: only scales beside the pages have bytes",
            ),
            (
                self.quantisation.is_per_token_head and self.scales is ScalePlacement.NONE,
                f"{self.quantisation} has no place for its scales: they must be inline or beside",
            ),
            (self.kind.has_window != (self.window > 0) and not self._may_have_window, f"window is {self.window}"),
            (self.alias_of == self.name, "is an alias of itself"),
            (self.kind is LayerKind.SCRATCH and not self.excluded, "its content is of no use to other requests"),
        ]
        for is_fault, text in faults:
            if is_fault:
                raise GeometryError(f"layer {self.name!r}: {text}", remedy="correct its LayerSpec", layer=self.name)

    @property
    def _may_have_window(self) -> bool:
        # Engines without a hybrid allocator keep all blocks of a windowed layer: full attention that knows a window.
        return self.kind is LayerKind.FULL_ATTENTION and self.window > 0

    @property
    def is_stored(self) -> bool:
        """Records have bytes of this layer."""
        return self.alias_of is None and not self.excluded

    @property
    def record_bytes(self) -> int:
        """This layer's part of its group's record."""
        return self.page_bytes + self.scale_bytes if self.is_stored else 0

    @property
    def main_part(self) -> str:
        return "state" if self.kind.is_recurrent else "kv"

    def bytes_of(self, part: str) -> int:
        """Bytes of one block in a part. GeometryError for a part whose size this layer does not declare."""
        if part == self.main_part:
            return self.page_bytes
        if part == "scales" and self.scale_bytes:
            return self.scale_bytes
        sizes = dict(self.part_sizes)
        if part not in sizes:
            known = ", ".join((self.main_part, *sizes))
            raise GeometryError(
                f"layer {self.name}: part {part!r} has no declared size",
                remedy=f"its parts are {known}",
                layer=self.name,
            )
        return sizes[part]

    def part_order(self, part: str) -> tuple[int, int]:
        """Where a part stands in the layer's record, whatever order an engine lists them in."""
        kind, _, name = part.partition(".")
        states = [state.name for state in self.states]
        if kind not in PART_KINDS or (name and name not in states):
            raise GeometryError(
                f"layer {self.name}: part {part!r} is unknown",
                remedy=f"parts are {', '.join(PART_KINDS)} and state.<name> for a declared state",
                layer=self.name,
            )
        return PART_KINDS.index(kind), states.index(name) if name else 0


def is_scale_part(part: str) -> bool:
    return part.endswith("scales")


def attention_layer(
    name: str,
    *,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: str,
    head_size_v: int | None = None,
    scales: ScalePlacement | None = None,
    kind: LayerKind = LayerKind.FULL_ATTENTION,
    window: int = 0,
    alias_of: str | None = None,
    excluded: str = "",
) -> LayerSpec:
    """Attention with keys and values per head. Per-token-head scales are inside the pages unless `scales` is
    ScalePlacement.BESIDE."""
    row = find_kv_dtype(dtype, where=name)
    if row.bits == 0:
        raise DtypeError(
            f"layer {name}: page bytes of {row.name} cannot be computed from head sizes",
            remedy="use opaque_layer with the engine's own page bytes",
            layer=name,
        )
    if scales is None:
        scales = ScalePlacement.INLINE if row.quantisation.is_per_token_head else ScalePlacement.NONE
    slots = block_size * num_kv_heads
    inline = SCALE_BYTES if scales is ScalePlacement.INLINE else 0
    key, value = (
        slots * (_packed_bytes(size, row.bits, name) + inline)
        for size in (head_size, head_size if head_size_v is None else head_size_v)
    )
    sizes = [("k", key), ("v", value)]
    if scales is ScalePlacement.BESIDE:
        sizes += [("k_scales", slots * SCALE_BYTES), ("v_scales", slots * SCALE_BYTES)]
    return LayerSpec(
        name=name,
        kind=kind,
        block_size=block_size,
        page_bytes=key + value,
        dtype=row.name,
        quantisation=row.quantisation,
        scales=scales,
        scale_bytes=2 * slots * SCALE_BYTES if scales is ScalePlacement.BESIDE else 0,
        part_sizes=tuple(sizes),
        window=window,
        alias_of=alias_of,
        excluded=excluded,
    )


def mla_layer(
    name: str, *, block_size: int, latent_size: int, dtype: str, alias_of: str | None = None, excluded: str = ""
) -> LayerSpec:
    """One latent vector per token (kv_lora_rank + rope), with one inline scale under per-token-head quantisation."""
    row = find_kv_dtype(dtype, where=name)
    if row.bits == 0:
        raise DtypeError(
            f"layer {name}: page bytes of {row.name} cannot be computed from its latent size",
            remedy="use opaque_layer with the engine's own page bytes",
            layer=name,
        )
    inline = SCALE_BYTES if row.quantisation.is_per_token_head else 0
    return LayerSpec(
        name=name,
        kind=LayerKind.MLA,
        block_size=block_size,
        page_bytes=block_size * (_packed_bytes(latent_size, row.bits, name) + inline),
        dtype=row.name,
        quantisation=row.quantisation,
        scales=ScalePlacement.INLINE if inline else ScalePlacement.NONE,
        alias_of=alias_of,
        excluded=excluded,
    )


def recurrent_layer(name: str, *, block_size: int, states: Sequence[StateSpec], excluded: str = "") -> LayerSpec:
    """Mamba, GDN, short convolution: several tensors per block, one after the other, with their own dtypes."""
    if not states:
        raise GeometryError(f"layer {name!r}: a recurrent layer without states", remedy="declare its state tensors")
    return LayerSpec(
        name=name,
        kind=LayerKind.RECURRENT,
        block_size=block_size,
        page_bytes=sum(state.size_bytes for state in states),
        dtype="+".join(dict.fromkeys(state.dtype for state in states)),
        part_sizes=tuple((f"state.{state.name}", state.size_bytes) for state in states),
        states=tuple(states),
        excluded=excluded,
    )


def opaque_layer(
    name: str,
    *,
    block_size: int,
    page_bytes: int,
    dtype: str,
    kind: LayerKind = LayerKind.FULL_ATTENTION,
    window: int = 0,
    excluded: str = "",
) -> LayerSpec:
    """A format whose bytes only the engine understands (nvfp4, fp8_ds_mla): its size is what the engine says."""
    return LayerSpec(
        name=name,
        kind=kind,
        block_size=block_size,
        page_bytes=page_bytes,
        dtype=canonical_dtype(dtype),
        quantisation=Quantisation.OPAQUE,
        window=window,
        excluded=excluded,
    )


def _packed_bytes(elements: int, bits: int, layer: str) -> int:
    if elements < 1 or elements * bits % 8:
        raise GeometryError(
            f"layer {layer}: {elements} elements of {bits} bits are not whole bytes",
            remedy="give a positive size, even for 4-bit formats",
            layer=layer,
        )
    return elements * bits // 8
