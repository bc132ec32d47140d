"""The engine's KV memory: where a layout puts the pages, the views that the model uses, and the same told to kvspec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvoffload import kvspec
from kvoffload.cache import GroupRule
from kvoffload.kvspec import GroupSpec, LayerKind, LayerSpec, Placement, Run, ScalePlacement, StateSpec
from mini_engine.model import FULL, LINEAR, WINDOW, AttentionPages, LayerPages, ModelConfig, StatePages

ALIGNMENT = 64
LAYOUTS = [name for name in kvspec.LAYOUTS if name != "BHLNC"]
"""BHLNC has one head of all layers side by side, so all layers have the same number of heads. Ours may differ."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    blocks: int = 64
    """For each group. Groups that overlay each other have one pool of this many times their number."""
    block_tokens: int = 8
    state_block_tokens: int = 8
    kernel_split: int = 1
    layout: str = "BLOCK_KV_NHD"
    is_overlaid: bool = False
    quant: str = "none"

    def __post_init__(self) -> None:
        if self.blocks < 2:
            raise ValueError(f"{self.blocks} blocks are too few: one to restore, one to compute in")
        if self.kernel_split < 1 or self.block_tokens % self.kernel_split:
            raise ValueError(f"{self.block_tokens} tokens per block are not {self.kernel_split} equal kernel blocks")


class KVCache:
    """The only holder of the KV memory, and its description. Dropping it frees the memory."""

    def __init__(self, model: ModelConfig, config: CacheConfig, device: torch.device) -> None:
        self._model, self._config, self._layout = model, config, kvspec.find_layout(config.layout)
        # A layer's pages are then further apart than they are long.
        self._has_slots = config.is_overlaid or self._layout.is_block_outermost
        # States are first in memory, where their float32 numbers are aligned.
        kinds = [kind for kind in (LINEAR, FULL, WINDOW) if kind in model.layers]
        layers = [self._describe_layer(index, kind) for index, kind in enumerate(model.layers)]
        members = {kind: tuple(layer for layer in layers if layer.kind == kind) for kind in kinds}
        self.groups = tuple(GroupSpec(name=kind, layers=m, block_size=m[0].block_size) for kind, m in members.items())
        self.rules = [GroupRule(block_size=g.block_size, reuse=g.reuse_rule, window=g.window) for g in self.groups]
        self.prefix_group = kinds.index(FULL) if FULL in kinds else -1
        self.group_of_layer = [kinds.index(kind) for kind in model.layers]
        self.num_blocks = config.blocks * (len(kinds) if config.is_overlaid else 1)
        self.chunk_tokens = max(group.block_size for group in self.groups)
        slots, kv_bytes = self._place_slots()
        sizes = {"kv": kv_bytes, "scales": self.num_blocks * sum(layer.scale_bytes for layer in layers)}
        self.allocations = {name: torch.zeros(n, dtype=torch.uint8, device=device) for name, n in sizes.items() if n}
        self.tensors: dict[str, Tensor] = {}
        self.scale_views: dict[str, Tensor] = {}
        self._placements: list[Placement] = []
        self.pages = [self._view_layer(layer, slots[layer.name]) for layer in layers]
        self.geometry = kvspec.KVGeometry(
            num_blocks=self.num_blocks,
            hash_block_size=config.block_tokens,
            groups=self.groups,
            allocations=tuple(kvspec.Allocation(name=name, size_bytes=sizes[name]) for name in self.allocations),
            placements=tuple(self._placements),
            overlays=(tuple(kinds),) if config.is_overlaid else (),
            layout=config.layout,
        )

    def _describe_layer(self, index: int, kind: LayerKind) -> LayerSpec:
        model, config, name = self._model, self._config, f"{index}.{kind}"
        if kind == LINEAR:
            state = StateSpec("delta", (model.state_heads, model.head_size, model.head_size), "float32")
            history = StateSpec("convolution", (model.convolution - 1, model.channels), "bfloat16")
            return kvspec.recurrent_layer(name, block_size=config.state_block_tokens, states=[state, history])
        explicit = "auto" if config.quant == "none" else config.quant
        dtype = kvspec.resolve_kv_dtype(explicit, model_dtype="bfloat16", layer=name)
        return kvspec.attention_layer(
            name,
            block_size=config.block_tokens,
            num_kv_heads=model.kv_heads_of(index),
            head_size=model.head_size,
            dtype=dtype.name,
            scales=ScalePlacement.BESIDE if dtype.quantisation.is_per_token_head else ScalePlacement.NONE,
            kind=kind,
            window=model.window if kind == WINDOW else 0,
        )

    def _place_slots(self) -> tuple[dict[str, Run], int]:
        """The slot of each layer, and the bytes of all. Overlaid: the i-th layers of all groups share one."""
        groups, is_outermost = [group.layers for group in self.groups], self._layout.is_block_outermost
        sharing = [[layer] for layers in groups for layer in layers]
        if self._config.is_overlaid:
            sharing = [[g[i] for g in groups if i < len(g)] for i in range(max(map(len, groups)))]
        sizes = [max(layer.page_bytes for layer in members) for members in sharing]
        for i, members in enumerate(sharing):
            sizes[i] += -sizes[i] % ALIGNMENT if self._has_slots or members[0].states else 0
        slots, offset = {}, 0
        for size, members in zip(sizes, sharing, strict=True):
            slot = Run("kv", offset, sum(sizes) if is_outermost else size, size)
            slots.update({layer.name: slot for layer in members})
            offset += size if is_outermost else size * self.num_blocks
        return slots, sum(sizes) * self.num_blocks

    def _view_layer(self, layer: LayerSpec, slot: Run) -> LayerPages:
        split, size = self._config.kernel_split, self._model.head_size
        if layer.states:
            return self._view_states(layer, slot)
        if not layer.scale_bytes:
            return AttentionPages(self._view_heads(layer, slot, torch.bfloat16, size), None, split)
        offset = sum(view.nbytes for view in self.scale_views.values())
        beside = Run("scales", offset, layer.scale_bytes, layer.scale_bytes)
        scales = self._view_heads(layer, beside, torch.float32, 1).squeeze(-1)
        return AttentionPages(self._view_heads(layer, slot, torch.int8, size), scales, split)

    def _view_heads(self, layer: LayerSpec, slot: Run, dtype: torch.dtype, size: int) -> Tensor:
        """`size` numbers per token, head and key or value: a tensor in the engine's layout, seen as the model does."""
        part, offset, stride, slot_bytes = slot
        names, split = [name for name in self._layout.order if name != "layer"], self._config.kernel_split
        token, content = self._config.block_tokens // split, size if "kv" in names else 2 * size
        sizes = {"block": self.num_blocks * split, "kv": 2, "token": token, "head": -1, "content": content}
        memory = self.allocations[part][offset : offset + self.num_blocks * layer.bytes_of(part)]
        tensor = memory.view(dtype).view([sizes[name] for name in names])
        if self._has_slots:
            # (2, blocks, ...) too: a block's keys and values must lie in its own slot, not in those of two others.
            tensor = kvspec.restride_block_major(
                tensor, block_dim=names.index("block"), page_stride_bytes=stride, kernel_blocks=split
            )
        dims = kvspec.tensor_dims(names, shape=tensor.shape, strides=tensor.stride(), itemsize=dtype.itemsize)
        room = slot_bytes if self._has_slots else None
        placement = kvspec.place_dims(
            layer, allocation=part, dims=dims, num_blocks=self.num_blocks, offset=offset, slot_bytes=room, part=part
        )
        self._placements.append(placement)
        (self.scale_views if part == "scales" else self.tensors)[placement.tensor] = tensor
        if "kv" not in names:
            tensor, names = torch.unflatten(tensor, -1, (2, size)), [*names[:-1], "kv", "content"]
        return tensor.permute([names.index(name) for name in ("block", "kv", "token", "head", "content")])

    def _view_states(self, layer: LayerSpec, slot: Run) -> StatePages:
        """A page of bytes with states of different dtypes one after the other."""
        part, offset, stride, size = slot
        pages = self.allocations[part].as_strided((self.num_blocks, layer.page_bytes), (stride, 1), offset)
        self.tensors[layer.name] = pages
        placement = kvspec.place_strided(layer, allocation=part, offset=offset, block_stride=stride, slot_bytes=size)
        self._placements.append(placement)
        parts = zip(layer.states, torch.split(pages, [state.size_bytes for state in layer.states], dim=1), strict=True)
        views = [torch.unflatten(part.view(getattr(torch, spec.dtype)), 1, spec.shape) for spec, part in parts]
        return StatePages(views[0], views[1], layer.block_size)
