"""Layers that share one block table, and what may be reused of them. Their page sizes may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvoffload.errors import BlockCountError, GeometryError, UnknownLayerError
from kvoffload.kvspec.spec import LayerSpec
from kvoffload.types import ReuseRule


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """`block_size` is in tokens and the same for every layer: they share a block table.

    `num_blocks`: of a group whose pool has fewer blocks than the geometry says; 0: it has as many.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    block_size: int
    num_blocks: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.block_size < 1:
            raise BlockCountError(
                f"group {self.name}: block_size is {self.block_size}",
                remedy="give the group's tokens per block",
                group=self.name,
            )
        if not self.name or not self.layers:
            raise GeometryError(f"group {self.name!r} has no name or no layer", remedy="leave empty groups out")
        seen: set[str] = set()
        for layer in self.layers:
            if layer.name in seen:
                raise GeometryError(
                    f"group {self.name}: layer {layer.name} is listed twice", remedy="list it once", group=self.name
                )
            seen.add(layer.name)
            if layer.block_size != self.block_size:
                raise GeometryError(
                    f"group {self.name}: layer {layer.name} has blocks of {layer.block_size} tokens, "
                    f"the group of {self.block_size}",
                    remedy="layers of one group share a block table: put the layer into a group of its own",
                    group=self.name,
                    layer=layer.name,
                )
        self._check_kinds()

    @classmethod
    def from_names(
        cls, name: str, *, layer_names: Sequence[str], specs: Mapping[str, LayerSpec], block_size: int
    ) -> GroupSpec:
        """A group as engines give it: names, and specs in a mapping."""
        missing = [layer for layer in layer_names if layer not in specs]
        if missing:
            raise UnknownLayerError(
                f"group {name}: layer {missing[0]} has no spec ({len(missing)} of {len(layer_names)} have none)",
                remedy="describe every layer of a group, excluded ones too",
                group=name,
                layer=missing[0],
            )
        return cls(name=name, layers=tuple(specs[layer] for layer in layer_names), block_size=block_size)

    @property
    def record_bytes(self) -> int:
        """Unpadded bytes of one block over all stored layers: one record."""
        return sum(layer.record_bytes for layer in self.layers)

    @property
    def is_stored(self) -> bool:
        return any(layer.is_stored for layer in self.layers)

    @property
    def has_recurrent(self) -> bool:
        return any(layer.kind.is_recurrent for layer in self.layers)

    @property
    def reuse_rule(self) -> ReuseRule:
        """The strictest of its layers' rules; an alias layer reads its target's pages under its own kind."""
        rules = {layer.kind.reuse_rule for layer in self.layers if not layer.excluded}
        if not self.is_stored:
            return ReuseRule.NOTHING
        # One block table serves all its layers, so with one layer that needs every block, every block is needed.
        return ReuseRule.PREFIX if ReuseRule.PREFIX in rules else next(iter(rules))

    @property
    def window(self) -> int:
        """Tokens that a boundary needs behind it under a rule with a window; 0 under the other rules."""
        if not self.reuse_rule.has_window:
            return 0
        return max(layer.window for layer in self.layers if not layer.excluded)

    def _check_kinds(self) -> None:
        rules = {layer.kind.reuse_rule for layer in self.layers if not layer.excluded}
        if len(rules - {ReuseRule.PREFIX}) > 1 or (ReuseRule.EXACT_BOUNDARY in rules and len(rules) > 1):
            kinds = sorted({str(layer.kind) for layer in self.layers if not layer.excluded})
            raise GeometryError(
                f"group {self.name}: {' and '.join(kinds)} layers cannot share a block table",
                remedy="give each of these kinds a group of its own",
                group=self.name,
            )
        if len({layer.window for layer in self.layers if layer.kind.reuse_rule.is_chunked}) > 1:
            raise GeometryError(
                f"group {self.name}: chunked layers of different chunk sizes cannot share a block table",
                remedy="give each chunk size a group of its own",
                group=self.name,
            )
