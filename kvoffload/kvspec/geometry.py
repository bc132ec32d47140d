"""The whole description of an engine's KV cache on one rank: a validated value, made once per registration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvoffload.errors import BlockAlignmentError, BlockCountError, GeometryError, StorageError, UnknownLayerError
from kvoffload.kvspec.blocks import check_num_blocks
from kvoffload.kvspec.group import GroupSpec
from kvoffload.kvspec.placement import BLOCK, Allocation, Placement, Run
from kvoffload.kvspec.ranges import ByteRange, Exclusion, Padding
from kvoffload.kvspec.spec import LayerSpec, ScalePlacement
from kvoffload.kvspec.units import UNITS_VERSION, HeadUnits, UnitPages, cut_placement

DESCRIPTION_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ScaleView:
    """A tensor over scales that lie inside a layer's pages, as the engine's kernels use it.

    Its bytes are already part of the page; it is declared so that it can be checked and released with the page.
    """

    name: str
    layer: str
    dims: tuple[str, ...] = ("block", "token", "head")


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """Groups, memory and where each lies in the other. `num_blocks` is the engine's configured count, nothing else;
    a group with a pool of its own may have fewer.

    `overlays`: groups that may lie on the same bytes, because a block id belongs to one of them at a time.
    `null_block`: a block id that the engine uses for "no block"; it is never moved. `units`: records are of units of
    heads, so that engines of other tensor-parallel sizes can read them.
    """

    num_blocks: int
    hash_block_size: int
    groups: tuple[GroupSpec, ...]
    allocations: tuple[Allocation, ...]
    placements: tuple[Placement, ...]
    paddings: tuple[Padding, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    overlays: tuple[tuple[str, ...], ...] = ()
    scale_views: tuple[ScaleView, ...] = ()
    layout: str = ""
    null_block: int | None = None
    units: HeadUnits | None = None

    def __post_init__(self) -> None:
        check_num_blocks(self.num_blocks)
        if self.hash_block_size < 1:
            raise BlockAlignmentError(
                f"hash_block_size is {self.hash_block_size}", remedy="give the tokens per block hash"
            )
        for kind, names in self._names().items():
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise GeometryError(f"{kind} {twice[0]} is declared twice", remedy="give each a name of its own")
        self._check_counts()
        self._check_layers()
        self._check_memory()
        self._check_overlays()
        _ = self.cuts  # refuses what cannot be cut into units

    @cached_property
    def layers(self) -> dict[str, LayerSpec]:
        """Every layer by name, in the order of groups and records."""
        return {layer.name: layer for group in self.groups for layer in group.layers}

    @cached_property
    def group_of(self) -> dict[str, int]:
        """Position of a layer's group."""
        return {layer.name: index for index, group in enumerate(self.groups) for layer in group.layers}

    @cached_property
    def placements_of(self) -> dict[str, tuple[Placement, ...]]:
        """A layer's placements in the order of its record."""
        found: dict[str, list[Placement]] = {name: [] for name in self.layers}
        for placement in self.placements:
            found[placement.layer].append(placement)
        for name, parts in found.items():
            order = self.layers[name].part_order
            parts.sort(key=lambda placement: order(placement.part))
        return {name: tuple(parts) for name, parts in found.items()}

    @cached_property
    def cuts(self) -> dict[str, UnitPages]:
        """Each unit's part of a placement, by the placement's label. Empty if records are not divided into units."""
        if self.units is None:
            return {}
        return {
            placement.label: cut_placement(self.layers[placement.layer], placement, self.units)
            for placement in self.placements
            if self.layers[placement.layer].is_stored
        }

    def count_blocks(self, layer: str) -> int:
        """Returns the number of blocks of this layer's group."""
        return self.groups[self.group_of[layer]].num_blocks or self.num_blocks

    @property
    def records_per_block(self) -> int:
        """Records that this rank makes of a block of a group: one for each of its units."""
        return 1 if self.units is None else self.units.local

    def record_bytes(self, group: GroupSpec) -> int:
        """Returns the bytes of one record of this group."""
        return group.record_bytes // self.records_per_block

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each allocation."""
        return {allocation.name: allocation.size_bytes for allocation in self.allocations}

    def describe(self) -> dict[str, Any]:
        """Describes the content of a record for the identity's fingerprint, in text, integers, lists and dicts only.

        Left out on purpose: the number of blocks, addresses, strides and paddings. An engine that restarts with more
        memory has other ones of these, and the same records.
        """
        described: dict[str, Any] = {
            "version": DESCRIPTION_VERSION,
            "layout": self.layout,
            "hash_block_size": self.hash_block_size,
            "groups": [
                {
                    "name": group.name,
                    "block_size": group.block_size,
                    "reuse": group.reuse_rule.label,
                    "window": group.window,
                    "record_bytes": self.record_bytes(group),
                    "layers": [self._describe_layer(layer) for layer in group.layers],
                }
                for group in self.groups
            ],
        }
        if self.units is not None:
            # Sizes of one rank are described as sizes of one unit: engines of all parallel sizes describe the same.
            described["units"] = [UNITS_VERSION, self.units.heads, self.units.count]
        return described

    def _describe_layer(self, layer: LayerSpec) -> dict[str, Any]:
        return {
            "name": layer.name,
            "kind": str(layer.kind),
            "dtype": layer.dtype,
            "quantisation": str(layer.quantisation),
            "scales": str(layer.scales),
            # Layers that are not stored are not divided into units, and engines may keep different amounts of them.
            "page_bytes": layer.page_bytes // self.records_per_block if not self._is_left_out(layer) else 0,
            "scale_bytes": layer.scale_bytes,
            "window": layer.window,
            "states": [[state.name, list(state.shape), state.dtype] for state in layer.states],
            "alias_of": layer.alias_of or "",
            # Not the reason: a reworded one must not empty a cache.
            "excluded": int(bool(layer.excluded)),
            "parts": [
                self._describe_part(placement)
                for placement in self.placements_of[layer.name]
                if not self._is_left_out(layer)
            ],
        }

    def _is_left_out(self, layer: LayerSpec) -> bool:
        return self.units is not None and bool(layer.excluded)

    def _describe_part(self, placement: Placement) -> list[Any]:
        what: Placement | UnitPages = self.cuts.get(placement.label, placement)
        return [placement.part, what.bytes_per_block, [[name, size] for name, size in what.order]]

    def _names(self) -> dict[str, list[str]]:
        return {
            "group": [group.name for group in self.groups],
            "layer": [layer.name for group in self.groups for layer in group.layers],
            "allocation": [allocation.name for allocation in self.allocations],
            "part": [placement.label for placement in self.placements],
            "exclusion": [exclusion.name for exclusion in self.exclusions],
            "scale view": [view.name for view in self.scale_views],
        }

    def _check_counts(self) -> None:
        for group in self.groups:
            if not 0 <= group.num_blocks <= self.num_blocks:
                raise BlockCountError(
                    f"group {group.name}: its pool has {group.num_blocks} blocks, the geometry says {self.num_blocks}",
                    remedy="the geometry's count is that of the largest pool",
                    group=group.name,
                )

    def _check_layers(self) -> None:
        for placement in self.placements:
            _require(placement.layer, self.layers, what="a placement", kind="layer")
        for view in self.scale_views:
            _require(view.layer, self.layers, what=f"scale view {view.name}", kind="layer")
            if self.layers[view.layer].scales is not ScalePlacement.INLINE or view.dims.count(BLOCK) != 1:
                raise GeometryError(
                    f"scale view {view.name}: layer {view.layer} has scales {self.layers[view.layer].scales}, "
                    f"the view dimensions {', '.join(view.dims)}",
                    remedy="declare views over inline scales only, with one dimension named block",
                )
        for layer in self.layers.values():
            if layer.alias_of is not None:
                self._check_alias(layer)
            elif self.placements_of[layer.name]:
                _check_parts(layer, self.placements_of[layer.name])
            elif layer.is_stored:
                raise UnknownLayerError(
                    f"layer {layer.name} is described but has no memory",
                    remedy="place it, declare it an alias of the layer it shares with, or exclude it by name",
                    layer=layer.name,
                )

    def _check_alias(self, layer: LayerSpec) -> None:
        target = self.layers.get(layer.alias_of or "")
        if target is None or target.alias_of is not None:
            raise UnknownLayerError(
                f"layer {layer.name} is an alias of {layer.alias_of}, which has no pages of its own",
                remedy="name the layer that owns the pages",
                layer=layer.name,
            )
        if self.group_of[layer.name] != self.group_of[target.name] or layer.page_bytes != target.page_bytes:
            raise GeometryError(
                f"layer {layer.name} is an alias of {target.name}, but in another group or with other page bytes",
                remedy="layers that share pages share a block table and a page format",
                layer=layer.name,
            )
        if self.placements_of[layer.name]:
            raise GeometryError(
                f"layer {layer.name} is an alias of {target.name} and has a placement of its own",
                remedy="place the layer that owns the pages only",
                layer=layer.name,
            )

    def _check_memory(self) -> None:
        for placement in self.placements:
            for run in (*placement.runs, *placement.padding):
                _require(run.allocation, self.sizes, what=placement.label, kind="allocation")
                if run.allocation != placement.allocation:
                    raise GeometryError(
                        f"{placement.label} lies in {placement.allocation} and {run.allocation}",
                        remedy="make it one part per allocation",
                    )
            for run in placement.runs:
                self._check_end(placement.label, run, count=self.count_blocks(placement.layer))
            for run in placement.padding:
                count = self.count_blocks(placement.layer) - 1
                self._check_end(f"padding of {placement.label}", run, count=count)
        for padding in self.paddings:
            self._check_range(padding, whole=padding.count - 1)
        for exclusion in self.exclusions:
            self._check_range(exclusion, whole=exclusion.count)

    def _check_range(self, claim: ByteRange, *, whole: int) -> None:
        _require(claim.allocation, self.sizes, what=claim.label, kind="allocation")
        self._check_end(claim.label, Run(claim.allocation, claim.base, claim.stride, claim.length), count=whole)

    def _check_end(self, what: str, run: Run, *, count: int) -> None:
        """The `count` first blocks of a run lie inside its allocation."""
        end = run.base + (count - 1) * run.stride + run.length
        if count > 0 and end > self.sizes[run.allocation]:
            raise StorageError(
                f"{what}: {count} blocks need {end} bytes of allocation {run.allocation}, "
                f"which has {self.sizes[run.allocation]}",
                remedy="check num_blocks, strides and offsets against the engine's configuration",
                allocation=run.allocation,
                num_blocks=count,
            )

    def _check_overlays(self) -> None:
        groups = {group.name for group in self.groups}
        for padding in self.paddings:
            if padding.group:
                _require(padding.group, groups, what=padding.label, kind="group")
        overlaid = [name for overlay in self.overlays for name in overlay]
        for name in overlaid:
            _require(name, groups, what="an overlay", kind="group")
        twice = [name for name, count in Counter(overlaid).items() if count > 1]
        if twice:
            raise GeometryError(
                f"group {twice[0]} is in two overlays", remedy="put all groups that share bytes into one"
            )


def iter_claimed_layers(geometry: KVGeometry) -> Iterator[tuple[LayerSpec, Placement]]:
    """Layers that own memory, with their placements, in record order."""
    for layer in geometry.layers.values():
        for placement in geometry.placements_of[layer.name]:
            yield layer, placement


def _check_parts(layer: LayerSpec, placements: Sequence[Placement]) -> None:
    for placement in placements:
        if placement.bytes_per_block != layer.bytes_of(placement.part):
            raise GeometryError(
                f"{placement.label}: {placement.bytes_per_block} bytes per block are placed, "
                f"{layer.bytes_of(placement.part)} are declared",
                remedy="place exactly the unpadded bytes of the part",
                layer=layer.name,
            )
    placed = sum(placement.bytes_per_block for placement in placements)
    if placed != layer.page_bytes + layer.scale_bytes:
        raise GeometryError(
            f"layer {layer.name}: {placed} of {layer.page_bytes + layer.scale_bytes} bytes per block are placed "
            f"(parts {', '.join(placement.part for placement in placements)})",
            remedy="place keys, values, states and scales each exactly once",
            layer=layer.name,
        )


def _require(name: str, known: Collection[str], *, what: str, kind: str) -> None:
    if name not in known:
        error = UnknownLayerError if kind == "layer" else GeometryError
        raise error(
            f"{what} names {kind} {name}, which nothing describes",
            remedy=f"describe the {kind} or correct the name",
            name=name,
        )
