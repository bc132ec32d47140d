"""Differences of two engines that the cache must see, from vLLM's resolved configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.kit.connector.changes import FP8, Change, set_in

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVQuantMode

from kvoffload.connector.engine.geometry import EngineCache, describe_cache
from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.connector.identity.engine import describe_engine, describe_layers, refuse_ruined_scales
from kvoffload.errors import IdentityError, UnsupportedError
from kvoffload.keys.identity import LayerDtype
from kvoffload.kvspec import HeadUnits, KVGeometry
from tests.kit.connector.engine_configs import (
    AttentionLayer,
    HfConfig,
    full,
    make_config,
    make_tensors,
    make_vllm_config,
    recurrent,
)


def geometry_of(*, num_blocks: int = 8, layout: str = "LBHNC", **spec: Any) -> KVGeometry:
    config = make_config((["a", "b"], full(**spec)), num_blocks=num_blocks, layout=layout)
    return describe_cache(
        EngineCache(config=config, tensors=make_tensors(config), sharing={}, layout=layout, hash_block_size=4)
    )


def fingerprint_of_units(ranks: int, *, heads: int = 4, change: Change | None = None, **geometry: Any) -> bytes:
    """Returns the fingerprint of an engine of so many ranks that shares with engines of other sizes."""
    config = make_vllm_config(layers={"a": AttentionLayer(), "b": AttentionLayer()})
    config.parallel_config.tensor_parallel_size = ranks
    if change is not None:
        change(config)
    held = geometry_of(num_kv_heads=max(heads // ranks, 1), **geometry)
    units = replace(held, units=HeadUnits(heads=heads, ranks=ranks))
    return bytes(describe_engine(config, units).fingerprint())


def fingerprint(change: Change | None = None, *, layer: AttentionLayer | None = None, **geometry: Any) -> bytes:
    config = make_vllm_config(layers={"a": AttentionLayer(), "b": layer or AttentionLayer()})
    if change is not None:
        change(config)
    return bytes(describe_engine(config, geometry_of(**geometry)).fingerprint())


def set_hf(**values: Any) -> Change:
    return lambda config: setattr(config.model_config, "hf_config", HfConfig(**values))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(set_in("model_config", model="acme/other"), id="model"),
        pytest.param(set_in("model_config", revision="1" * 40), id="revision"),
        pytest.param(set_hf(_commit_hash="2" * 40), id="commit"),
        pytest.param(set_hf(rope_theta=50000.0), id="rope"),
        pytest.param(set_hf(text_config={"sliding_window": 512}), id="nested configuration"),
        pytest.param(set_hf(layer_types=["full", "window"]), id="layer types"),
        pytest.param(set_in("model_config", dtype=torch.float16), id="model dtype"),
        pytest.param(set_in("model_config", quantization="fp8"), id="weights quantised as they are loaded"),
        pytest.param(set_in("parallel_config", tensor_parallel_size=2), id="tensor parallel"),
        pytest.param(set_in("parallel_config", pipeline_parallel_size=2), id="pipeline parallel"),
        pytest.param(set_in("parallel_config", decode_context_parallel_size=2), id="decode context parallel"),
        pytest.param(set_in("parallel_config", prefill_context_parallel_size=2), id="prefill context parallel"),
        pytest.param(set_in("cache_config", prefix_caching_hash_algo="sha256_cbor"), id="hash algorithm"),
        pytest.param(set_in("load_config", load_format="dummy"), id="random weights"),
    ],
)
def test_engines_that_differ_share_nothing(change: Change) -> None:
    assert fingerprint(change) != fingerprint()


def test_engines_whose_ranks_have_other_stripes_of_a_block_share_nothing() -> None:
    def striped(stripe: int) -> Change:
        return set_in("parallel_config", decode_context_parallel_size=2, cp_kv_cache_interleave_size=stripe)

    assert len({fingerprint(striped(stripe)) for stripe in (1, 2, 4)}) == 3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_engines_that_save_by_heads_share_whatever_their_number_of_ranks(ranks: int) -> None:
    assert fingerprint_of_units(ranks) == fingerprint_of_units(1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_that_save_by_heads_share_nothing_with_others(ranks: int) -> None:
    of_ranks = set_in("parallel_config", tensor_parallel_size=ranks)
    assert fingerprint_of_units(ranks) != fingerprint(of_ranks, num_kv_heads=4 // ranks)


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 8},
        {"dtype": torch.float16},
        {"block_size": 8},
        {"layout": "BHLNC"},
        {"change": set_in("model_config", model="acme/other")},
        {"change": set_in("model_config", revision="1" * 40)},
        {"change": set_in("cache_config", prefix_caching_hash_algo="sha256_cbor")},
    ],
    ids=str,
)
def test_engines_that_save_by_heads_and_differ_share_nothing(change: dict[str, Any]) -> None:
    assert fingerprint_of_units(1, **change) != fingerprint_of_units(1)


def test_one_scale_for_each_head_is_not_shared_by_heads() -> None:
    """An engine of one rank would name all scales, and ranks of another one their own."""
    layers = {name: AttentionLayer(dtype="fp8", scales=([1.0, 1.0], [1.0, 1.0])) for name in ("a", "b")}
    geometry = replace(geometry_of(), units=HeadUnits(heads=2))
    with pytest.raises(IdentityError, match="layer a has a KV scale for each head"):
        describe_engine(make_vllm_config(layers=layers), geometry)


def test_engines_with_other_hash_seeds_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = fingerprint()
    assert fingerprint() == one
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert fingerprint() != one


def test_engines_that_drew_their_hash_seeds_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own engine id, which all its ranks know."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    algorithm = set_in("cache_config", prefix_caching_hash_algo="xxhash")
    assert fingerprint(algorithm) != fingerprint(algorithm)


def test_engines_of_two_versions_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = fingerprint()
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    assert fingerprint() != one


@pytest.mark.parametrize(
    "layer",
    [
        AttentionLayer(dtype="fp8_e5m2"),
        AttentionLayer(dtype="turboquant_3bit_nc"),
        AttentionLayer(dtype="fp8", scales=(0.5, 1.0)),
        AttentionLayer(dtype="fp8", scales=(1.0, 0.5)),
        AttentionLayer(dtype="fp8", scales=([1.0, 1.0], [1.0, 1.0])),
        AttentionLayer(dtype="fp8", backend="FLASHINFER"),
        AttentionLayer(dtype="fp8", isa="amx"),
    ],
    ids=lambda layer: str(vars(layer)),
)
def test_pages_of_one_shape_with_another_content_share_nothing(layer: AttentionLayer) -> None:
    """Their specifications are equal: a byte for each value, one scale for each layer."""
    assert fingerprint(layer=layer, **FP8) != fingerprint(layer=AttentionLayer(dtype="fp8"), **FP8)


@pytest.mark.parametrize(
    "geometry",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float8_e4m3fn, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR},
        {"kv_quant_mode": KVQuantMode.NVFP4, "state_content_bytes": 32},
        {"block_size": 8},
        {"num_kv_heads": 4},
        {"layout": "LBNHC"},
        {"layout": "BLHNC"},
    ],
    ids=str,
)
def test_caches_of_other_bytes_share_nothing(geometry: dict[str, Any]) -> None:
    assert fingerprint(**geometry) != fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(set_hf(_name_or_path="/somewhere/else"), id="where it was loaded from"),
        pytest.param(set_hf(transformers_version="9.9.9"), id="who wrote the file"),
        pytest.param(set_hf(torch_dtype="float32"), id="the checkpoint's dtype, which was resolved"),
    ],
)
def test_names_of_the_moment_do_not_matter(change: Change) -> None:
    assert fingerprint(change) == fingerprint()


def test_names_of_the_moment_do_not_matter_in_nested_configurations_either() -> None:
    assert fingerprint(set_hf(text_config={"_name_or_path": "x"})) == fingerprint(set_hf(text_config={}))


def test_more_memory_is_the_same_cache() -> None:
    assert fingerprint(num_blocks=80) == fingerprint(num_blocks=8)


def test_the_same_settings_have_the_same_fingerprint_in_any_order() -> None:
    one, other = set_hf(a=1, b={"x": 1, "y": {"p", "q"}}), set_hf(b={"y": {"q", "p"}, "x": 1}, a=1)
    assert fingerprint(one) == fingerprint(other)


# ---- what pages mean ----


def one_layer(**spec: Any) -> KVGeometry:
    config = make_config((["a"], full(**spec)))
    return describe_cache(
        EngineCache(config=config, tensors=make_tensors(config), sharing={}, layout="LBHNC", hash_block_size=4)
    )


def describe(layer: AttentionLayer | None, *, tensor_parallel_size: int = 1, **spec: Any) -> LayerDtype:
    config = make_vllm_config(layers={"a": layer} if layer else {})
    config.parallel_config.tensor_parallel_size = tensor_parallel_size
    (described,) = describe_layers(config, one_layer(**spec))
    return described


def test_a_plain_layer_holds_what_its_specification_says() -> None:
    assert describe(AttentionLayer(isa="vec")) == LayerDtype(
        layer="a", dtype="bfloat16", quantisation="none", writer="CPU_ATTN vec", scales=(1.0, 1.0)
    )


def test_a_quantised_layer_holds_its_own_format() -> None:
    described = describe(AttentionLayer(dtype="fp8_e5m2", scales=(0.5, 0.25)), **FP8)
    assert (described.dtype, described.quantisation) == ("fp8_e5m2", "fp8_per_tensor")
    assert described.scales == (0.5, 0.25)


def test_an_explicit_dtype_is_the_same_as_one_that_was_found_out() -> None:
    assert describe(AttentionLayer(dtype="bfloat16")) == describe(AttentionLayer())
    assert describe(AttentionLayer(dtype="fp8"), **FP8) == describe(AttentionLayer(dtype="fp8_e4m3"), **FP8)


def test_scales_of_heads_are_told_one_by_one() -> None:
    assert describe(AttentionLayer(scales=([0.5, 0.25], [1.0, 2.0]))).scales == (0.5, 0.25, 1.0, 2.0)


def test_scales_of_heads_that_ranks_have_divided_are_refused() -> None:
    with pytest.raises(IdentityError, match=r"layer a has a KV scale for each head.*one scale per layer"):
        describe(AttentionLayer(scales=([0.5, 0.25], [1.0, 2.0])), tensor_parallel_size=2)
    assert describe(AttentionLayer(scales=([0.5], [1.0])), tensor_parallel_size=2).scales == (0.5, 1.0)


def test_a_layer_that_the_engine_does_not_know_must_be_plain() -> None:
    assert describe(None) == LayerDtype(layer="a", dtype="bfloat16")
    with pytest.raises(IdentityError, match="layer a is quantised"):
        describe(None, **FP8)


def test_scales_that_were_calculated_beside_recurrent_layers_are_refused_at_registration() -> None:
    config = make_vllm_config(layers={"a": AttentionLayer(scales=(0.03, 7.0))})
    config.cache_config.calculate_kv_scales = True
    engine = make_config((["r"], recurrent()), (["a"], full()))
    connector = KVOffloadConnector(config, KVConnectorRole.WORKER, engine)
    with pytest.raises(UnsupportedError, match=r"not calculated for acme/tiny.*recurrent.*calculate_kv_scales off"):
        connector.register_kv_caches(make_tensors(engine))


def test_scales_that_were_calculated_from_text_are_taken() -> None:
    config = make_vllm_config()
    config.cache_config.calculate_kv_scales = True
    refuse_ruined_scales(config, one_layer())
