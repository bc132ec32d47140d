"""Units of KV heads: what engines of every tensor-parallel size cut a model's cache into alike.

A unit is a head, or a few neighbours of a model with many. Its record holds, layer by layer, all bytes of these heads,
in the order in which they lie in a page. Which units there are depends on the model alone; a rank holds some that
follow each other. What cannot be cut that way is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from kvoffload.errors import UnsupportedError
from kvoffload.kvspec.dtype import Quantisation
from kvoffload.kvspec.layout import HEAD
from kvoffload.kvspec.placement import BLOCK, Dim, Placement, Run, find_runs
from kvoffload.kvspec.spec import LayerSpec, ScalePlacement

MAX_UNITS = 16
"""An entry has so many shards at most."""
MIN_RUN_BYTES = 128
"""Pieces of a page that are shorter are not worth copying one by one."""
UNITS_VERSION = 1
_CAN_BE_CUT = (Quantisation.NONE, Quantisation.FP8_PER_TENSOR)


@dataclass(frozen=True, kw_only=True)
class HeadUnits:
    """The units of a model with so many KV heads in a layer, and how `ranks` tensor-parallel ranks hold them.

    A latent counts as one head. UnsupportedError: a rank would hold a part of a unit.
    """

    heads: int
    ranks: int = 1

    def __post_init__(self) -> None:
        has_whole_units = self.count % self.ranks == 0
        if not has_whole_units and not (self.heads_per_unit == 1 and self.ranks % self.count == 0):
            raise UnsupportedError(
                f"{self.ranks} tensor-parallel ranks hold parts of the {self.count} units of {self.heads} KV heads",
                remedy=f"use a tensor-parallel size that divides {self.count}, or turn shared_shapes off",
            )

    @property
    def count(self) -> int:
        """Units of an entry."""
        return self.heads if self.heads <= MAX_UNITS else gcd(self.heads, MAX_UNITS)

    @property
    def heads_per_unit(self) -> int:
        return self.heads // self.count

    @property
    def local(self) -> int:
        """Units that a rank holds."""
        return max(self.count // self.ranks, 1)

    @property
    def replicas(self) -> int:
        """Ranks in a row that hold the same units."""
        return max(self.ranks // self.count, 1)

    def of_rank(self, rank: int) -> range:
        """The units that a tensor-parallel rank holds."""
        first = rank // self.replicas * self.local
        return range(first, first + self.local)


@dataclass(frozen=True)
class UnitPages:
    """A placement, cut into a rank's units: each one's runs, and how a unit's numbers follow each other in memory."""

    runs: tuple[tuple[Run, ...], ...]
    order: tuple[tuple[str, int], ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one unit in a block. All units have as many."""
        return sum(run.length for run in self.runs[0])


def cut_placement(layer: LayerSpec, placement: Placement, units: HeadUnits) -> UnitPages:
    """UnsupportedError: whose heads cannot be told apart, or lie in pieces that are too small."""
    _refuse_formats(layer)
    inner = _list_inner_dims(placement)
    heads = [dim for dim in inner if dim.name == HEAD]
    held = units.local * units.heads_per_unit
    if len(heads) != 1 or heads[0].size != held:
        found = f"{heads[0].size} KV heads" if len(heads) == 1 else "no heads that its declaration tells apart"
        raise _refuse(layer, f"has {found} here, and the model's {units.heads} give a rank {held}")
    (head,) = heads
    one = [dim._replace(size=units.heads_per_unit) if dim is head else dim for dim in inner]
    shifts, length, order = find_runs(one, label=placement.label)
    if length < MIN_RUN_BYTES:
        raise _refuse(layer, f"keeps a unit of heads in pieces of {length} bytes, fewer than {MIN_RUN_BYTES}")
    stride = placement.runs[0].stride
    step = units.heads_per_unit * head.stride
    return UnitPages(
        tuple(
            tuple(Run(placement.allocation, placement.offset + unit * step + at, stride, length) for at in shifts)
            for unit in range(units.local)
        ),
        order,
    )


def _list_inner_dims(placement: Placement) -> Sequence[Dim]:
    """The dimensions of one block; none where they were not declared."""
    inner = [dim for dim in placement.dims if dim.name != BLOCK]
    if placement.kernel_blocks > 1:
        inner += [Dim("kernel", placement.kernel_blocks, dim.stride) for dim in placement.dims if dim.name == BLOCK]
    return inner


def _refuse_formats(layer: LayerSpec) -> None:
    if layer.kind.is_recurrent:
        raise _refuse(layer, "keeps a recurrent state, which is not made of KV heads")
    if layer.quantisation.is_per_token_head or layer.scales is not ScalePlacement.NONE:
        raise _refuse(layer, f"has a scale for each token and head ({layer.quantisation})")
    if layer.quantisation not in _CAN_BE_CUT:
        raise _refuse(layer, f"has a packed format ({layer.dtype}) that only the engine can take apart")


def _refuse(layer: LayerSpec, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"layer {layer.name} {why}: it cannot be shared with engines of other tensor-parallel sizes",
        remedy="turn shared_shapes off for this model",
        layer=layer.name,
    )
