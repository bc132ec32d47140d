"""Values of every message, made from its declaration alone: random ones, and one that is always the same."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from hypothesis import strategies as st

from kvoffload.protocol.fields import Blob, Choice, FieldKind, Several, Text, Truth, Whole
from kvoffload.protocol.message import Message
from kvoffload.protocol.shape import Shape

MOST_ITEMS = 3
"""Most items of random lists and blobs; limits have tests of their own."""
_LINE = st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Cs"])


def draw_record(shape: Shape) -> st.SearchStrategy[Any]:
    """Any value of a message or row, within its limits."""

    @st.composite
    def build(draw: st.DrawFn) -> Any:
        found: dict[str, Any] = {}
        for field in shape.fields:
            if field.count is None:
                found[field.name] = draw(draw_value(field.kind))
                continue
            assert isinstance(field.kind, Blob)
            times = (
                draw(st.integers(0, 2)) if field.count.or_multiple else 1 - draw(st.booleans()) * field.count.or_none
            )
            other = next(other.kind for other in shape.fields if other.name == field.count.of)
            count = times * len(found[field.count.of]) // other.item_bytes
            size = count * field.kind.item_bytes
            found[field.name] = draw(st.binary(min_size=size, max_size=size))
        return shape.record(**found)

    return build()


def draw_value(kind: FieldKind) -> st.SearchStrategy[Any]:
    match kind:
        case Whole():
            return st.integers(kind.minimum, kind.maximum)
        case Truth():
            return st.booleans()
        case Text():
            return st.text(_LINE, max_size=kind.limit // 4)
        case Blob():
            counts = st.integers(kind.minimum, min(kind.limit, MOST_ITEMS))
            sizes = counts.map(lambda count: count * kind.item_bytes)
            return sizes.flatmap(lambda size: st.binary(min_size=size, max_size=size))
        case Choice():
            return st.sampled_from(list(kind.names))
        case Several():
            return st.lists(draw_value(kind.item), max_size=min(MOST_ITEMS, kind.limit)).map(tuple)
        case Shape():
            return draw_record(kind)
    raise AssertionError(f"no values for {kind}")


def draw_message(messages: tuple[type[Message], ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(messages).flatmap(lambda kind: draw_record(Shape(kind)))


def make_example(shape: Shape, *, version: int, prefix: str = "") -> Any:
    """Makes the same value in every run; fields that came after `version` have their defaults."""
    fields = [field for field in shape.fields if field.since <= version]
    return shape.record(**{field.name: _example(field.kind, prefix + field.name, version) for field in fields})


def _example(kind: FieldKind, name: str, version: int) -> Any:
    seed = crc32(name.encode())
    match kind:
        case Whole():
            return kind.minimum + seed * 0x9E3779B97F4A7C15 % (kind.maximum - kind.minimum + 1)
        case Truth():
            return True
        case Text():
            return f"{name} \u00e9"
        case Blob():
            return bytes((seed + at) % 256 for at in range(min(2, kind.limit) * kind.item_bytes))
        case Choice():
            return list(kind.names)[seed % len(kind.names)]
        case Several():
            return tuple(_example(kind.item, f"{name} {at}", version) for at in range(min(2, kind.limit)))
        case Shape():
            return make_example(kind, version=version, prefix=f"{name} ")
    raise AssertionError(f"no example for {kind}")
