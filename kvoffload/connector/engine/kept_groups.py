"""Which KV cache groups of an engine kvoffload keeps, and why an engine's cache is not kept at all.

An engine with a kind of cache that is not in `SPECS` starts and runs as it would without the connector.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.kv_cache_interface import KVCacheSpec, UniformTypeKVCacheSpecs

from kvoffload.connector.engine import vllm_compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Fate(StrEnum):
    """The ways in which the connector treats the blocks of a group."""

    KEPT = "kept"
    REBUILT = "rebuilt"
    """The engine makes them again for each request, also after a hit. The engine's other groups are kept."""
    UNKEPT = "not kept"
    """A hit would need them and kvoffload cannot keep them, so nothing of such an engine is kept."""


class Treatment(NamedTuple):
    """The fate of one kind of cache, with the reason."""

    fate: Fate
    why: str


SPECS: dict[str, Treatment] = {
    "FullAttentionSpec": Treatment(Fate.KEPT, "all blocks of a prompt"),
    "SinkFullAttentionSpec": Treatment(Fate.KEPT, "all blocks of a prompt"),
    "MLAAttentionSpec": Treatment(Fate.KEPT, "all blocks of a prompt: latents, and the keys of a sparse indexer"),
    "HiddenStateCacheSpec": Treatment(Fate.KEPT, "all blocks of a prompt"),
    "SlidingWindowSpec": Treatment(Fate.KEPT, "the blocks of the last window"),
    "SlidingWindowMLASpec": Treatment(
        Fate.KEPT, "the blocks of the last window; with `bounded_replay` the engine computes the window again"
    ),
    "ChunkedLocalAttentionSpec": Treatment(Fate.KEPT, "the blocks of the last chunk"),
    "MambaSpec": Treatment(Fate.KEPT, "the state at the end of a hit"),
    "CircularBufferSpec": Treatment(
        Fate.REBUILT, "it holds keys that are not compressed yet, and a hit ends where there are none"
    ),
    "HiSparseHotSpec": Treatment(Fate.REBUILT, "it is a copy of what a host-resident group holds"),
    "HiSparseResidentSpec": Treatment(Fate.REBUILT, "it is a copy of what a host-resident group holds"),
    "EncoderOnlyAttentionSpec": Treatment(Fate.REBUILT, "such layers keep nothing of a prompt"),
    "CrossAttentionSpec": Treatment(Fate.UNKEPT, "its content depends on an encoder's input and not on tokens alone"),
    "RSWASpec": Treatment(Fate.UNKEPT, "the content of a generated token depends on where its prompt ended"),
}
"""vLLM's classes of KV cache specs by name. A class that is derived from one of them is another kind."""

_UNKNOWN = Treatment(Fate.UNKEPT, "kvoffload does not know it")
_UNCACHED = Treatment(Fate.REBUILT, "the engine does not cache its blocks by prefix")
_ORDER = {Fate.UNKEPT: 0, Fate.REBUILT: 1, Fate.KEPT: 2}
"""The fate of a group whose layers differ is the first of theirs."""


def find_fate(cache: KVCacheConfig, number: int) -> Treatment:
    """Returns what happens to a group's blocks, by the engine's own word and by the kinds of its layers."""
    specs = _list_specs(cache.kv_cache_groups[number].kv_cache_spec)
    treatments = sorted((SPECS.get(type(spec).__name__, _UNKNOWN) for spec in specs), key=lambda one: _ORDER[one.fate])
    if number in cache.prefix_cacheable_group_ids:
        return treatments[0]
    return next((one for one in treatments if one.fate is Fate.REBUILT), _UNCACHED)


def describe_unkept(cache: KVCacheConfig) -> str:
    """Returns the groups that are not kept while the others are, in one line; empty: all are kept."""
    fates = _list_fates(cache)
    return ", ".join(_describe(cache, number, one) for number, one in enumerate(fates) if one.fate is not Fate.KEPT)


def find_why_idle(config: VllmConfig, cache: KVCacheConfig) -> str:
    """Returns why no block of this engine can be kept, in one line; empty: blocks are kept.

    Every rank and the scheduler come to the same answer, as it depends only on what vLLM tells all of them.
    """
    return next(_list_obstacles(config, cache), "")


def _list_obstacles(config: VllmConfig, cache: KVCacheConfig) -> Iterator[str]:
    parallel = config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        yield "it does not serve prefill context parallel engines yet; use tensor or decode context parallelism"
    tensor, stages, nodes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, vllm_compat.nodes(config)
    ranks, rest = divmod(tensor * stages, nodes)
    if rest or (ranks % tensor and tensor % ranks):
        yield (
            f"it does not serve {nodes} machines with {stages} stages of {tensor} ranks yet; "
            "give each machine as many whole stages, or an equal part of one"
        )
    if not cache.kv_cache_tensors:
        yield "this model has no KV cache"
    if any(tensor.host_resident for tensor in cache.kv_cache_tensors):
        yield "a part of the KV cache lives in host memory, which it does not read yet; turn HiSparse off"
    fates = _list_fates(cache)
    for number, one in enumerate(fates):
        if one.fate is Fate.UNKEPT:
            yield f"every hit would need {_describe(cache, number, one)}"
    if all(one.fate is Fate.REBUILT for one in fates):
        yield "the engine caches none of its groups by prefix"


def _list_fates(cache: KVCacheConfig) -> list[Treatment]:
    return [find_fate(cache, number) for number in range(len(cache.kv_cache_groups))]


def _describe(cache: KVCacheConfig, number: int, treatment: Treatment) -> str:
    group = cache.kv_cache_groups[number]
    names, kinds = group.layer_names, sorted({type(spec).__name__ for spec in _list_specs(group.kv_cache_spec)})
    layers = f"{len(names)} layers from {names[0]} on" if len(names) > 1 else "".join(names) or "no layer here"
    return f"group {number} ({', '.join(kinds)}, {layers}: {treatment.why})"


def _list_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
