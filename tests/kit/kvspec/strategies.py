"""Random geometries that are right by construction, and small damage to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st

from kvoffload.errors import GeometryError
from kvoffload.kvspec import (
    Allocation,
    Exclusion,
    GroupSpec,
    KVGeometry,
    LayerSpec,
    Padding,
    Placement,
    ScalePlacement,
    StateSpec,
    attention_layer,
    place_dims,
    place_strided,
    recurrent_layer,
)
from kvoffload.kvspec.layout import LAYOUTS
from tests.kit.kvspec.layouts import layer_dims, layout_dims

BLOCK_TOKENS = 2


def at_least(examples: int) -> settings:
    """More examples than the profile says, unless the profile (a campaign) says more."""
    return settings(max_examples=max(examples, settings().max_examples))


@dataclass
class Builder:
    """Lays areas one after the other into an allocation; each area is fully declared."""

    draw: Callable[..., object]
    num_blocks: int
    size: int = 0
    names: int = 0
    allocation: str = "kv0"
    layers: list[LayerSpec] = field(default_factory=list)
    groups: list[GroupSpec] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    paddings: list[Padding] = field(default_factory=list)
    exclusions: list[Exclusion] = field(default_factory=list)
    overlays: list[tuple[str, ...]] = field(default_factory=list)

    def pick(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))  # type: ignore[call-overload]

    def flip(self) -> bool:
        return bool(self.draw(st.booleans()))

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def close_group(self) -> None:
        if self.layers:
            name = self.name("group")
            self.groups.append(GroupSpec(name=name, layers=tuple(self.layers), block_size=BLOCK_TOKENS))
            self.layers = []

    def close_allocation(self) -> None:
        if self.size:
            self.allocations.append(Allocation(name=self.allocation, size_bytes=self.size))
            self.allocation = f"kv{len(self.allocations)}"
            self.size = 0


def add_strided(b: Builder) -> None:
    """One layer after the other, with or without padding, some excluded, some shared."""
    b.close_group()
    for _ in range(b.pick(1, 3)):
        excluded = "rebuilt by the engine" if b.pick(0, 5) == 0 else ""
        layer = attention_layer(
            b.name("layer"),
            block_size=BLOCK_TOKENS,
            num_kv_heads=b.pick(1, 2),
            head_size=b.pick(1, 3),
            head_size_v=b.pick(1, 3),
            dtype="fp8_e4m3",
            excluded=excluded,
        )
        gap = b.pick(0, 3)
        stride = layer.page_bytes + gap
        b.layers.append(layer)
        b.placements.append(
            place_strided(layer, allocation=b.allocation, offset=b.size, block_stride=stride, slot_bytes=stride)
        )
        # The padding of the last block may be missing at the end of an area.
        b.size += b.num_blocks * stride
        if b.flip() and not excluded:
            b.layers.append(replace(layer, name=b.name("alias"), alias_of=layer.name))
    b.close_group()


def add_rows(b: Builder) -> None:
    """Adds rows with blocks outermost: every block is a row of several layers' pages, of different sizes, padded at its
    end."""
    b.close_group()
    pages, offset = [], 0
    for _ in range(b.pick(1, 3)):
        states = tuple(StateSpec(f"s{i}", (b.pick(1, 3),), "int8") for i in range(b.pick(1, 2)))
        layer = recurrent_layer(b.name("layer"), block_size=BLOCK_TOKENS, states=states)
        pages.append((layer, offset))
        offset += layer.page_bytes
    tail = b.pick(0, 2)
    stride = offset + tail
    for layer, start in pages:
        b.layers.append(layer)
        if b.flip():
            where = {"allocation": b.allocation, "offset": b.size + start, "block_stride": stride}
            b.placements.append(place_strided(layer, **where))  # type: ignore[arg-type]
        else:
            for state in layer.states:
                part = f"state.{state.name}"
                b.placements.append(
                    place_strided(layer, allocation=b.allocation, offset=b.size + start, block_stride=stride, part=part)
                )
                start += state.size_bytes  # noqa: PLW2901 - the next state follows
    name = b.name("group")
    b.groups.append(GroupSpec(name=name, layers=tuple(b.layers), block_size=BLOCK_TOKENS))
    b.layers = []
    if tail:
        owner = name if b.flip() else ""
        b.paddings.append(
            Padding(
                allocation=b.allocation,
                base=b.size + offset,
                length=tail,
                stride=stride,
                count=b.num_blocks,
                group=owner,
            )
        )
    b.size += b.num_blocks * stride


def add_layout(b: Builder) -> None:
    """Several equal layers in one of the engines' layouts, some with kernel blocks or with scales outside of the
    pages."""
    b.close_group()
    layout = LAYOUTS[str(b.draw(st.sampled_from(sorted(LAYOUTS))))]
    split = b.pick(1, 2) if layout.is_page_contiguous or "kv" in layout.order else 1
    num_layers = b.pick(1, 2) if not (split > 1 and layout.is_block_outermost) else 1
    has_scales = b.flip()
    heads, head_size = b.pick(1, 2), b.pick(1, 2)
    has_kv = "kv" in layout.order
    sizes = {
        "layer": num_layers,
        "block": b.num_blocks * split,
        "kv": 2,
        "head": heads,
        "token": BLOCK_TOKENS // split,
        "content": head_size if has_kv else 2 * head_size,
    }
    dims = layout_dims(layout, sizes=sizes)
    base = b.size
    for index in range(num_layers):
        layer = attention_layer(
            b.name("layer"),
            block_size=BLOCK_TOKENS,
            num_kv_heads=heads,
            head_size=head_size,
            dtype="int8_per_token_head" if has_scales else "fp8_e4m3",
            scales=ScalePlacement.BESIDE if has_scales else None,
        )
        b.layers.append(layer)
        offset, inner = layer_dims(dims, index)
        b.placements.append(
            place_dims(layer, allocation=b.allocation, dims=inner, num_blocks=b.num_blocks, offset=base + offset)
        )
        b.size += b.num_blocks * layer.page_bytes
    for layer in b.layers if has_scales else ():
        b.placements.append(
            place_strided(layer, allocation=b.allocation, offset=b.size, block_stride=layer.scale_bytes, part="scales")
        )
        b.size += b.num_blocks * layer.scale_bytes
    b.close_group()


def add_overlay(b: Builder) -> None:
    """Groups of different page sizes on the same slots, each with its own padding."""
    b.close_group()
    slot = b.pick(3, 9)
    names = []
    for _ in range(b.pick(2, 3)):
        size = b.pick(1, slot)
        layer = recurrent_layer(b.name("layer"), block_size=BLOCK_TOKENS, states=(StateSpec("s", (size,), "int8"),))
        # The rest of a slot is declared with the page or as the group's padding.
        whole = slot if b.flip() else size
        b.placements.append(
            place_strided(layer, allocation=b.allocation, offset=b.size, block_stride=slot, slot_bytes=whole)
        )
        b.layers.append(layer)
        b.close_group()
        names.append(b.groups[-1].name)
        if whole < slot:
            b.paddings.append(
                Padding(
                    allocation=b.allocation,
                    base=b.size + size,
                    length=slot - size,
                    stride=slot,
                    count=b.num_blocks,
                    group=names[-1],
                )
            )
    b.overlays.append(tuple(names))
    b.size += b.num_blocks * slot


def add_gap(b: Builder) -> None:
    """Bytes that are no pages: an exclusion, or padding, once or repeated."""
    length, count = b.pick(1, 3), b.pick(1, 3)
    stride = length + (b.pick(0, 1) if count == 1 else 0)
    where = {"allocation": b.allocation, "base": b.size, "length": length, "stride": stride, "count": count}
    if b.flip():
        b.exclusions.append(Exclusion(name=b.name("exclusion"), **where))  # type: ignore[arg-type]
    else:
        b.paddings.append(Padding(**where))  # type: ignore[arg-type]
    b.size += length * count


AREAS = (add_strided, add_rows, add_layout, add_overlay, add_gap)


@st.composite
def geometries(draw: Callable[..., object]) -> KVGeometry:
    """A geometry that is complete: no hole, no overlap that is not declared."""
    b = Builder(draw, num_blocks=int(draw(st.integers(1, 4))))  # type: ignore[call-overload]
    for area in draw(st.lists(st.sampled_from(AREAS), min_size=1, max_size=4)):  # type: ignore[attr-defined]
        area(b)
        if b.pick(0, 4) == 0:
            b.close_allocation()
    if not b.groups:
        add_strided(b)
    b.close_allocation()
    if b.pick(0, 3) == 0:
        b.allocations[-1], b.paddings, b.placements = _cut_tail(b)
    return KVGeometry(
        num_blocks=b.num_blocks,
        hash_block_size=BLOCK_TOKENS,
        groups=tuple(b.groups),
        allocations=tuple(b.allocations),
        placements=tuple(draw(st.permutations(b.placements))),  # type: ignore[call-overload]
        paddings=tuple(b.paddings),
        exclusions=tuple(b.exclusions),
        overlays=tuple(b.overlays),
    )


def _cut_tail(b: Builder) -> tuple[Allocation, list[Padding], list[Placement]]:
    """The allocation without the last block's padding, which an engine may leave out."""
    allocation = b.allocations[-1]
    used = [
        run.base + (b.num_blocks - 1) * run.stride + run.length
        for placement in b.placements
        for run in placement.runs
        if run.allocation == allocation.name
    ]
    used += [e.base + (e.count - 1) * e.stride + e.length for e in b.exclusions if e.allocation == allocation.name]
    whole = [p.base + (p.count - 2) * p.stride + p.length for p in b.paddings if p.allocation == allocation.name]
    whole += [p.base + 1 for p in b.paddings if p.allocation == allocation.name and p.count == 1]
    size = max([*used, *whole, 1])
    return replace(allocation, size_bytes=min(size, allocation.size_bytes)), b.paddings, b.placements


@st.composite
def damaged(draw: Callable[..., object]) -> KVGeometry | GeometryError:
    """A geometry with one thing changed, or the error with which it refuses to exist. It may still be right."""
    geometry: KVGeometry = draw(geometries())  # type: ignore[assignment]
    change = draw(st.sampled_from(("shift", "stride", "size", "padding", "exclusion", "overlay", "twice", "length")))
    index = int(draw(st.integers(0, 1000)))  # type: ignore[call-overload]
    amount = int(draw(st.integers(-3, 3)))  # type: ignore[call-overload]
    try:
        return _damage(geometry, str(change), index, amount)
    except GeometryError as error:
        return error


def _damage(geometry: KVGeometry, change: str, index: int, amount: int) -> KVGeometry:
    placements, which = list(geometry.placements), index % len(geometry.placements)
    victim = placements[which]
    run = index % len(victim.runs)
    if change in ("shift", "stride"):
        old = victim.runs[run]
        key = "base" if change == "shift" else "stride"
        new = old._replace(**{key: getattr(old, key) + amount})
        placements[which] = replace(victim, runs=(*victim.runs[:run], new, *victim.runs[run + 1 :]))
        return replace(geometry, placements=tuple(placements))
    if change == "length":
        placements[which] = replace(
            victim, padding=tuple(p._replace(length=max(1, p.length + amount)) for p in victim.padding)
        )
        return replace(geometry, placements=tuple(placements))
    if change == "padding":
        placements = [replace(p, padding=()) if i == which else p for i, p in enumerate(placements)]
        keep = tuple(p for i, p in enumerate(geometry.paddings) if i != index % max(1, len(geometry.paddings)))
        return replace(geometry, placements=tuple(placements), paddings=keep)
    if change == "size":
        last = geometry.allocations[-1]
        cut = replace(last, size_bytes=last.size_bytes + amount)
        return replace(geometry, allocations=(*geometry.allocations[:-1], cut))
    if change == "exclusion":
        return replace(geometry, exclusions=geometry.exclusions[:-1])
    if change == "overlay":
        return replace(geometry, overlays=())
    extra = Exclusion(name="extra", allocation=geometry.allocations[0].name, base=index % 7, length=1)
    return replace(geometry, exclusions=(*geometry.exclusions, extra))
