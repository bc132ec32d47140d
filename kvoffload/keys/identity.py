"""The identity of an engine's cache: everything that must be equal before two engines may share a block.

A block's hash names tokens; it says nothing of weights, dtypes or layouts. The fingerprint says the rest, and the
namespace of every entry is made from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvoffload.errors import IdentityError
from kvoffload.keys.canonical import Plain, encode_canonical
from kvoffload.types import Fingerprint

FORMAT_VERSION = 2
SHOWN_LETTERS = 120
"""Maximum length of a readable part of an identity, in letters; longer parts are shown as a digest."""
_TAG = b"kvoffload identity 1\n"


@dataclass(frozen=True, kw_only=True)
class ParallelShape:
    """How one model is cut over ranks. Two engines with different shapes hold different shards."""

    tensor: int = 1
    pipeline: int = 1
    decode_context: int = 1
    prefill_context: int = 1
    kv_replicas: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise IdentityError(
                    f"parallel shape: {field.name} = {value!r}", remedy="every size is a whole number of at least 1"
                )


@dataclass(frozen=True, kw_only=True)
class LayerDtype:
    """The dtype of one layer's pages, as resolved (an explicit dtype, the checkpoint's scheme, or the model's
    dtype)."""

    layer: str
    dtype: str
    quantisation: str = "none"
    writer: str = ""
    """The kernels that fill the pages: two may arrange the same values differently in as many bytes."""
    scales: tuple[float, ...] = ()
    """Divisors of keys and values, where one number applies to many tokens; no page contains them."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """All that promise P1 lists. Frozen; equal identities have equal fingerprints, different ones different.

    `model` and `revision` come from `keys.model_files` or from the hub; `model_config` is the engine's resolved
    configuration (rope scaling, window sizes and overrides included); `geometry` is `KVGeometry.describe()`.
    """

    engine: str
    model: str
    revision: str
    model_config: Mapping[str, Plain]
    model_dtype: str
    layers: tuple[LayerDtype, ...]
    geometry: Mapping[str, Plain]
    parallel: ParallelShape
    hash_algorithm: str
    hash_seed: str
    salt: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("engine", "model", "revision", "model_dtype", "hash_algorithm"):
            if not getattr(self, name):
                raise IdentityError(
                    f"identity: {name} is empty",
                    remedy="give every field a value: blocks without a full identity must not be shared",
                )
        if not self.layers:
            raise IdentityError("identity: no layer has a KV dtype", remedy="give the resolved dtype of every layer")
        if len({layer.layer for layer in self.layers}) != len(self.layers):
            raise IdentityError("identity: a layer is listed twice", remedy="give one dtype per layer")

    def describe(self) -> dict[str, Plain]:
        """Every field as a plain value, by dotted name; what a refused handshake compares."""
        return {
            "format_version": self.format_version,
            "engine": self.engine,
            "model": self.model,
            "revision": self.revision,
            "model_config": self.model_config,
            "model_dtype": self.model_dtype,
            "layers": {
                layer.layer: {
                    "dtype": layer.dtype,
                    "quantisation": layer.quantisation,
                    "writer": layer.writer,
                    "scales": layer.scales,
                }
                for layer in self.layers
            },
            "geometry": self.geometry,
            "parallel": {field.name: getattr(self.parallel, field.name) for field in fields(self.parallel)},
            "hash_algorithm": self.hash_algorithm,
            # The seed may be a secret that keeps tenants apart; only its digest leaves the process.
            "hash_seed": hashlib.sha256(b"kvoffload seed\n" + self.hash_seed.encode()).digest(),
            "salt": hashlib.sha256(b"kvoffload salt\n" + self.salt.encode()).digest(),
        }

    def fingerprint(self) -> Fingerprint:
        """32 bytes, the same in every process and on every machine."""
        try:
            data = encode_canonical(self.describe())
        except (TypeError, ValueError) as fault:
            raise IdentityError(f"identity of {self.model}: {fault}", remedy="give plain values only") from fault
        return Fingerprint(hashlib.sha256(_TAG + data).digest())


@dataclass(frozen=True)
class Difference:
    """One field in which two identities differ, by dotted name."""

    field: str
    ours: Plain
    theirs: Plain

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.ours)} here, {_shown(self.theirs)} there"


MISSING = "(absent)"


def compare_identities(ours: Mapping[str, Plain], theirs: Mapping[str, Plain]) -> tuple[Difference, ...]:
    """The differing fields of two `Identity.describe()` values, deepest names first found, in order of name."""
    return tuple(_differences("", ours, theirs))


def _differences(prefix: str, ours: Plain, theirs: Plain) -> list[Difference]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        found: list[Difference] = []
        for key in sorted({*ours, *theirs}):
            name = f"{prefix}.{key}" if prefix else key
            found += _differences(name, ours.get(key, MISSING), theirs.get(key, MISSING))
        return found
    same = encode_canonical(ours) == encode_canonical(theirs)
    return [] if same else [Difference(prefix, ours, theirs)]


def _shown(value: Plain) -> str:
    text = value.hex() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def describe_parts(description: Mapping[str, object]) -> dict[str, str]:
    """Returns each part of a description as text, by name. Long parts are digests, and what users set of them is told
    by readable parts too."""
    return {name: _shorten(value) for name, value in {**_describe_settings(description), **description}.items()}


def _describe_settings(description: Mapping[str, object]) -> dict[str, str]:
    """Describes the dtypes of the KV cache, the layout of its pages and the numbers of ranks. A description whose parts
    were made text before has all this already."""
    layers, geometry, parallel = (description.get(name) for name in ("layers", "geometry", "parallel"))
    told: dict[str, str] = {}
    if isinstance(layers, Mapping):
        told["kv_dtype"] = ", ".join(sorted({_describe_dtype(layer) for layer in layers.values()}))
    if isinstance(geometry, Mapping) and "layout" in geometry:
        told["layout"] = str(geometry["layout"])
    if isinstance(parallel, Mapping):
        shape = ", ".join(f"{name} {count}" for name, count in parallel.items() if count != 1)
        told["parallel_shape"] = shape or "one rank"
    return told


def _describe_dtype(layer: Mapping[str, object]) -> str:
    quantisation = layer["quantisation"]
    return f"{layer['dtype']}" if quantisation == "none" else f"{layer['dtype']} ({quantisation})"


def _shorten(value: object) -> str:
    if isinstance(value, int | str) and len(str(value)) <= SHOWN_LETTERS and str(value).isprintable():
        return str(value)
    return hashlib.sha256(encode_canonical(value)).hexdigest()  # type: ignore[arg-type]
