"""The whole description: what contradicts itself does not exist, and what it says for the identity."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from kvoffload.errors import (
    BlockAlignmentError,
    BlockCountError,
    GeometryError,
    StorageError,
    StrideError,
    UnknownLayerError,
)
from kvoffload.keys.canonical import encode_canonical
from kvoffload.kvspec import (
    Allocation,
    Exclusion,
    KVGeometry,
    Padding,
    ScaleView,
    StateSpec,
    place_strided,
    recurrent_layer,
)
from kvoffload.kvspec.geometry import iter_claimed_layers
from tests.kit.kvspec.builders import attention, dense, in_layout, one_group, qwen3next

GOOD = dense(3, num_layers=2)
FIRST, SECOND = GOOD.placements


def group_with(*extra: object) -> dict[str, object]:
    return {"groups": (one_group(*GOOD.groups[0].layers, *extra),)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_blocks": 0}, BlockCountError, "num_blocks is 0"),
        ({"num_blocks": 4}, StorageError, "4 blocks need 448 bytes of allocation kv, which has 384"),
        ({"hash_block_size": 0}, BlockAlignmentError, "hash_block_size is 0"),
        ({"allocations": (Allocation(name="kv", size_bytes=383),)}, StorageError, "need 384 bytes"),
        ({"allocations": (Allocation(name="other", size_bytes=384),)}, GeometryError, "names allocation kv, which"),
        ({"allocations": GOOD.allocations * 2}, GeometryError, "allocation kv is declared twice"),
        ({"groups": GOOD.groups * 2}, GeometryError, "group full is declared twice"),
        (
            {"groups": (*GOOD.groups, one_group(attention("layers.0"), name="g"))},
            GeometryError,
            "layer layers.0 is decl",
        ),
        ({"placements": (FIRST, FIRST)}, GeometryError, "part layer layers.0, part kv is declared twice"),
        ({"placements": (FIRST,)}, UnknownLayerError, "layer layers.1 is described but has no memory"),
        (
            {"placements": (FIRST, SECOND, place_strided(attention("stray"), allocation="kv", block_stride=64))},
            UnknownLayerError,
            "a placement names layer stray, which nothing describes",
        ),
        (
            {"placements": (FIRST, replace(SECOND, runs=(SECOND.runs[0]._replace(length=60),)))},
            GeometryError,
            "60 bytes per block are placed, 64 are declared",
        ),
        (
            {"placements": (FIRST, place_strided(GOOD.layers["layers.1"], allocation="kv", block_stride=32, part="k"))},
            GeometryError,
            r"layer layers.1: 32 of 64 bytes per block are placed \(parts k\)",
        ),
        (
            {"placements": (FIRST, replace(SECOND, padding=(SECOND.runs[0]._replace(allocation="b"),)))},
            GeometryError,
            "names allocation b, which nothing describes",
        ),
        (group_with(attention("a", alias_of="b")), UnknownLayerError, "layer a is an alias of b, which has no pages"),
        (
            group_with(attention("a", alias_of="layers.0"), attention("b", alias_of="a")),
            UnknownLayerError,
            "layer b is an alias of a",
        ),
        (group_with(attention("a", alias_of="layers.0", head_size=8)), GeometryError, "or with other page bytes"),
        (
            {"groups": (*GOOD.groups, one_group(attention("a", alias_of="layers.0"), name="g"))},
            GeometryError,
            "in another group",
        ),
        (
            {
                **group_with(attention("a", alias_of="layers.0")),
                "placements": (FIRST, SECOND, replace(FIRST, layer="a")),
            },
            GeometryError,
            "has a placement of its own",
        ),
        ({"paddings": (Padding(allocation="x", base=0, length=1),)}, GeometryError, "padding names allocation x"),
        ({"paddings": (Padding(allocation="kv", base=0, length=1, group="x"),)}, GeometryError, "names group x"),
        (
            {"paddings": (Padding(allocation="kv", base=0, length=200, stride=200, count=3),)},
            StorageError,
            "padding: 2 blocks need 400 bytes",
        ),
        (
            {"exclusions": (Exclusion(name="w", allocation="kv", base=380, length=8),)},
            StorageError,
            "exclusion w: 1 blocks need 388",
        ),
        (
            {"groups": (replace(GOOD.groups[0], num_blocks=GOOD.num_blocks + 1),)},
            BlockCountError,
            "the geometry says",
        ),
        ({"groups": (replace(GOOD.groups[0], num_blocks=-1),)}, BlockCountError, "its pool has -1 blocks"),
        ({"overlays": (("full", "x"),)}, GeometryError, "an overlay names group x"),
        ({"overlays": (("full",), ("full",))}, GeometryError, "group full is in two overlays"),
        ({"scale_views": (ScaleView(name="k", layer="x"),)}, UnknownLayerError, "scale view k names layer x"),
        ({"scale_views": (ScaleView(name="k", layer="layers.0"),)}, GeometryError, r"layers\.0 has scales none"),
    ],
)
def test_a_contradiction_is_refused_with_a_remedy(
    changes: dict[str, object], error: type[GeometryError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        replace(GOOD, **changes)  # type: ignore[arg-type]
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_a_run_of_a_placement_lies_in_one_allocation() -> None:
    keys = place_strided(GOOD.layers["layers.1"], allocation="kv", offset=192, block_stride=32, part="k")
    both = replace(keys, part="kv", runs=(keys.runs[0], keys.runs[0]._replace(allocation="b")))
    with pytest.raises(GeometryError, match="lies in kv and b"):
        replace(
            GOOD,
            allocations=(*GOOD.allocations, Allocation(name="b", size_bytes=384)),
            placements=(FIRST, both),
        )


def test_a_stride_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(StrideError, match="blocks of 64 bytes are 63 bytes apart"):
        replace(FIRST, runs=(FIRST.runs[0]._replace(stride=63),))


def test_excluded_layers_need_no_memory() -> None:
    geometry = replace(GOOD, **group_with(attention("draft", excluded="on the host")))  # type: ignore[arg-type]
    assert [layer.name for layer, _ in iter_claimed_layers(geometry)] == ["layers.0", "layers.1"]


def test_a_geometry_is_a_value() -> None:
    assert dense(3) == dense(3)
    assert dense(3) != dense(4)
    with pytest.raises(FrozenInstanceError):
        GOOD.num_blocks = 5  # type: ignore[misc]


def test_parts_are_in_record_order_whatever_the_engine_lists_first() -> None:
    states = (StateSpec("ssm", (4,), "float32"), StateSpec("conv", (3,), "bfloat16"))
    layer = recurrent_layer("l", block_size=2, states=states)
    placed = [
        place_strided(layer, allocation="kv", offset=0, block_stride=6, part="state.conv"),
        place_strided(layer, allocation="kv", offset=12, block_stride=16, part="state.ssm"),
    ]
    geometry = dense(2, groups=(one_group(layer),), placements=tuple(placed))
    assert [part.part for part in geometry.placements_of["l"]] == ["state.ssm", "state.conv"]
    assert geometry.group_of == {"l": 0}


def test_the_identity_does_not_depend_on_the_amount_of_memory() -> None:
    """A restart with other settings has other addresses and strides, and the same records."""
    assert dense(2).describe() == dense(64).describe()
    assert qwen3next(2).describe() == qwen3next(100).describe()


@pytest.mark.parametrize(
    "other",
    [
        dense(3, num_layers=1),
        dense(3, layout="BLHNC"),
        dense(3, hash_block_size=1),
        replace(GOOD, placements=(FIRST, replace(SECOND, order=(("kernel", 2), ("byte", 32))))),
        replace(GOOD, groups=(one_group(*GOOD.groups[0].layers, name="other"),)),
        replace(GOOD, groups=(one_group(GOOD.layers["layers.0"], replace(GOOD.layers["layers.1"], dtype="float16")),)),
        replace(GOOD, groups=(one_group(*reversed(GOOD.groups[0].layers)),)),
    ],
)
def test_the_identity_depends_on_what_a_record_means(other: KVGeometry) -> None:
    assert encode_canonical(other.describe()) != encode_canonical(GOOD.describe())


def test_the_order_of_heads_and_tokens_is_part_of_the_identity() -> None:
    nhd = replace(in_layout("LBNHC", num_layers=1, num_blocks=2), layout="")
    hnd = replace(in_layout("LBHNC", num_layers=1, num_blocks=2), layout="")
    assert nhd.describe() != hnd.describe()


def test_the_description_is_plain() -> None:
    described = qwen3next(2).describe()
    assert json.loads(json.dumps(described)) == described
    assert encode_canonical(described)
    layer = described["groups"][0]["layers"][0]
    assert layer["states"] == [["conv", [3, 1024], "bfloat16"], ["ssm", [4, 128, 128], "float32"]]
    assert layer["parts"] == [["state", 268288, [["byte", 268288]]]]
