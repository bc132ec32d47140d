"""Bytes of one block, for every kind of layer and quantisation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.errors import DtypeError, GeometryError
from kvoffload.kvspec import (
    LayerKind,
    LayerSpec,
    Quantisation,
    ScalePlacement,
    StateSpec,
    attention_layer,
    mla_layer,
    opaque_layer,
    recurrent_layer,
)
from tests.kit.kvspec.builders import attention

BESIDE, INLINE, NONE = ScalePlacement.BESIDE, ScalePlacement.INLINE, ScalePlacement.NONE


@pytest.mark.parametrize(
    ("dtype", "scales", "page", "beside"),
    [
        ("bfloat16", None, 16 * 8 * (128 + 64) * 2, 0),
        ("float32", None, 16 * 8 * (128 + 64) * 4, 0),
        ("fp8", None, 16 * 8 * (128 + 64), 0),
        ("int8_per_token_head", None, 16 * 8 * (128 + 4 + 64 + 4), 0),
        ("int8_per_token_head", INLINE, 16 * 8 * (128 + 4 + 64 + 4), 0),
        ("int8_per_token_head", BESIDE, 16 * 8 * (128 + 64), 16 * 8 * 8),
        ("fp8_per_token_head", BESIDE, 16 * 8 * (128 + 64), 16 * 8 * 8),
        ("int4_per_token_head", None, 16 * 8 * (64 + 4 + 32 + 4), 0),
        ("int4_per_token_head", BESIDE, 16 * 8 * (64 + 32), 16 * 8 * 8),
    ],
)
def test_attention_bytes(dtype: str, scales: ScalePlacement | None, page: int, beside: int) -> None:
    layer = attention_layer(
        "l", block_size=16, num_kv_heads=8, head_size=128, head_size_v=64, dtype=dtype, scales=scales
    )
    assert (layer.page_bytes, layer.scale_bytes, layer.record_bytes) == (page, beside, page + beside)
    assert layer.bytes_of("kv") == layer.bytes_of("k") + layer.bytes_of("v") == page
    if beside:
        assert layer.bytes_of("scales") == layer.bytes_of("k_scales") + layer.bytes_of("v_scales") == beside


@pytest.mark.parametrize(
    ("dtype", "page"), [("bfloat16", 16 * 576 * 2), ("fp8", 16 * 576), ("int8_per_token_head", 16 * 580)]
)
def test_mla_bytes_are_one_row_per_token(dtype: str, page: int) -> None:
    layer = mla_layer("l", block_size=16, latent_size=576, dtype=dtype)
    assert (layer.page_bytes, layer.kind) == (page, LayerKind.MLA)


def test_recurrent_bytes_are_the_sum_of_states_of_several_dtypes() -> None:
    states = (StateSpec("conv", (3, 1024), "torch.bfloat16"), StateSpec("ssm", (4, 128, 128), "float32"))
    layer = recurrent_layer("l", block_size=640, states=states)
    assert layer.page_bytes == 268_288
    assert (layer.dtype, layer.main_part) == ("bfloat16+float32", "state")
    assert [layer.bytes_of(part) for part in ("state", "state.conv", "state.ssm")] == [268_288, 6_144, 262_144]


def test_opaque_bytes_are_what_the_engine_says() -> None:
    layer = opaque_layer("l", block_size=64, page_bytes=64 * 656, dtype="fp8_ds_mla", kind=LayerKind.MLA)
    assert (layer.page_bytes, layer.quantisation) == (64 * 656, Quantisation.OPAQUE)


def test_parts_have_one_order_whatever_the_engine_lists_first() -> None:
    states = (StateSpec("ssm", (1,), "int8"), StateSpec("conv", (1,), "int8"))
    recurrent = recurrent_layer("l", block_size=1, states=states)
    assert sorted(["state.conv", "state.ssm"], key=recurrent.part_order) == ["state.ssm", "state.conv"]
    full = attention("l")
    assert sorted(["v_scales", "scales", "v", "kv", "k"], key=full.part_order) == ["kv", "k", "v", "scales", "v_scales"]


def test_alias_and_excluded_layers_have_no_record_bytes() -> None:
    assert attention("a", alias_of="b").record_bytes == 0
    assert attention("a", excluded="drafts are recomputed").record_bytes == 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: attention("l", dtype="nvfp4"), DtypeError, "page bytes of nvfp4 cannot be computed"),
        (lambda: mla_layer("l", block_size=1, latent_size=8, dtype="fp8_ds_mla"), DtypeError, "latent size"),
        (lambda: attention("l", dtype="fp9"), DtypeError, "'fp9' of layer l is unknown"),
        (lambda: StateSpec("s", (2,), "complex64"), DtypeError, "dtype 'complex64' is not allowed"),
        (lambda: StateSpec("s", (2, 0), "int8"), GeometryError, r"shape \(2, 0\)"),
        (lambda: attention("l", dtype="int4_per_token_head", head_size=3), GeometryError, "3 elements of 4 bits"),
        (lambda: attention("l", head_size=0), GeometryError, "0 elements of 16 bits"),
        (lambda: attention("l", block_size=0), GeometryError, "0 tokens|at least 1 token|block_size is 0"),
        (lambda: attention("l", dtype="int8_per_token_head", scales=NONE), GeometryError, "no place for its scales"),
        (lambda: attention("l", kind=LayerKind.SLIDING_WINDOW), GeometryError, "window is 0"),
        (lambda: attention("l", kind=LayerKind.MLA, window=5), GeometryError, "window is 5"),
        (lambda: attention("l", alias_of="l"), GeometryError, "alias of itself"),
        (lambda: attention(""), GeometryError, "has no name"),
        (lambda: recurrent_layer("l", block_size=1, states=()), GeometryError, "without states"),
        (lambda: replace(attention("l"), scale_bytes=4), GeometryError, "only scales beside the pages have bytes"),
        (lambda: attention("l").bytes_of("scales"), GeometryError, "part 'scales' has no declared size"),
        (lambda: attention("l").part_order("state.conv"), GeometryError, "part 'state.conv' is unknown"),
        (lambda: attention("l").part_order("keys"), GeometryError, "part 'keys' is unknown"),
    ],
)
def test_a_wrong_description_is_refused_with_a_remedy(make: object, error: type[GeometryError], message: str) -> None:
    assert callable(make)
    with pytest.raises(error, match=message) as caught:
        make()
    assert caught.value.remedy


def test_full_attention_may_know_a_window() -> None:
    layer = attention("l", window=128)
    assert isinstance(layer, LayerSpec)
    assert layer.window == 128
