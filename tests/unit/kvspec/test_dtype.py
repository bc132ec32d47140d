"""Rule 3: an explicit dtype wins, then the checkpoint's scheme under "auto", then the model's dtype."""

from __future__ import annotations

import copy

import pytest

from kvoffload.errors import DtypeError
from kvoffload.kvspec import DtypeSource, Quantisation, find_scheme, resolve_kv_dtype
from kvoffload.kvspec.dtype import KV_DTYPES, canonical_dtype, find_kv_dtype, is_skipped

FP8_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}


def test_an_explicit_dtype_wins_over_the_checkpoints_scheme() -> None:
    """vLLM #42782: a checkpoint with `kv_cache_scheme` replaced an explicit bfloat16 by fp8, and drafts crashed."""
    resolved = resolve_kv_dtype("bfloat16", model_dtype="float16", scheme=FP8_SCHEME)
    assert (resolved.name, resolved.quantisation, resolved.source) == (
        "bfloat16",
        Quantisation.NONE,
        DtypeSource.EXPLICIT,
    )


def test_the_configuration_handed_in_is_never_changed() -> None:
    """vLLM #42782 too: resolving one layer's dtype changed the shared cache configuration for all others."""
    config = {"quant_method": "compressed-tensors", "kv_cache_scheme": dict(FP8_SCHEME)}
    before = copy.deepcopy(config)
    skip = ["0"]
    for layer in ("layers.0", "layers.1"):
        resolve_kv_dtype("auto", model_dtype="bfloat16", layer=layer, scheme=find_scheme(config), skip_layers=skip)
    assert config == before
    assert skip == ["0"]


@pytest.mark.parametrize(
    ("explicit", "scheme", "model", "name", "source"),
    [
        ("auto", None, "bfloat16", "bfloat16", DtypeSource.MODEL),
        ("auto", None, "torch.float16", "float16", DtypeSource.MODEL),
        ("auto", FP8_SCHEME, "bfloat16", "fp8_e4m3", DtypeSource.SCHEME),
        ("auto", "FP8", "bfloat16", "fp8_e4m3", DtypeSource.SCHEME),
        ("auto", {"kv_cache_quant_algo": "NVFP4"}, "bfloat16", "nvfp4", DtypeSource.SCHEME),
        ("fp8", None, "bfloat16", "fp8_e4m3", DtypeSource.EXPLICIT),
        ("fp8_e5m2", FP8_SCHEME, "bfloat16", "fp8_e5m2", DtypeSource.EXPLICIT),
        ("int8_per_token_head", FP8_SCHEME, "bfloat16", "int8_per_token_head", DtypeSource.EXPLICIT),
        # With an explicit dtype, a scheme that we cannot read does not matter.
        ("float16", {"type": "int", "num_bits": 3}, "bfloat16", "float16", DtypeSource.EXPLICIT),
    ],
)
def test_the_source_of_a_dtype_is_known(
    explicit: str, scheme: object, model: str, name: str, source: DtypeSource
) -> None:
    resolved = resolve_kv_dtype(explicit, model_dtype=model, scheme=scheme)  # type: ignore[arg-type]
    assert (resolved.name, resolved.source) == (name, source)
    assert resolved.bits == KV_DTYPES[name].bits
    assert resolved.quantisation == KV_DTYPES[name].quantisation


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (None, None),
        ({}, None),
        ({"quant_method": "awq"}, None),
        ({"kv_cache_scheme": None}, None),
        ({"kv_cache_scheme": FP8_SCHEME}, FP8_SCHEME),
        ({"kv_cache_quant_algo": "FP8"}, "FP8"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "FP8"),
        ({"quantization": "fp8"}, None),
    ],
)
def test_no_quantisation_config_is_normal(config: dict[str, object] | None, scheme: object) -> None:
    assert find_scheme(config) == scheme


@pytest.mark.parametrize(
    ("layer", "kind", "skipped"),
    [
        ("model.layers.0.self_attn", "full_attention", True),
        ("model.layers.10.self_attn", "full_attention", False),
        ("model.layers.3.self_attn", "sliding_window", True),
        ("vision.attn", "full_attention", True),
        ("model.layers.0.block.4.attn", "full_attention", False),
        ("", "", False),
    ],
)
def test_a_skip_list_names_layers_by_number_kind_or_name(layer: str, kind: str, skipped: bool) -> None:
    assert is_skipped(layer, kind=kind, skip_layers=["0", "sliding_window", "vision.attn"]) is skipped


def test_skipped_layers_give_one_cache_mixed_pages() -> None:
    kinds = {"layers.0": "full_attention", "layers.1": "sliding_window", "layers.2": "full_attention"}
    resolved = {
        layer: resolve_kv_dtype(
            "fp8", model_dtype="bfloat16", layer=layer, kind=kind, skip_layers=["sliding_window", "2"]
        )
        for layer, kind in kinds.items()
    }
    assert [(name, dtype.name, dtype.source) for name, dtype in resolved.items()] == [
        ("layers.0", "fp8_e4m3", DtypeSource.EXPLICIT),
        ("layers.1", "bfloat16", DtypeSource.SKIPPED),
        ("layers.2", "bfloat16", DtypeSource.SKIPPED),
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resolve_kv_dtype("fp7", model_dtype="bfloat16", layer="l"), "KV dtype 'fp7' of layer l is unknown"),
        (lambda: resolve_kv_dtype("auto", model_dtype="int64"), "KV dtype 'int64' is unknown"),
        (
            lambda: resolve_kv_dtype("fp8_e5m2", model_dtype="bfloat16", allowed=["fp8", "bfloat16"]),
            "fp8_e5m2 is not allowed here; use one of bfloat16, fp8",
        ),
        (
            lambda: resolve_kv_dtype("auto", model_dtype="bfloat16", scheme={"type": "int", "num_bits": 4}),
            "the checkpoint's KV scheme is not one we know: type 'int', 4 bits; set the KV dtype explicitly",
        ),
    ],
)
def test_a_dtype_that_is_not_allowed_says_which_are(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(DtypeError) as caught:
        call()
    assert message in str(caught.value)
    assert caught.value.remedy


def test_one_name_per_dtype() -> None:
    assert canonical_dtype("torch.float8_e4m3fn") == canonical_dtype("fp8") == "fp8_e4m3"
    assert find_kv_dtype("half", allowed=["torch.float16"]).name == "float16"


def test_per_token_head_formats_know_that_they_are() -> None:
    assert [row.name for row in KV_DTYPES.values() if row.quantisation.is_per_token_head] == [
        "int8_per_token_head",
        "fp8_per_token_head",
        "int4_per_token_head",
    ]
