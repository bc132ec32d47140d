"""The dtype of each layer's pages by our own rule, and whether the engine decided the same (vLLM #42782)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.vllm_compat import DtypeWishes
from kvoffload.errors import DtypeError
from kvoffload.kvspec import KVGeometry, LayerSpec, ResolvedDtype, resolve_kv_dtype
from kvoffload.kvspec.dtype import canonical_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PACKED = {"fp8_ds_mla": "fp8_e4m3", "nvfp4_ds_mla": "nvfp4"}
"""What a backend makes of a wish as its kernels want it: the same numbers, with scales between them."""


def check_layer_dtypes(config: VllmConfig, geometry: KVGeometry) -> None:
    """DtypeError for the first layer whose pages hold something else than user, checkpoint and model ask for.

    Only of layers that vLLM's own attention classes decide about. Recurrent states have dtypes of their own, and a
    model's own kinds of layers know what their kernels need.
    """
    known = vllm_compat.find_layers(config)
    wishes = vllm_compat.dtype_wishes(config)
    for spec in geometry.layers.values():
        layer = known.get(spec.name)
        if not vllm_compat.follows_cache_dtype(layer):
            continue
        actual = find_actual_dtype(layer, spec)
        wanted = [_resolve(one, layer, spec) for one in wishes]
        # A scheme or a format that we cannot read is the engine's to read.
        if None in wanted or actual in {_unpacked(one.name) for one in wanted if one is not None}:
            continue
        (first, *_) = wanted
        assert first is not None
        raise DtypeError(
            f"layer {spec.name}: its pages hold {actual}, and it was to be {first.name} ({first.source})",
            remedy=f"set --kv-cache-dtype {actual}, if that is what is wanted; else the engine has overridden the "
            "choice, and the model's name belongs into a report",
            layer=spec.name,
            dtype=actual,
        )


def find_actual_dtype(layer: Any, spec: LayerSpec) -> str:
    """The format that the layer writes; where that is no format of its own, what the pages were allocated for."""
    return _unpacked(vllm_compat.quantised_name(layer) or spec.dtype)


def _resolve(wishes: DtypeWishes, layer: Any, spec: LayerSpec) -> ResolvedDtype | None:
    try:
        return resolve_kv_dtype(
            wishes.explicit,
            model_dtype=wishes.model_dtype,
            scheme=wishes.scheme,
            layer=spec.name,
            kind=vllm_compat.skip_kind(layer),
            skip_layers=wishes.skip_layers,
        )
    except DtypeError:
        # Newer engines have formats that the table lacks: a user's own word is right where the layer repeats it.
        return None


def _unpacked(name: str) -> str:
    return _PACKED.get(canonical_dtype(name), canonical_dtype(name))
