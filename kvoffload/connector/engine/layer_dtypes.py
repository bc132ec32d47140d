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
"""Names of formats in which a backend packs scales between the numbers, with the format of the numbers themselves."""


def check_layer_dtypes(config: VllmConfig, geometry: KVGeometry) -> None:
    """Raises DtypeError for the first layer whose pages hold another dtype than user, checkpoint and model ask for.

    Checks only layers whose dtype vLLM's own attention classes decide. Recurrent states have dtypes of their own, and
    kinds of layers that belong to one model choose the dtypes that their kernels need.
    """
    known = vllm_compat.find_layers(config)
    wishes = vllm_compat.dtype_wishes(config)
    for spec in geometry.layers.values():
        layer = known.get(spec.name)
        if not vllm_compat.follows_cache_dtype(layer):
            continue
        actual = find_actual_dtype(layer, spec)
        wanted = [_resolve(one, layer, spec) for one in wishes]
        # Schemes and formats that we cannot read are not checked.
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
    """Returns the format that the layer writes, or the dtype of its pages if it has no format of its own."""
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
        # Newer engines have formats that the table lacks. A user's explicit choice is right if the layer has it, too.
        return None


def _unpacked(name: str) -> str:
    return _PACKED.get(canonical_dtype(name), canonical_dtype(name))
