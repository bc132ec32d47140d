"""Units of heads: the same records from engines of every tensor-parallel size, and a name for what has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import UnsupportedError
from kvoffload.kvspec import (
    LAYOUTS,
    MAX_UNITS,
    Allocation,
    HeadUnits,
    KVGeometry,
    LayerKind,
    PageMap,
    ScalePlacement,
    attention_layer,
    build_page_map,
    mla_layer,
    opaque_layer,
    place_dims,
    place_strided,
    prove_complete,
    tensor_dims,
)
from tests.kit.kvspec.builders import attention, dense, one_group, qwen3next
from tests.kit.transfer.plain_copy import PlainCopy

HEAD_SIZE = 128


# ---- which units there are ----


@pytest.mark.parametrize(
    ("heads", "count"), [(1, 1), (2, 2), (8, 8), (10, 10), (16, 16), (20, 4), (24, 8), (32, 16), (40, 8), (96, 16)]
)
def test_units_depend_on_the_models_heads_alone(heads: int, count: int) -> None:
    sizes = [ranks for ranks in (1, 2, 4, 8, 16) if count % ranks == 0]
    for ranks in sizes:
        units = HeadUnits(heads=heads, ranks=ranks)
        assert (units.count, units.heads_per_unit * units.count) == (count, heads)
        held = [units.of_rank(rank) for rank in range(ranks)]
        assert [unit for of_rank in held for unit in of_rank] == list(range(count))
        assert {len(of_rank) for of_rank in held} == {units.local}
    assert count <= MAX_UNITS


def test_ranks_that_share_a_head_hold_one_unit() -> None:
    """Neighbouring ranks have the same head, as vLLM gives heads out."""
    units = HeadUnits(heads=2, ranks=8)
    assert [list(units.of_rank(rank)) for rank in range(8)] == [[0]] * 4 + [[1]] * 4
    assert (units.replicas, units.local) == (4, 1)
    latent = HeadUnits(heads=1, ranks=4)
    assert [list(latent.of_rank(rank)) for rank in range(4)] == [[0]] * 4


@pytest.mark.parametrize(("heads", "ranks", "count"), [(8, 3, 8), (32, 32, 16), (20, 10, 4), (4, 6, 4)])
def test_a_rank_with_a_part_of_a_unit_is_refused(heads: int, ranks: int, count: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{ranks} .*ranks hold parts of the {count} units of {heads} KV heads"):
        HeadUnits(heads=heads, ranks=ranks)


# ---- records ----


@dataclass(frozen=True)
class Shape:
    """The KV that a model keeps, whatever engine runs it."""

    layout: str
    heads: int
    layers: int = 2
    blocks: int = 3
    tokens: int = 4
    split: int = 1
    """Blocks of the kernels in one block."""

    @property
    def has_kv(self) -> bool:
        return "kv" in LAYOUTS[self.layout].order

    @property
    def page_order(self) -> list[str]:
        """The dimensions of a page, outermost first."""
        return [name for name in LAYOUTS[self.layout].order if name not in ("layer", "block")]

    def draw(self) -> torch.Tensor:
        """All numbers, as (layer, block, head, token, kv, content)."""
        content = HEAD_SIZE if self.has_kv else 2 * HEAD_SIZE
        shape = (self.layers, self.blocks * self.split, self.heads, self.tokens // self.split, 1 + self.has_kv, content)
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(1))

    def record(self, numbers: torch.Tensor, block: int, heads: Sequence[int]) -> bytes:
        """Builds the record that a unit must have, by plain indexing."""
        names = ["kernel", "head", "token", "kv", "content"]
        order = [name for name in self.page_order if self.has_kv or name != "kv"]
        # Entries of the block dimension are further apart than what lies in one of them, unless keys and values are.
        inner = sorted(["kernel", *order], key=lambda name: self._depth(name, order))
        parts = []
        for layer in numbers[:, block * self.split : (block + 1) * self.split][:, :, list(heads)]:
            parts.append(layer.permute([names.index(n) for n in (inner if self.has_kv else [*inner, "kv"])]))
        return b"".join(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts)

    def _depth(self, name: str, order: list[str]) -> int:
        whole = [n for n in LAYOUTS[self.layout].order if n in ("block", *order)]
        return whole.index("block" if name == "kernel" else name)


@dataclass(frozen=True)
class Rank:
    """One rank's memory, and what is made of it."""

    page_map: PageMap
    geometry: KVGeometry
    copy: PlainCopy
    memory: torch.Tensor

    def records(self, block: int) -> list[bytes]:
        """Of this rank's units, in their order."""
        found = []
        for number, pages in enumerate(self.page_map.groups):
            rows = torch.zeros(1, pages.record_bytes, dtype=torch.uint8)
            self.copy.save(number, [block], rows)
            found.append(rows.numpy().tobytes())
        return found

    def load(self, block: int, records: Sequence[bytes]) -> None:
        for number, record in enumerate(records):
            self.copy.load(number, [block], torch.frombuffer(bytearray(record), dtype=torch.uint8).view(1, -1))


def lay_out(shape: Shape, numbers: torch.Tensor, units: HeadUnits, heads: Sequence[int]) -> Rank:
    """A rank with these heads of all numbers, in memory as torch lays them out."""
    named = ["layer", "block", "head", "token", "kv", "content"]
    order = list(LAYOUTS[shape.layout].order)
    mine = numbers[:, :, list(heads)]
    mine = mine if shape.has_kv else mine.squeeze(4)
    names = named if shape.has_kv else [name for name in named if name != "kv"]
    physical = mine.permute([names.index(name) for name in order]).contiguous()
    dims = tensor_dims(order, shape=physical.shape, strides=physical.stride(), itemsize=2)
    stride = next(dim.stride for dim in dims if dim.name == "layer")
    layers = [
        attention_layer(
            f"layers.{index}",
            block_size=shape.tokens,
            num_kv_heads=len(heads),
            head_size=HEAD_SIZE,
            dtype="bfloat16",
        )
        for index in range(shape.layers)
    ]
    inner = tuple(dim for dim in dims if dim.name != "layer")
    memory = physical.view(-1).view(torch.uint8)
    geometry = KVGeometry(
        num_blocks=shape.blocks,
        hash_block_size=shape.tokens,
        groups=(one_group(*layers),),
        allocations=(Allocation(name="kv", size_bytes=memory.numel()),),
        placements=tuple(
            place_dims(layer, allocation="kv", dims=inner, num_blocks=shape.blocks, offset=index * stride)
            for index, layer in enumerate(layers)
        ),
        layout=shape.layout,
        units=units,
    )
    prove_complete(geometry)
    page_map = build_page_map(geometry)
    return Rank(page_map, geometry, PlainCopy(page_map, {"kv": memory}), memory)


def make_engine(shape: Shape, numbers: torch.Tensor, ranks: int) -> list[Rank]:
    """All ranks of one engine. Where there are fewer heads than ranks, neighbours have the same."""
    units = HeadUnits(heads=shape.heads, ranks=ranks)
    held = max(shape.heads // ranks, 1)
    firsts = [rank * shape.heads // ranks for rank in range(ranks)]
    return [lay_out(shape, numbers, units, range(first, first + held)) for first in firsts]


shapes = st.builds(
    Shape,
    layout=st.sampled_from(sorted(LAYOUTS)),
    heads=st.sampled_from((1, 2, 4, 8, 20, 32)),
    layers=st.integers(1, 3),
    blocks=st.integers(1, 4),
    tokens=st.sampled_from((2, 4)),
    split=st.sampled_from((1, 2)),
)


@given(shape=shapes, data=st.data())
def test_engines_of_all_sizes_make_and_read_the_same_records(shape: Shape, data: st.DataObject) -> None:
    numbers = shape.draw()
    count = HeadUnits(heads=shape.heads).count
    sizes = [ranks for ranks in (1, 2, 4, 8, 16) if count % ranks == 0 or (shape.heads == count and not ranks % count)]
    saver, loader = (data.draw(st.sampled_from(sizes)) for _ in range(2))
    block = data.draw(st.integers(0, shape.blocks - 1))
    per_unit = shape.heads // count
    wanted = [shape.record(numbers, block, range(u * per_unit, (u + 1) * per_unit)) for u in range(count)]
    saved: dict[int, bytes] = {}
    units = HeadUnits(heads=shape.heads, ranks=saver)
    for number, rank in enumerate(make_engine(shape, numbers, saver)):
        for unit, record in zip(units.of_rank(number), rank.records(block), strict=True):
            assert saved.setdefault(unit, record) == record
    assert [saved[unit] for unit in range(count)] == wanted
    units = HeadUnits(heads=shape.heads, ranks=loader)
    for number, rank in enumerate(make_engine(shape, numbers, loader)):
        before = rank.memory.clone()
        other = [bytes(255 - byte for byte in saved[unit]) for unit in units.of_rank(number)]
        rank.load(block, other)
        assert rank.records(block) == other
        rank.load(block, [saved[unit] for unit in units.of_rank(number)])
        assert torch.equal(rank.memory, before)


def test_a_unit_of_a_layout_with_heads_outside_tokens_is_one_run_a_layer() -> None:
    shape = Shape("LBHNC", heads=8)
    (rank,) = make_engine(shape, shape.draw(), 1)
    assert [pages.num_runs for pages in rank.page_map.groups] == [shape.layers] * 8
    assert {pages.record_bytes for pages in rank.page_map.groups} == {shape.layers * shape.tokens * 2 * HEAD_SIZE * 2}
    assert rank.geometry.record_bytes(rank.geometry.groups[0]) == rank.page_map.groups[0].record_bytes
    assert [part.layer for part in rank.page_map.groups[3].parts] == ["layers.0", "layers.1"]


def test_a_unit_of_a_layout_with_tokens_outside_heads_is_a_run_a_token() -> None:
    shape = Shape("LBNHC", heads=8)
    (rank,) = make_engine(shape, shape.draw(), 1)
    assert [pages.num_runs for pages in rank.page_map.groups] == [shape.layers * shape.tokens] * 8


def test_a_latent_is_one_unit() -> None:
    layer = mla_layer("mla", block_size=4, latent_size=64, dtype="bfloat16")
    dims = [("block", 2, 512), ("head", 1, 512), ("token", 4, 128), ("content", 64, 2), ("byte", 2, 1)]
    geometry = KVGeometry(
        num_blocks=2,
        hash_block_size=4,
        groups=(one_group(layer),),
        allocations=(Allocation(name="kv", size_bytes=1024),),
        placements=(place_dims(layer, allocation="kv", dims=dims, num_blocks=2),),
        units=HeadUnits(heads=1, ranks=2),
    )
    (pages,) = build_page_map(geometry).groups
    assert (pages.record_bytes, pages.num_runs) == (512, 1)


# ---- identities ----


def describe(ranks: int, **changes: object) -> dict[str, object]:
    shape = Shape(**{"layout": "LBHNC", "heads": 8, **changes})  # type: ignore[arg-type]
    return make_engine(shape, shape.draw(), ranks)[0].geometry.describe()


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("heads", [8, 32])
def test_engines_of_all_sizes_say_the_same_of_their_records(ranks: int, heads: int) -> None:
    assert describe(ranks, heads=heads) == describe(1, heads=heads)


@pytest.mark.parametrize("change", [{"heads": 16}, {"layout": "LBNHC"}, {"tokens": 8}, {"layers": 3}, {"split": 2}])
def test_records_of_other_bytes_are_told_apart(change: dict[str, object]) -> None:
    assert describe(1, **change) != describe(1)


def test_without_units_nothing_is_said_of_them() -> None:
    shape = Shape("LBHNC", heads=8)
    (rank,) = make_engine(shape, shape.draw(), 1)
    whole = replace(rank.geometry, units=None)
    assert "units" not in whole.describe()
    assert whole.describe() != rank.geometry.describe()
    assert len(build_page_map(whole).groups) == 1


def test_what_is_not_stored_may_differ() -> None:
    def with_draft(heads: int) -> KVGeometry:
        shape = Shape("LBHNC", heads=8)
        (rank,) = make_engine(shape, shape.draw(), 1)
        draft = attention("draft", num_kv_heads=heads, block_size=4, excluded="rebuilt")
        size_bytes = 3 * draft.page_bytes
        return replace(
            rank.geometry,
            groups=(*rank.geometry.groups, one_group(draft, name="draft")),
            allocations=(*rank.geometry.allocations, Allocation(name="draft", size_bytes=size_bytes)),
            placements=(
                *rank.geometry.placements,
                place_strided(draft, allocation="draft", block_stride=draft.page_bytes),
            ),
        )

    assert with_draft(2).describe() == with_draft(4).describe()
    assert [pages.record_bytes for pages in build_page_map(with_draft(2)).groups[8:]] == [0] * 8


# ---- refusals ----


def geometry_with(layer: object, *, heads: int = 2, tokens: int = 8, content: int = 64) -> KVGeometry:
    """Two blocks of a layer that says how its pages are made."""
    page = heads * tokens * content
    dims = [("block", 2, page), ("token", tokens, heads * content), ("head", heads, content), ("byte", content, 1)]
    return KVGeometry(
        num_blocks=2,
        hash_block_size=tokens,
        groups=(one_group(layer),),  # type: ignore[arg-type]
        allocations=(Allocation(name="kv", size_bytes=2 * page),),
        placements=(place_dims(layer, allocation="kv", dims=dims, num_blocks=2),),  # type: ignore[arg-type]
        units=HeadUnits(heads=2),
    )


def small(**changes: object) -> object:
    return attention("layer", **{"block_size": 8, "num_kv_heads": 2, "head_size": 16, **changes})


def test_pieces_that_are_too_small_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"layer layer keeps a unit of heads in pieces of 64 bytes") as caught:
        geometry_with(small())
    assert "shared_shapes" in str(caught.value)


def test_scales_of_tokens_and_heads_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"layer layer has a scale for each token and head"):
        geometry_with(small(dtype="int8_per_token_head", head_size=28))


def test_scales_beside_are_refused_by_name() -> None:
    layer = attention("l", dtype="int8_per_token_head", scales=ScalePlacement.BESIDE)
    placed = (
        place_strided(layer, allocation="kv", block_stride=32),
        place_strided(layer, allocation="scales", block_stride=32, part="scales"),
    )
    allocations = tuple(Allocation(name=name, size_bytes=64) for name in ("kv", "scales"))
    with pytest.raises(UnsupportedError, match=r"layer l has a scale for each token and head"):
        dense(2, groups=(one_group(layer),), placements=placed, allocations=allocations, units=HeadUnits(heads=2))


def test_packed_formats_are_refused_by_name() -> None:
    layer = opaque_layer("layer", block_size=8, page_bytes=1024, dtype="nvfp4", kind=LayerKind.FULL_ATTENTION)
    with pytest.raises(UnsupportedError, match=r"layer layer has a packed format \(nvfp4\)"):
        geometry_with(layer)


def test_recurrent_states_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"layer layers\.0\.linear_attn keeps a recurrent state"):
        replace(qwen3next(4), units=HeadUnits(heads=2))


def test_layers_with_other_heads_than_the_models_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"layer layer has 4 KV heads here, and the model's 2 give a rank 2"):
        geometry_with(small(num_kv_heads=4, head_size=16), heads=4)


def test_pages_that_do_not_tell_their_heads_apart_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"layer layers\.0 has no heads that its declaration tells apart"):
        dense(3, units=HeadUnits(heads=2))
