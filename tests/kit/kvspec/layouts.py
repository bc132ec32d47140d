"""Dimensions of tensors that tests and benchmarks make in a layout. An engine's tensors declare theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvoffload.errors import GeometryError, StrideError
from kvoffload.kvspec import Dim, Layout
from kvoffload.kvspec.layout import LAYER
from kvoffload.kvspec.placement import BYTE


def layout_dims(
    layout: Layout, *, sizes: Mapping[str, int], itemsize: int = 1, strides: Mapping[str, int] | None = None
) -> tuple[Dim, ...]:
    """The dimensions of a tensor in this layout, strides in bytes, densely packed but for the given `strides`.

    `sizes` has every dimension of the layout but `layer`, which is 1 if absent. A given stride (an engine's declared
    layer or block stride) is never smaller than what it has to step over.
    """
    missing = [name for name in layout.order if name not in sizes and name != LAYER]
    if missing:
        raise GeometryError(f"layout {layout.name}: no size for {missing[0]}", remedy="give every dimension's size")
    given = strides or {}
    dims = [Dim(BYTE, itemsize, 1)]
    step = itemsize
    for name in reversed(layout.order):
        size = sizes.get(name, 1)
        stride = given.get(name, step)
        if stride < step and size > 1:
            raise StrideError(
                f"layout {layout.name}: dimension {name} has a stride of {stride} bytes, its contents take {step}",
                remedy="the declared stride belongs to another layout or another page size",
                layout=layout.name,
            )
        dims.append(Dim(name, size, stride))
        step = max(stride, step) * size
    return tuple(reversed(dims))


def layer_dims(dims: Sequence[Dim], layer_index: int) -> tuple[int, tuple[Dim, ...]]:
    """One layer out of dimensions that have a `layer`: (offset of the layer in bytes, the other dimensions)."""
    layers = [dim for dim in dims if dim.name == LAYER]
    if len(layers) != 1 or not 0 <= layer_index < layers[0].size:
        raise GeometryError(
            f"layer {layer_index} of {layers[0].size if layers else 0}",
            remedy="give the layer's position in its tensor",
        )
    return layer_index * layers[0].stride, tuple(dim for dim in dims if dim.name != LAYER)
