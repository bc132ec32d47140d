"""Promise P3: every byte of every KV allocation has one owner. Checked against a byte-by-byte reading."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, given

from kvoffload.errors import GeometryError, HoleError, OverlapError
from kvoffload.kvspec import (
    Allocation,
    Exclusion,
    KVGeometry,
    Padding,
    StateSpec,
    place_dims,
    place_strided,
    prove_complete,
    recurrent_layer,
)
from kvoffload.kvspec import proof as proof_module
from tests.kit.kvspec.builders import (
    QWEN_SLOT,
    QWEN_STATE,
    attention,
    can_share,
    dense,
    in_layout,
    list_owners,
    one_group,
    qwen3next,
)
from tests.kit.kvspec.strategies import at_least, damaged, geometries

LAYOUT_NAMES = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC", "KV_BLOCK_NHD", "BLOCK_KV_HND")


def check_against_bytes(geometry: KVGeometry) -> str:
    """The proof says of a geometry what a look at every byte says: the same first fault, or the same sums."""
    for name, owners in list_owners(geometry).items():
        for address, here in enumerate(owners):
            pairs = [(a, b) for i, a in enumerate(here) for b in here[i + 1 :] if not can_share(geometry, a, b)]
            if not here:
                with pytest.raises(HoleError) as hole:
                    prove_complete(geometry)
                end = next((i for i in range(address, len(owners)) if owners[i]), len(owners))
                context = hole.value.context
                assert (context["allocation"], context["start"], context["end"]) == (name, address, end)
                return "hole"
            if pairs:
                with pytest.raises(OverlapError) as overlap:
                    prove_complete(geometry)
                context = overlap.value.context
                assert (context["allocation"], context["start"]) == (name, address)
                labels = [{a.label, b.label} for a, b in pairs]
                claimants = context["claimants"]
                assert isinstance(claimants, tuple)
                assert any(all(label in " ".join(claimants) for label in pair) for pair in labels), (
                    f"{claimants} is not among {labels}"
                )
                return "overlap"
    report = prove_complete(geometry)
    for allocation, owners in zip(report.allocations, list_owners(geometry).values(), strict=True):
        pages = sum(any(owner.kind == "page" for owner in here) for here in owners)
        padding = sum(all(owner.kind == "padding" for owner in here) for here in owners)
        assert allocation.size_bytes == len(owners)
        assert allocation.page_bytes == pages
        assert allocation.padding_bytes == padding
        assert allocation.excluded_bytes == len(owners) - pages - padding
    return "complete"


@given(geometry=geometries())
@at_least(300)
def test_p3_a_complete_geometry_is_proved(geometry: KVGeometry) -> None:
    assert check_against_bytes(geometry) == "complete"


@given(geometry=damaged())
@at_least(600)
def test_p3_damage_is_found_where_the_bytes_show_it(geometry: KVGeometry | GeometryError) -> None:
    if isinstance(geometry, GeometryError):
        event("refused by the geometry")
        assert geometry.remedy
        return
    event(check_against_bytes(geometry))


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 10**9])
def test_a_layout_is_proved_without_looking_at_its_blocks(layout: str, num_blocks: int) -> None:
    report = prove_complete(in_layout(layout, num_layers=3, num_blocks=num_blocks))
    (allocation,) = report.allocations
    assert allocation.page_bytes == allocation.size_bytes == 3 * num_blocks * 65536
    assert allocation.layers == tuple((f"layer layers.{i}, part kv", num_blocks * 65536) for i in range(3))


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 64, 100_000])
def test_the_real_geometry_of_qwen3next_is_proved(num_blocks: int) -> None:
    (allocation,) = prove_complete(qwen3next(num_blocks)).allocations
    assert allocation.page_bytes == allocation.size_bytes == num_blocks * QWEN_SLOT
    assert allocation.padding_bytes == 0, "what GDN leaves unused are pages of the full group"
    assert [size for _, size in allocation.layers] == [num_blocks * QWEN_STATE] * 3 + [num_blocks * QWEN_SLOT]
    assert allocation.shared_bytes == 3 * num_blocks * QWEN_STATE


def test_qwen3next_without_its_overlay_is_refused() -> None:
    with pytest.raises(OverlapError, match=r"bytes 0 to 268288: claimed by layer layers\.0\.linear_attn.*layers\.1"):
        prove_complete(replace(qwen3next(2), overlays=()))


def test_groups_overlay_each_other_block_by_block() -> None:
    """vLLM #37236 as bytes: (2, blocks, ...) keys and values on the bytes of a recurrent group's block-major pages."""
    full = attention("full", block_size=2)
    state = recurrent_layer("state", block_size=2, states=(StateSpec("s", (full.page_bytes,), "int8"),))
    half = full.page_bytes // 2
    kv_first = place_dims(
        full, allocation="kv", dims=(("kv", 2, 2 * half), ("block", 2, half), ("byte", half, 1)), num_blocks=2
    )
    block_major = place_dims(
        full, allocation="kv", dims=(("kv", 2, half), ("block", 2, 2 * half), ("byte", half, 1)), num_blocks=2
    )
    recurrent = place_strided(state, allocation="kv", block_stride=full.page_bytes)
    geometry = KVGeometry(
        num_blocks=2,
        hash_block_size=2,
        groups=(one_group(full, name="full"), one_group(state, name="gdn")),
        allocations=(Allocation(name="kv", size_bytes=2 * full.page_bytes),),
        placements=(block_major, recurrent),
        overlays=(("full", "gdn"),),
    )
    prove_complete(geometry)
    with pytest.raises(OverlapError, match="block by block") as caught:
        prove_complete(replace(geometry, placements=(kv_first, recurrent)))
    assert "restride_block_major" in caught.value.remedy
    assert caught.value.context["start"] == half


def test_a_hole_names_its_bytes_and_its_neighbours() -> None:
    geometry = dense(3, num_layers=2)
    short = replace(geometry.placements[1], runs=(geometry.placements[1].runs[0]._replace(base=200),), offset=200)
    geometry = replace(
        geometry, placements=(geometry.placements[0], short), allocations=(Allocation(name="kv", size_bytes=392),)
    )
    with pytest.raises(HoleError) as caught:
        prove_complete(geometry)
    assert str(caught.value) == (
        "allocation kv, bytes 192 to 200 belong to nothing: after layer layers.0, part kv (block 2) and before "
        "layer layers.1, part kv (block 0); declare the layer, the padding (slot_bytes, Padding) or an Exclusion "
        "that these bytes are"
    )
    prove_complete(replace(geometry, paddings=(Padding(allocation="kv", base=192, length=8),)))
    prove_complete(replace(geometry, exclusions=(Exclusion(name="workspace", allocation="kv", base=192, length=8),)))


def test_an_allocation_without_claims_is_one_hole() -> None:
    geometry = dense(2)
    geometry = replace(geometry, allocations=(*geometry.allocations, Allocation(name="forgotten", size_bytes=10)))
    with pytest.raises(HoleError, match="allocation forgotten, bytes 0 to 10 belong to nothing: at the start of the"):
        prove_complete(geometry)


@pytest.mark.parametrize(("size", "ok"), [(3 * 100, True), (2 * 100 + 70, True), (2 * 100 + 64, True), (301, False)])
def test_padding_of_the_last_block_may_be_cut_off(size: int, ok: bool) -> None:
    layer = attention("layer")
    geometry = KVGeometry(
        num_blocks=3,
        hash_block_size=2,
        groups=(one_group(layer),),
        allocations=(Allocation(name="kv", size_bytes=size),),
        placements=(place_strided(layer, allocation="kv", block_stride=100, slot_bytes=100),),
    )
    if ok:
        assert prove_complete(geometry).allocations[0].padding_bytes == size - 3 * 64
    else:
        with pytest.raises(HoleError):
            prove_complete(geometry)


def test_the_last_repetition_of_padding_may_lie_outside_altogether() -> None:
    geometry = dense(1, num_layers=1)
    geometry = replace(
        geometry,
        allocations=(Allocation(name="kv", size_bytes=68),),
        paddings=(
            Padding(allocation="kv", base=64, length=4, stride=8, count=2),
            Padding(allocation="kv", base=80, length=4),
        ),
    )
    assert prove_complete(geometry).allocations[0].padding_bytes == 4


def test_strides_that_interleave_are_expanded_exactly_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of different strides in one another's gaps: no engine does it, and it is still judged right."""
    one, other = (
        recurrent_layer(name, block_size=2, states=(StateSpec("s", (4,), "int8"),)) for name in ("one", "other")
    )
    geometry = KVGeometry(
        num_blocks=2,
        hash_block_size=2,
        groups=(one_group(one, other),),
        allocations=(Allocation(name="kv", size_bytes=16),),
        placements=(
            place_strided(one, allocation="kv", block_stride=12),
            place_strided(other, allocation="kv", offset=4, block_stride=4),
        ),
    )
    assert prove_complete(geometry).allocations[0].page_bytes == 16
    monkeypatch.setattr(proof_module, "MAX_PIECES", 3)
    with pytest.raises(GeometryError, match="4 pieces with different strides interleave") as caught:
        prove_complete(geometry)
    assert type(caught.value) is GeometryError
    wrong = replace(
        geometry, placements=(geometry.placements[0], place_strided(other, allocation="kv", offset=2, block_stride=4))
    )
    with pytest.raises(OverlapError):
        prove_complete(wrong)
