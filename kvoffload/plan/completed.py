"""A model's config with what it leaves to its class in transformers: defaults, and which layer is what."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

_LISTS = ("layer_types", "layers_block_type")


def complete_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the config says itself stays. None: transformers is not installed, or does not know the model."""
    if find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    try:
        text = CONFIG_MAPPING[kind].from_dict(dict(config)).get_text_config()
        lists = {name: found for name in _LISTS if (found := getattr(text, name, None)) is not None}
        found = {**text.to_dict(), **lists}
    except Exception:  # noqa: BLE001  (whatever a class makes of values that it does not expect)
        return None
    inner = config.get("text_config", config)
    said = {name: value for name, value in (inner if isinstance(inner, dict) else config).items() if value is not None}
    dtype = said.get("dtype") or said.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return {**found, **said, **({"dtype": dtype} if dtype else {})}
