"""Our rule of dtypes and the real engine's: the same for every way to ask; an engine that differs does not start."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import EnginePool, Json
from tests.vllm.tiny_models import DENSE, GDN, MLA, SLIDING, UNEVEN, TinyModel

pytestmark = pytest.mark.vllm

FP8 = "fp8_e4m3"


@pytest.mark.parametrize(
    ("model", "arguments", "wanted"),
    [
        (DENSE, {}, ["bfloat16"] * 4),
        (DENSE, {"dtype": "float32"}, ["float32"] * 4),
        (DENSE, {"kv_cache_dtype": "fp8"}, [FP8] * 4),
        (DENSE, {"kv_cache_dtype": "fp8_e5m2"}, ["fp8_e5m2"] * 4),
        (DENSE, {"kv_cache_dtype": "bfloat16"}, ["bfloat16"] * 4),
        (
            DENSE,
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1", "2"]},
            [FP8, "bfloat16", "bfloat16", FP8],
        ),
        (SLIDING, {}, ["bfloat16"] * 6),
        (GDN, {}, ["bfloat16"]),
        (MLA, {}, ["bfloat16"] * 3),
        (UNEVEN, {}, ["bfloat16"] * 4),
    ],
    ids=lambda value: value.name if isinstance(value, TinyModel) else None,
)
def test_the_engine_decides_as_the_rule_does(
    engines: EnginePool, model: TinyModel, arguments: Mapping[str, object], wanted: list[str]
) -> None:
    engine = engines.acquire(model, kv_transfer_config=probe.transfer(), **arguments)
    assert engine.ask_workers(_list_dtypes) == [wanted]


def test_a_layer_that_the_engine_gave_another_dtype_is_refused(engines: EnginePool) -> None:
    """Does by hand what vLLM #42782 did: the layer says fp8, and the user said bfloat16."""
    engine = engines.acquire(DENSE, kv_transfer_config=probe.transfer(), kv_cache_dtype="bfloat16")
    (refusal,) = engine.ask_workers(_register_with, "model.layers.2.self_attn.attn", "fp8")
    assert refusal == (
        "layer model.layers.2.self_attn.attn: its pages hold fp8_e4m3, and it was to be bfloat16 (explicit)"
    )


def _list_dtypes(worker: object) -> Json:
    """Lists the dtypes of the attention layers that the rule checks."""
    from kvoffload.connector.engine import layer_dtypes, vllm_compat

    config = worker.vllm_config  # type: ignore[attr-defined]
    geometry = probe.worker_side().registration.geometry
    layers = vllm_compat.find_layers(config)
    followers = [spec for spec in geometry.layers.values() if vllm_compat.follows_cache_dtype(layers[spec.name])]
    return [
        layer_dtypes.find_actual_dtype(layers[spec.name], spec) for spec in sorted(followers, key=lambda one: one.name)
    ]


def _register_with(worker: object, name: str, dtype: str) -> Json:
    """Returns the message of the check at registration while one layer has another dtype."""
    from kvoffload.connector.engine.layer_dtypes import check_layer_dtypes
    from kvoffload.connector.engine.vllm_compat import find_layers
    from kvoffload.errors import DtypeError

    config = worker.vllm_config  # type: ignore[attr-defined]
    layer = find_layers(config)[name]
    former, layer.kv_cache_dtype = layer.kv_cache_dtype, dtype
    try:
        check_layer_dtypes(config, probe.worker_side().registration.geometry)
    except DtypeError as fault:
        return fault.message
    finally:
        layer.kv_cache_dtype = former
    return None
