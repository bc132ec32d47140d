"""Geometries and tensors that several test files use, and a slow reading of them that shares no code with kvspec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvoffload.kvspec import (
    LAYOUTS,
    Allocation,
    GroupSpec,
    KVGeometry,
    LayerSpec,
    Placement,
    StateSpec,
    attention_layer,
    place_dims,
    place_strided,
    recurrent_layer,
)
from tests.kit.kvspec.layouts import layer_dims, layout_dims

QWEN_SLOT = 327_680
QWEN_STATE = 268_288


def attention(name: str, **changes: object) -> LayerSpec:
    """A small full-attention layer: 2 tokens per block, 2 heads of 4 bfloat16, 64 bytes per page."""
    given = {"block_size": 2, "num_kv_heads": 2, "head_size": 4, "dtype": "bfloat16"}
    return attention_layer(name, **{**given, **changes})  # type: ignore[arg-type]


def one_group(*layers: LayerSpec, name: str = "full") -> GroupSpec:
    return GroupSpec(name=name, layers=layers, block_size=layers[0].block_size)


def dense(num_blocks: int = 3, *, num_layers: int = 2, **changes: object) -> KVGeometry:
    """One group, layer after layer, 64 bytes per page."""
    layers = [attention(f"layers.{index}") for index in range(num_layers)]
    region = num_blocks * layers[0].page_bytes
    given = {
        "num_blocks": num_blocks,
        "hash_block_size": 2,
        "groups": (one_group(*layers),),
        "allocations": (Allocation(name="kv", size_bytes=num_layers * region),),
        "placements": tuple(
            place_strided(layer, allocation="kv", block_stride=layer.page_bytes, layer_stride=region, layer_index=index)
            for index, layer in enumerate(layers)
        ),
        "layout": "LBHNC",
    }
    return KVGeometry(**{**given, **changes})  # type: ignore[arg-type]


def in_layout(name: str, *, num_layers: int, num_blocks: int) -> KVGeometry:
    """One group of equal layers (8 heads of 128 bfloat16, 16 tokens) in one of the engines' layouts."""
    layers = [
        attention_layer(f"layers.{index}", block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
        for index in range(num_layers)
    ]
    has_kv = "kv" in LAYOUTS[name].order
    sizes = {
        "layer": num_layers,
        "block": num_blocks,
        "kv": 2,
        "head": 8,
        "token": 16,
        "content": 128 if has_kv else 256,
    }
    dims = layout_dims(LAYOUTS[name], sizes=sizes, itemsize=2)
    placements = []
    for index, layer in enumerate(layers):
        offset, inner = layer_dims(dims, index)
        placements.append(place_dims(layer, allocation="kv", dims=inner, num_blocks=num_blocks, offset=offset))
    return KVGeometry(
        num_blocks=num_blocks,
        hash_block_size=16,
        groups=(one_group(*layers),),
        allocations=(Allocation(name="kv", size_bytes=num_layers * num_blocks * layers[0].page_bytes),),
        placements=tuple(placements),
        layout=name,
    )


def qwen3next(num_blocks: int) -> KVGeometry:
    """The geometry that vLLM 0.32 gives a small Qwen3-Next: three GDN groups and a full one, all on the same bytes."""
    states = (StateSpec("conv", (3, 1024), "bfloat16"), StateSpec("ssm", (4, 128, 128), "float32"))
    recurrent = [recurrent_layer(f"layers.{index}.linear_attn", block_size=640, states=states) for index in range(3)]
    full = attention_layer("layers.3.self_attn", block_size=640, num_kv_heads=2, head_size=64, dtype="bfloat16")
    groups = tuple(one_group(layer, name=f"group {index}") for index, layer in enumerate([*recurrent, full]))
    return KVGeometry(
        num_blocks=num_blocks,
        hash_block_size=640,
        groups=groups,
        allocations=(Allocation(name="kv", size_bytes=num_blocks * QWEN_SLOT),),
        placements=tuple(
            place_strided(layer, allocation="kv", block_stride=QWEN_SLOT, slot_bytes=QWEN_SLOT)
            for layer in (*recurrent, full)
        ),
        overlays=(tuple(group.name for group in groups),),
        layout="LBHNC",
        null_block=0,
    )


@dataclass
class Tensors:
    """Real tensors for a geometry: one storage per allocation, one view per placement."""

    memory: dict[str, torch.Tensor]
    views: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor]


def allocate(geometry: KVGeometry, device: str = "cpu") -> Tensors:
    memory = {
        allocation.name: torch.zeros(allocation.size_bytes, dtype=torch.uint8, device=device)
        for allocation in geometry.allocations
    }
    tensors = Tensors(memory, {}, {})
    for placement in geometry.placements:
        into = tensors.scales if placement.part.endswith("scales") else tensors.views
        into[placement.tensor] = view_of(geometry, placement, memory)
    return tensors


def view_of(geometry: KVGeometry, placement: Placement, memory: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that the placement declares, as bytes."""
    if placement.dims:
        shape, strides = [dim.size for dim in placement.dims], [dim.stride for dim in placement.dims]
    else:
        (run,) = placement.runs
        shape = [geometry.num_blocks * placement.kernel_blocks, run.length // placement.kernel_blocks]
        strides = [run.stride // placement.kernel_blocks, 1]
    return torch.as_strided(memory[placement.allocation], shape, strides, placement.offset)


@dataclass(frozen=True)
class Owner:
    """The claim on one byte: its kind, group and block."""

    kind: str
    label: str
    group: str
    block: int


def list_owners(geometry: KVGeometry) -> dict[str, list[list[Owner]]]:
    """For every byte of every allocation, everyone who claims it. Slow and obvious."""
    owners: dict[str, list[list[Owner]]] = {a.name: [[] for _ in range(a.size_bytes)] for a in geometry.allocations}

    def claim(allocation: str, start: int, length: int, owner: Owner) -> None:
        for address in range(start, start + length):
            if address < len(owners[allocation]):
                owners[allocation][address].append(owner)

    group_of = {layer.name: group.name for group in geometry.groups for layer in group.layers}
    layers = {layer.name: layer for group in geometry.groups for layer in group.layers}
    for placement in geometry.placements:
        group = group_of[placement.layer]
        kind = "excluded layer" if layers[placement.layer].excluded else "page"
        for block in range(geometry.num_blocks):
            for run in placement.runs:
                owner = Owner(kind, placement.layer, group, block)
                claim(run.allocation, run.base + block * run.stride, run.length, owner)
            for run in placement.padding:
                owner = Owner("padding", placement.layer, group, block)
                claim(run.allocation, run.base + block * run.stride, run.length, owner)
    for padding in geometry.paddings:
        for block in range(padding.count):
            owner = Owner("padding", "", padding.group, block)
            claim(padding.allocation, padding.base + block * padding.stride, padding.length, owner)
    for exclusion in geometry.exclusions:
        for block in range(exclusion.count):
            owner = Owner("exclusion", exclusion.name, "", block)
            claim(exclusion.allocation, exclusion.base + block * exclusion.stride, exclusion.length, owner)
    return owners


def can_share(geometry: KVGeometry, one: Owner, other: Owner) -> bool:
    if not one.group or not other.group or one.group == other.group:
        return False
    if not any(one.group in overlay and other.group in overlay for overlay in geometry.overlays):
        return False
    return one.block == other.block or "padding" in (one.kind, other.kind)
