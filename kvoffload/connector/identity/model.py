"""Identifies the model of an engine: its weights, and all settings that change the numbers it computes with them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.connector.engine.vllm_compat import drops_last_block, look_ahead_tokens
from kvoffload.errors import IdentityError
from kvoffload.keys.canonical import Plain, encode_canonical
from kvoffload.keys.model_files import identify_revision

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Fields that are not of the model: they differ between two loads of one model.
_TRANSIENT = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "torch_dtype"})
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOADS_WHAT_LIES_THERE = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"})
"""Load formats with the same result. Others take other files of the checkpoint, weights from elsewhere, or random
ones."""
_LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "su"})
_MEDIA_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
"""An engine's settings for all images, sounds and films; vLLM's hash of one has only its request's own settings."""
_ADAPTER_SETTINGS = (
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def identify_model(model: Any) -> str:
    """Returns a hub's commit, or a digest of the folder's files; neither a name alone nor a branch is a revision."""
    folder = Path(model.model)
    if folder.is_dir():
        return identify_revision(folder)
    # A configuration that was loaded from elsewhere has the commit of that place.
    is_its_own = getattr(model, "hf_config_path", None) in (None, model.model)
    commit = getattr(model.hf_config, "_commit_hash", None) if is_its_own else None
    commit = commit or model.revision
    if not commit:
        raise IdentityError(f"model {model.model} has no revision", remedy="give --revision, or load it from a folder")
    if not _COMMIT.fullmatch(str(commit)):
        raise IdentityError(
            f"model {model.model}: revision {commit} may be another one tomorrow",
            remedy="give the commit to --revision, or load the model from a folder",
        )
    return str(commit)


def describe_model(config: VllmConfig) -> dict[str, Plain]:
    """Everything but name, revision and dtype, which an identity has apart. Read after the model was loaded.

    Settings that most engines leave off are described only where they are on.
    """
    model = config.model_config
    return {
        "checkpoint": _describe_checkpoint(model),
        "loading": _describe_loading(config),
        "media": _describe_media(config),
        "draft": _describe_draft(config),
        "adapters": _describe_adapters(config),
    }


def _describe_checkpoint(model: Any) -> dict[str, Plain]:
    settings = _plain_mapping(model.hf_config.to_dict())
    described: dict[str, Plain] = {
        "settings": settings,
        # The class that runs it: vLLM's own, or one around transformers' with other numbers.
        "architecture": str(getattr(model, "architecture", "")),
        # Weights may be quantised as they are loaded: another KV cache from the same checkpoint.
        "quantisation": _plain(model.quantization),
        "quantisation settings": _plain(getattr(model, "quantization_config", None)),
        "code revision": _plain(getattr(model, "code_revision", None)),
    }
    if _depends_on_length(settings):
        # vLLM takes one of two sets of frequencies for all requests, by the longest that it would serve.
        described["max_model_len"] = model.max_model_len
    return described


def _depends_on_length(settings: Plain) -> bool:
    if isinstance(settings, Mapping):
        kinds = (settings.get("rope_type"), settings.get("type"))
        return any(kind in _LENGTH_DEPENDENT_ROPE for kind in kinds) or any(map(_depends_on_length, settings.values()))
    if isinstance(settings, Sequence) and not isinstance(settings, str | bytes):
        return any(map(_depends_on_length, settings))
    return False


def loads_what_lies_there(config: VllmConfig) -> bool:
    """Whether the weights are those in the model's files, in whichever way they are read."""
    return str(config.load_config.load_format) in _LOADS_WHAT_LIES_THERE


def _describe_loading(config: VllmConfig) -> dict[str, Plain]:
    if loads_what_lies_there(config):
        return {}
    load = config.load_config
    load_format = str(load.load_format)
    # Such settings may hold the keys of a store.
    told = hashlib.sha256(encode_canonical(_plain(load.model_loader_extra_config))).digest()
    return {
        "format": load_format,
        "settings": told,
        "seed": config.model_config.seed if load_format == "dummy" else None,
    }


def _describe_media(config: VllmConfig) -> dict[str, Plain]:
    media = getattr(config.model_config, "multimodal_config", None)
    if media is None:
        return {}
    if media.mm_processor_cache_gb == 0 and not config.cache_config.enable_prefix_caching:
        # vLLM then numbers images instead of hashing them: every engine has its own first image.
        raise IdentityError(
            "this engine does not hash images, sounds and films",
            remedy="enable prefix caching, or leave mm_processor_cache_gb above 0",
        )
    described = _changed_settings(media, _MEDIA_SETTINGS)
    split = getattr(media, "mm_encoder_tp_mode", "weights")
    if split != "weights":
        # Ranks that hold the whole encoder do not sum over parts of it.
        described["mm_encoder_tp_mode"] = split
    scales = getattr(media, "mm_encoder_fp8_scale_path", None)
    if scales:
        described["mm_encoder_fp8_scale_path"] = _digest_file(Path(scales))
    return described


def _describe_draft(config: VllmConfig) -> dict[str, Plain]:
    """The model that drafts has KV layers of its own, filled from its own weights."""
    speculation: Any = getattr(config, "speculative_config", None)
    draft = getattr(speculation, "draft_model_config", None)
    if draft is None or draft is speculation.target_model_config:
        return {}
    return {
        "model": str(draft.model),
        "revision": identify_model(draft),
        "dtype": dtype_name(draft.dtype),
        "checkpoint": _describe_checkpoint(draft),
        # The drafting method decides the draft model's inputs, and so the content of its layers.
        "method": str(getattr(speculation, "method", "")),
        "look-ahead": look_ahead_tokens(config),
        "drops the last block": drops_last_block(config),
    }


def _describe_adapters(config: VllmConfig) -> dict[str, Plain]:
    """Describes how adapters are applied, if not in the usual way. Their contents count request by request."""
    adapters = getattr(config, "lora_config", None)
    if adapters is None:
        return {}
    described = _changed_settings(adapters, _ADAPTER_SETTINGS)
    if adapters.lora_dtype != config.model_config.dtype:
        described["dtype"] = dtype_name(adapters.lora_dtype)
    return described


def _digest_file(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()
    except OSError as fault:
        raise IdentityError(f"cannot read {file}: {fault.strerror}") from fault


def _changed_settings(settings: Any, names: Sequence[str]) -> dict[str, Plain]:
    """Returns those of the settings that are not off; the engine may be older than some of them."""
    values = {name: _plain(getattr(settings, name, None)) for name in names}
    return {name: value for name, value in values.items() if value}


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
