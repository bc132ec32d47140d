"""Pages of one shape that mean different values are told apart by what the layers say of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVQuantMode

from kvoffload.connector.engine.geometry import EngineCache, describe_cache
from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.connector.identity.pages import describe_layers, refuse_ruined_scales
from kvoffload.errors import IdentityError, UnsupportedError
from kvoffload.keys.identity import LayerDtype
from kvoffload.kvspec import KVGeometry
from tests.kit.connector.engine_configs import (
    AttentionLayer,
    full,
    make_config,
    make_tensors,
    make_vllm_config,
    recurrent,
)

FP8 = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}


def geometry_of(**spec: Any) -> KVGeometry:
    config = make_config((["a"], full(**spec)))
    return describe_cache(
        EngineCache(config=config, tensors=make_tensors(config), sharing={}, layout="LBHNC", hash_block_size=4)
    )


def describe(layer: AttentionLayer | None, *, tensor_parallel_size: int = 1, **spec: Any) -> LayerDtype:
    config = make_vllm_config(layers={"a": layer} if layer else {})
    config.parallel_config.tensor_parallel_size = tensor_parallel_size
    (described,) = describe_layers(config, geometry_of(**spec))
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
    refuse_ruined_scales(config, geometry_of())
