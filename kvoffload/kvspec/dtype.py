"""Which dtype a layer's pages hold (rule 3): explicit, then the checkpoint's scheme under "auto", then the model's.

From vLLM #42782: a checkpoint's scheme replaced a dtype that the user had asked for, and changed the shared
configuration while doing so. Nothing here changes what it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvoffload.errors import DtypeError

AUTO = "auto"


class Quantisation(StrEnum):
    """How a page's numbers are stored."""

    NONE = "none"
    FP8_PER_TENSOR = "fp8_per_tensor"
    """Scales are part of the model, not of the pages."""
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"
    FP8_PER_TOKEN_HEAD = "fp8_per_token_head"
    INT4_PER_TOKEN_HEAD = "int4_per_token_head"
    OPAQUE = "opaque"
    """Packed formats (nvfp4, fp8_ds_mla, ...): only their size is known, they are moved as they are."""

    @property
    def is_per_token_head(self) -> bool:
        return self in (self.INT8_PER_TOKEN_HEAD, self.FP8_PER_TOKEN_HEAD, self.INT4_PER_TOKEN_HEAD)


class KVDtype(NamedTuple):
    """One row of the table of dtypes. `bits` is 0 where the format packs scales with the numbers."""

    name: str
    bits: int
    quantisation: Quantisation


KV_DTYPES: Mapping[str, KVDtype] = {
    row.name: row
    for row in (
        KVDtype("float32", 32, Quantisation.NONE),
        KVDtype("float16", 16, Quantisation.NONE),
        KVDtype("bfloat16", 16, Quantisation.NONE),
        KVDtype("fp8_e4m3", 8, Quantisation.FP8_PER_TENSOR),
        KVDtype("fp8_e5m2", 8, Quantisation.FP8_PER_TENSOR),
        KVDtype("fp8_inc", 8, Quantisation.FP8_PER_TENSOR),
        KVDtype("int8_per_token_head", 8, Quantisation.INT8_PER_TOKEN_HEAD),
        KVDtype("fp8_per_token_head", 8, Quantisation.FP8_PER_TOKEN_HEAD),
        KVDtype("int4_per_token_head", 4, Quantisation.INT4_PER_TOKEN_HEAD),
        KVDtype("nvfp4", 0, Quantisation.OPAQUE),
        KVDtype("nvfp4_4over6", 0, Quantisation.OPAQUE),
        KVDtype("nvfp4_ds_mla", 0, Quantisation.OPAQUE),
        KVDtype("fp8_ds_mla", 0, Quantisation.OPAQUE),
        KVDtype("turboquant_k8v4", 0, Quantisation.OPAQUE),
        KVDtype("turboquant_4bit_nc", 0, Quantisation.OPAQUE),
        KVDtype("turboquant_k3v4_nc", 0, Quantisation.OPAQUE),
        KVDtype("turboquant_3bit_nc", 0, Quantisation.OPAQUE),
        KVDtype("ultraquant_4bit", 0, Quantisation.OPAQUE),
    )
}
_ALIASES = {
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "half": "float16",
    "float": "float32",
}
# Recurrent states are stored as their kernels want them, counters and flags included.
STATE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class DtypeSource(StrEnum):
    """The rule that decided a layer's dtype."""

    EXPLICIT = "explicit"
    SCHEME = "checkpoint scheme"
    MODEL = "model dtype"
    SKIPPED = "skip list"


@dataclass(frozen=True, kw_only=True)
class ResolvedDtype:
    """The dtype of a layer's pages, and the rule that decided it. `name` and `quantisation` go into the identity."""

    name: str
    bits: int
    quantisation: Quantisation
    source: DtypeSource


def canonical_dtype(name: str) -> str:
    """One name per dtype: `torch.bfloat16`, `half` and `fp8` have others."""
    short = str(name).removeprefix("torch.")
    return _ALIASES.get(short, short)


def find_kv_dtype(name: str, *, where: str = "", allowed: Collection[str] | None = None) -> KVDtype:
    """Returns the table's row. DtypeError if there is none, or if `allowed` (what the engine's backend can do) lacks
    it."""
    row = KV_DTYPES.get(canonical_dtype(name))
    of_layer = f" of layer {where}" if where else ""
    if row is None:
        raise DtypeError(
            f"KV dtype {name!r}{of_layer} is unknown",
            remedy=f"use one of {', '.join(KV_DTYPES)}",
            dtype=name,
            layer=where,
        )
    if allowed is not None and row.name not in {canonical_dtype(other) for other in allowed}:
        raise DtypeError(
            f"KV dtype {row.name}{of_layer} is not allowed here",
            remedy=f"use one of {', '.join(sorted(allowed))}",
            dtype=row.name,
            layer=where,
        )
    return row


def find_scheme(quant_config: Mapping[str, object] | None) -> Mapping[str, object] | str | None:
    """The KV scheme inside a checkpoint's quantisation config; None is the normal answer, also for no config at all.

    Known places: `kv_cache_scheme` (compressed-tensors), `kv_cache_quant_algo` (ModelOpt, at the top or in
    `quantization`).
    """
    if quant_config is None:
        return None
    inner = quant_config.get("quantization")
    for place in (quant_config, inner if isinstance(inner, Mapping) else {}):
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            scheme = place.get(key)
            if isinstance(scheme, str | Mapping) and scheme:
                return scheme
    return None


def resolve_kv_dtype(
    explicit: str,
    *,
    model_dtype: str,
    scheme: Mapping[str, object] | str | None = None,
    layer: str = "",
    kind: str = "",
    skip_layers: Collection[str] = (),
    allowed: Collection[str] | None = None,
) -> ResolvedDtype:
    """The dtype of one layer. `explicit` is the user's setting; only "auto" lets the scheme or the model decide.

    A layer of the skip list (by name, by number, or by kind, such as "sliding_window") keeps the model's dtype
    whatever the others use, so pages of one cache may differ.
    """
    if is_skipped(layer, kind=kind, skip_layers=skip_layers):
        name, source = model_dtype, DtypeSource.SKIPPED
    elif explicit != AUTO:
        # A scheme is not even read here: a checkpoint must not break a user's explicit choice.
        name, source = explicit, DtypeSource.EXPLICIT
    elif scheme is not None:
        name, source = _scheme_dtype(scheme, layer), DtypeSource.SCHEME
    else:
        name, source = model_dtype, DtypeSource.MODEL
    row = find_kv_dtype(name, where=layer, allowed=allowed)
    return ResolvedDtype(name=row.name, bits=row.bits, quantisation=row.quantisation, source=source)


def is_skipped(layer: str, *, kind: str, skip_layers: Collection[str]) -> bool:
    """Whether a skip list names this layer: by its name, its kind, or the one number in its dotted name."""
    if not layer and not kind:
        return False
    entries = {str(entry) for entry in skip_layers}
    numbers = [part for part in layer.split(".") if part.isdecimal()]
    number = numbers[0] if len(numbers) == 1 else None
    return (bool(layer) and layer in entries) or (bool(kind) and str(kind) in entries) or number in entries


def _scheme_dtype(scheme: Mapping[str, object] | str, layer: str) -> str:
    if isinstance(scheme, str):
        return scheme.lower()
    algorithm = scheme.get("kv_cache_quant_algo")
    if isinstance(algorithm, str):
        return algorithm.lower()
    if scheme.get("num_bits") == 8 and scheme.get("type") == "float":
        return "fp8"
    raise DtypeError(
        f"the checkpoint's KV scheme is not one we know: type {scheme.get('type')!r}, {scheme.get('num_bits')!r} bits",
        remedy="set the KV dtype explicitly instead of auto",
        layer=layer,
    )
