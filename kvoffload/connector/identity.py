"""Who this engine is, from vLLM's resolved configuration and what its layers really hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.connector.page_content import describe_layers
from kvoffload.connector.vllm_compat import hash_seed
from kvoffload.errors import IdentityError
from kvoffload.keys.canonical import Plain
from kvoffload.keys.identity import Identity, ParallelShape
from kvoffload.keys.model_files import identify_revision
from kvoffload.kvspec import KVGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Names of the moment, not of the model: they differ between two loads of one model.
_TRANSIENT = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "torch_dtype"})


def describe_engine(config: VllmConfig, geometry: KVGeometry) -> Identity:
    """Computed by every worker after registration, when every dtype is resolved; ranks of one engine get equal ones."""
    model, parallel = config.model_config, config.parallel_config
    return Identity(
        engine="vllm",
        model=str(model.model),
        revision=_revision(model),
        # Weights may be quantised as they are loaded: another KV cache from the same checkpoint.
        model_config={**_plain_mapping(model.hf_config.to_dict()), "engine quantisation": _plain(model.quantization)},
        model_dtype=str(model.dtype).removeprefix("torch."),
        layers=describe_layers(config, geometry),
        geometry=geometry.describe(),
        parallel=ParallelShape(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            decode_context=parallel.decode_context_parallel_size,
            prefill_context=getattr(parallel, "prefill_context_parallel_size", 1),
        ),
        hash_algorithm=str(config.cache_config.prefix_caching_hash_algo),
        hash_seed=hash_seed(config),
    )


def _revision(model: Any) -> str:
    """A hub's commit, or a digest of what lies in the folder; a name alone is no revision."""
    folder = Path(model.model)
    if folder.is_dir():
        return identify_revision(folder)
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if not commit:
        raise IdentityError(f"model {model.model} has no revision", remedy="give --revision, or load it from a folder")
    return str(commit)


def _plain_mapping(value: Mapping[str, Any]) -> dict[str, Plain]:
    return {str(key): _plain(item) for key, item in value.items() if key not in _TRANSIENT}


def _plain(value: Any) -> Plain:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    return str(value)
