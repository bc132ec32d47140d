"""An engine that gives a layer another dtype than the rule says is refused, and one that is right never is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.kv_cache_interface import KVQuantMode

from kvoffload.connector.engine.geometry import EngineCache, describe_cache
from kvoffload.connector.engine.layer_dtypes import check_layer_dtypes
from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.errors import DtypeError
from tests.kit.connector.engine_configs import (
    full,
    make_config,
    make_tensors,
    make_vllm_config,
    mla,
    per_token_head,
    recurrent,
)

NAME = "model.layers.3.self_attn.attn"
FP8 = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}


def make_layer(dtype: str, kind: type = Attention, *, window: int | None = None) -> Any:
    """vLLM's own class, with what it has decided."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.kv_cache_dtype, layer.sliding_window, layer.kv_sharing_target_layer_name = dtype, window, None
    return layer


def wishes(
    explicit: str = "auto", *, scheme: Any = None, skip: tuple[str, ...] = (), draft: Any = None, **layers: Any
) -> Any:
    config = make_vllm_config(layers=layers)
    config.cache_config.cache_dtype = explicit
    config.cache_config.kv_cache_dtype_skip_layers = list(skip)
    if scheme is not None:
        config.quant_config = SimpleNamespace(kv_cache_scheme=scheme)
    if draft is not None:
        config.speculative_config = draft
    return config


def check(config: Any, spec: Any, layer: Any, *, name: str = NAME) -> None:
    config.compilation_config.static_forward_context = {name: layer}
    engine = make_config(([name], spec))
    cache = EngineCache(config=engine, tensors=make_tensors(engine), sharing={}, layout="LBHNC", hash_block_size=4)
    check_layer_dtypes(config, describe_cache(cache))


DRAFT_MODEL = SimpleNamespace(dtype=torch.float32, hf_config=SimpleNamespace(quantization_config=None))
DRAFT = SimpleNamespace(kv_cache_dtype="auto", draft_model_config=DRAFT_MODEL)


@pytest.mark.parametrize(
    ("config", "spec", "layer"),
    [
        (wishes(), full(), make_layer("auto")),
        (wishes("bfloat16"), full(), make_layer("bfloat16")),
        (wishes("bfloat16", scheme=SCHEME), full(), make_layer("bfloat16")),
        (wishes("float16"), full(dtype=torch.float16), make_layer("float16")),
        (wishes("fp8"), full(**FP8), make_layer("fp8")),
        (wishes("fp8_e4m3"), full(**FP8), make_layer("fp8")),
        (wishes("fp8_e5m2"), full(**FP8), make_layer("fp8_e5m2")),
        (wishes(scheme=SCHEME), full(**FP8), make_layer("fp8")),
        (wishes(scheme="FP8"), full(**FP8), make_layer("fp8_e4m3")),
        (wishes("fp8", skip=("3",)), full(), make_layer("auto")),
        (wishes("fp8", skip=("sliding_window",)), full(), make_layer("auto", window=128)),
        (wishes("fp8", skip=("sliding_window",)), full(**FP8), make_layer("fp8")),
        # vLLM does not look at the window of an MLA layer.
        (wishes("fp8", skip=("sliding_window",)), mla(**FP8), make_layer("fp8", MLAAttention, window=128)),
        (wishes("int8_per_token_head"), per_token_head(), make_layer("int8_per_token_head")),
        # A sparse backend packs what was asked for, and writes its own name into the configuration.
        (wishes("fp8_ds_mla"), mla(**FP8), make_layer("fp8", MLAAttention)),
        (wishes("fp8"), mla(**FP8), make_layer("fp8_ds_mla", MLAAttention)),
        # The draft model has a choice of its own.
        (wishes("fp8", draft=DRAFT), full(dtype=torch.float32), make_layer("auto")),
        (wishes("fp8", draft=DRAFT), full(**FP8), make_layer("fp8")),
        # A format that is in none of our tables is left to the engine.
        (wishes(scheme="static"), full(), make_layer("auto")),
        (wishes("a_new_format"), full(**FP8), make_layer("a_new_format")),
        # These decide by themselves.
        (wishes("fp8"), recurrent(), SimpleNamespace()),
        (wishes("fp8"), full(), SimpleNamespace(kv_cache_dtype="auto")),
    ],
)
def test_an_engine_that_is_right_is_served(config: Any, spec: Any, layer: Any) -> None:
    check(config, spec, layer)


@pytest.mark.parametrize(
    ("config", "spec", "layer", "message"),
    [
        # vLLM #42782: the checkpoint's scheme instead of what the user said.
        (wishes("bfloat16", scheme=SCHEME), full(**FP8), make_layer("fp8"), "hold fp8_e4m3, .* bfloat16 .explicit"),
        (wishes("fp8"), full(), make_layer("auto"), "hold bfloat16, .* fp8_e4m3 .explicit"),
        (wishes("fp8_e5m2"), full(**FP8), make_layer("fp8"), "hold fp8_e4m3, .* fp8_e5m2 .explicit"),
        (wishes(scheme=SCHEME), full(), make_layer("auto"), "hold bfloat16, .* fp8_e4m3 .checkpoint scheme"),
        (wishes(), full(**FP8), make_layer("fp8"), "hold fp8_e4m3, .* bfloat16 .model dtype"),
        (wishes(), full(dtype=torch.float16), make_layer("auto"), "hold float16, .* bfloat16 .model dtype"),
        (wishes("fp8", skip=("3",)), full(**FP8), make_layer("fp8"), "hold fp8_e4m3, .* bfloat16 .skip list"),
        # The layer's dtype differs from the one that its pages were allocated for.
        (wishes("bfloat16"), full(dtype=torch.uint8), make_layer("bfloat16"), "hold uint8, .* bfloat16 .explicit"),
        (wishes("fp8", draft=DRAFT), full(), make_layer("auto"), "hold bfloat16, .* fp8_e4m3 .explicit"),
    ],
)
def test_an_engine_that_decided_otherwise_is_refused_with_both_values(
    config: Any, spec: Any, layer: Any, message: str
) -> None:
    with pytest.raises(DtypeError, match=f"layer {NAME}.*{message}") as caught:
        check(config, spec, layer)
    assert "--kv-cache-dtype" in caught.value.remedy


def test_a_layer_of_another_dtype_is_refused_at_registration() -> None:
    config = wishes("bfloat16", scheme=SCHEME, a=make_layer("fp8"))
    engine = make_config((["a"], full(**FP8)))
    connector = KVOffloadConnector(config, KVConnectorRole.WORKER, engine)
    with pytest.raises(DtypeError, match="layer a: its pages hold fp8_e4m3"):
        connector.register_kv_caches(make_tensors(engine))


def test_the_configuration_is_not_changed() -> None:
    config = wishes("bfloat16", scheme=SCHEME)
    check(config, full(), make_layer("bfloat16"))
    assert config.cache_config.cache_dtype == "bfloat16"
