"""The bytes that each layer of a model keeps of a token, from its config.json alone. Models of which it says too little
are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.plan.element import Element, find_element

MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 4096
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_UNKNOWN = (
    *("index_topk", "index_topk_blocks", "indexer_head_dim", "sparse_attention_config", "compress_ratios"),
    *("global_head_dim", "swa_num_key_value_heads", "attention_other_setting", "num_attention_groups"),
    *("ple_layer_ids", "cross_attention_layers"),
)
"""Layers of these models keep something that is not known here, or have heads of several shapes."""
_WINDOWED = ("mistral", "mixtral", "starcoder2", "phi3")
"""All of their layers have the window, where there is one."""
_ATTENTION_ALONE = (
    *_WINDOWED,
    *("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "gemma", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "cohere"),
    *("olmo", "olmo2", "olmoe", "stablelm", "gpt_neox", "opt", "ernie4_5", "ernie4_5_moe", "seed_oss", "phi"),
)
"""All layers of these models are attention, where their config does not list layers. Of others that is not known."""
_LISTS = ("layer_types", "layers_block_type")
"""Which layer is what, as a model's class in transformers tells it."""
LATENT = "latent (MLA)"
_EXACTLY = "run it with --exact where vLLM is installed"


class _WrongRanks(Exception):  # noqa: N818  (it never leaves this module)
    """A number of heads in the config cannot be divided among so many ranks."""


class Keeps(Enum):
    """The part of a layer's content that must be in the cache for a hit."""

    TOKENS = "all tokens"
    WINDOW = "the last window"
    STATE = "a state"


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """In bytes, of all ranks together. Bytes that several ranks hold alike are stored once, and count once.

    `tokens`: in a window.
    """

    keeps: Keeps
    what: str
    token_bytes: int = 0
    tokens: int = 0
    state_bytes: int = 0
    copies: int = 1
    """How many ranks hold the same bytes."""


def complete_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Adds what a config leaves to the model's class in transformers: defaults, and which layer is what.

    What the config says itself stays. None: transformers is not installed, or does not know the model.
    """
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


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """`layers` without those that keep nothing."""

    model_type: str
    layers: Sequence[LayerShape]
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class ShapeSettings:
    """The options that an engine is started with."""

    kv_dtype: str = "auto"
    state_dtype: str = "auto"
    ranks: int = 1
    """Number of tensor-parallel ranks."""


def read_config(path: Path) -> Mapping[str, Any]:
    """Reads the config of a model's folder, or the file itself. ConfigError: there is none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as fault:
        remedy = "name a model's folder or its config.json"
        if _HUB_NAME.fullmatch(str(path)):
            remedy = f"fetch it with `hf download {path} config.json`, which prints what to name here"
        raise ConfigError(f"{file} cannot be read: {fault.strerror}", remedy=remedy) from None
    try:
        found = json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is no model's config", remedy="it is a JSON object, as models are published with")
    return found


def read_shape(config: Mapping[str, Any], settings: ShapeSettings) -> ModelShape:
    """Reads a model's shape from its config. ConfigError: neither it nor its class in transformers say what its layers
    keep, or that is not known here.

    What is wrong with `settings` is said without transformers, which takes seconds to import.
    """
    for dtype, setting in ((settings.kv_dtype, "kv-dtype"), (settings.state_dtype, "state-dtype")):
        find_element(dtype, of_model="bfloat16", setting=setting)
    try:
        return _read_completed(config, settings)
    except _WrongRanks as wrong:
        raise ConfigError(str(wrong), remedy="choose another number of ranks") from None


def _read_completed(config: Mapping[str, Any], settings: ShapeSettings) -> ModelShape:
    """Reads the config as it is, and where that does not suffice, completed by its class in transformers."""
    try:
        return _read_as_it_is(config, settings)
    except ConfigError:
        completed = complete_config(config)
        if completed is None:
            raise
        return _read_as_it_is(completed, settings)


def _read_as_it_is(config: Mapping[str, Any], settings: ShapeSettings) -> ModelShape:
    inner = config.get("text_config", config)
    text = _Fields(inner if isinstance(inner, dict) else config)
    if config.get("is_encoder_decoder"):
        raise ConfigError("kvoffload does not know models with an encoder", remedy=_EXACTLY)
    strange = next((name for name in _UNKNOWN if text.raw.get(name) is not None), None)
    if strange is not None:
        raise ConfigError(f"the config alone does not tell what models with {strange!r} keep", remedy=_EXACTLY)
    said = (fields.get(name) for fields in (text.raw, config) for name in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, said), "float32"))
    if dtype == "float32":
        dtype = "bfloat16"  # as vLLM runs it, unless it is told to
    kinds = _list_kinds(text)
    kinds = kinds[: len(kinds) - text.number("num_kv_shared_layers", 0)]
    makers = _Makers(text, settings, find_element(settings.kv_dtype, of_model=dtype, setting="kv-dtype"), dtype)
    shapes = {kind: makers.make(kind) for kind in dict.fromkeys(kinds)}
    layers = [shape for kind in kinds if (shape := shapes[kind]) is not None]
    if not layers:
        raise ConfigError("no layer of this model keeps anything", remedy="is it a language model's config?")
    return ModelShape(
        model_type=str(text.raw.get("model_type", "unknown")),
        layers=layers,
        max_tokens=text.number("max_position_embeddings", 0),
    )


class _Fields:
    """Reads the fields of a config."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def number(self, *names_and_default: str | int) -> int:
        """The first of these names that is there; a number at the end is the default. ConfigError: there is none."""
        names = [name for name in names_and_default if isinstance(name, str)]
        for name in names:
            value = self.raw.get(name)
            if isinstance(value, bool) or (value is not None and not isinstance(value, int)) or (value or 0) < 0:
                raise ConfigError(
                    f"{name!r} = {str(value)[:40]!r} in the model's config", remedy="it is a whole number"
                )
            if value is not None:
                return int(value)
        last = names_and_default[-1]
        if isinstance(last, int):
            return last
        raise ConfigError(f"the model's config has no {' or '.join(map(repr, names))}", remedy=_EXACTLY)

    def words(self, name: str) -> list[str] | None:
        """A list of words, or None where there is none."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_LAYERS or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{name!r} in the model's config is no list of words", remedy="take a complete one")
        return list(value)


_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "*": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "delta",
    "mamba": "mamba",
    "mamba2": "mamba",
    "M": "mamba",
    "moe": "nothing",
    "mlp": "nothing",
    "-": "nothing",
    "E": "nothing",
}


def _list_kinds(text: _Fields) -> list[str]:
    pattern = text.raw.get("hybrid_override_pattern")
    named = list(pattern) if isinstance(pattern, str) else text.words("layer_types") or text.words("layers_block_type")
    # Nemotron-H lists its layers, and may leave their number out.
    count = text.number("num_hidden_layers", *([len(named)] if named else []))
    if not 0 < count <= MAX_LAYERS:
        raise ConfigError(f"a model of {count} layers", remedy=f"allowed are 1 to {MAX_LAYERS}")
    full = text.raw.get("attn_layer_indices")
    if isinstance(full, list):
        return ["full" if at in full else "mamba" for at in range(count)]
    if period := text.number("attn_layer_period", 0):
        return ["full" if at % period == text.number("attn_layer_offset") else "mamba" for at in range(count)]
    if named is not None:
        if len(named) != count:
            raise ConfigError(f"{len(named)} layers are named, and there are {count}", remedy="take a complete config")
        strange = next((name for name in named if name not in _KINDS), None)
        if strange is not None:
            raise ConfigError(f"layers of type {strange!r} are not known here", remedy=_EXACTLY)
        is_mamba = text.raw.get("linear_num_key_heads") is None and text.raw.get("mamba_n_heads") is not None
        kinds = {**_KINDS, "linear_attention": "mamba"} if is_mamba else _KINDS
        return [kinds[name] for name in named]
    if text.raw.get("linear_num_value_heads") is not None:
        every = text.number("full_attention_interval")
        return ["full" if every and (at + 1) % every == 0 else "delta" for at in range(count)]
    return _list_attention(text, count)


def _list_attention(text: _Fields, count: int) -> list[str]:
    kind = text.raw.get("model_type")
    every = text.number("sliding_window_pattern", "_sliding_window_pattern", 0)
    if kind not in _ATTENTION_ALONE and not every:
        raise ConfigError(
            f"the layers of {str(kind)[:40]!r} models are not known from this config alone", remedy=_EXACTLY
        )
    if text.number("sliding_window", 0) == 0 or text.raw.get("use_sliding_window") is False:
        return ["full"] * count
    if every:
        return ["full" if (at + 1) % every == 0 else "window" for at in range(count)]
    if kind in _WINDOWED:
        return ["window"] * count
    raise ConfigError(
        "the model has a sliding window, and its config does not say in which layers",
        remedy="add layer_types, as newer configs have it",
    )


class _Makers:
    """Makes the shape of a layer of each kind."""

    def __init__(self, text: _Fields, settings: ShapeSettings, element: Element, dtype: str) -> None:
        self._text = text
        self._ranks = settings.ranks
        self._element = element
        self._dtype = dtype
        self._state_dtype = settings.state_dtype

    def make(self, kind: str) -> LayerShape | None:
        """Returns what a layer keeps. None: nothing."""
        makers: dict[str, Callable[[], LayerShape | None]] = {
            "full": self._full,
            "window": lambda: self._window("sliding_window"),
            "chunk": lambda: self._window("attention_chunk_size"),
            "delta": self._delta,
            "mamba": self._mamba,
            "nothing": lambda: None,
        }
        return makers[kind]()

    def _full(self) -> LayerShape:
        if self._text.raw.get("kv_lora_rank") is None:
            size, copies = self._attention_bytes()
            return LayerShape(keeps=Keeps.TOKENS, what="attention", token_bytes=size, copies=copies)
        if self._element.scale_bytes:
            raise ConfigError(f"a latent has no {self._element.name}", remedy="choose auto or fp8 as kv-dtype")
        numbers = self._text.number("kv_lora_rank") + self._text.number("qk_rope_head_dim")
        size = self._element.row_bytes(numbers)
        return LayerShape(keeps=Keeps.TOKENS, what=LATENT, token_bytes=size, copies=self._ranks)

    def _window(self, name: str) -> LayerShape:
        tokens = self._text.number(name)
        what = "sliding window" if name == "sliding_window" else "chunk"
        size, copies = self._attention_bytes()
        return LayerShape(keeps=Keeps.WINDOW, what=what, token_bytes=size, tokens=tokens, copies=copies)

    def _attention_bytes(self) -> tuple[int, int]:
        """Returns the bytes of a token, and how many ranks hold each of them."""
        text = self._text
        queries = text.number("num_attention_heads")
        heads = text.number("num_key_value_heads", queries)
        if not queries or not heads:
            raise ConfigError("attention without heads", remedy="take a complete config")
        if heads % self._ranks and self._ranks % heads:
            raise _WrongRanks(f"num_key_value_heads = {heads} cannot be shared by {self._ranks} ranks")
        numbers = text.number("head_dim", 0) or text.number("hidden_size") // queries
        values = text.number("v_head_dim", numbers)
        size = heads * (self._element.row_bytes(numbers) + self._element.row_bytes(values))
        return size, max(self._ranks // heads, 1)

    def _delta(self) -> LayerShape:
        text = self._text
        keys, values = text.number("linear_num_key_heads"), text.number("linear_num_value_heads")
        key_dim, value_dim = text.number("linear_key_head_dim"), text.number("linear_value_head_dim")
        channels = 2 * keys * key_dim + values * value_dim
        size = self._state_bytes(channels, text.number("linear_conv_kernel_dim"), values * value_dim * key_dim)
        return LayerShape(keeps=Keeps.STATE, what="gated delta net", state_bytes=size)

    def _mamba(self) -> LayerShape:
        text = self._text
        if text.raw.get("mamba_num_heads") is None and text.raw.get("mamba_n_heads") is None:
            channels = text.number("mamba_expand") * text.number("hidden_size")
            size = self._state_bytes(channels, text.number("mamba_d_conv"), channels * text.number("mamba_d_state"))
            return LayerShape(keeps=Keeps.STATE, what="Mamba", state_bytes=size)
        heads = text.number("mamba_num_heads", "mamba_n_heads")
        dim = text.number("mamba_head_dim", "mamba_d_head")
        state = text.number("ssm_state_size", "mamba_d_state")
        groups = text.number("n_groups", "mamba_n_groups")
        if groups % self._ranks:
            groups = self._ranks  # each rank has one of its own
        channels = heads * dim + 2 * groups * state
        size = self._state_bytes(channels, text.number("conv_kernel", "mamba_d_conv"), heads * dim * state)
        return LayerShape(keeps=Keeps.STATE, what="Mamba 2", state_bytes=size)

    def _state_bytes(self, channels: int, kernel: int, state: int) -> int:
        """The last steps of a convolution, and the state itself."""
        raw = self._text.raw
        # vLLM's own rule for Nemotron-H has another name and another default.
        is_nemotron = raw.get("model_type") == "nemotron_h"
        said = raw.get("mamba_ssm_cache_dtype") or "float32" if is_nemotron else raw.get("mamba_ssm_dtype")
        of_model = str(said or self._dtype)
        steps = find_element("auto", of_model=self._dtype, setting="dtype").row_bytes(channels * max(kernel - 1, 0))
        return steps + find_element(self._state_dtype, of_model=of_model, setting="state-dtype").row_bytes(state)
