"""The pages of tokens and the states that SGLang's linker keeps of a model, for each rank by itself.

It says the same as `kvoffload.sglang.pools` does of the pools of a running engine; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.plan.model_shape import LATENT, Keeps, LayerShape, ModelShape, ShapeSettings, read_shape
from kvoffload.plan.sizing import GroupSize

KV_DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Other dtypes are refused by the linker."""
STATE_DTYPE = "float32"
"""The dtype of recurrent states in SGLang, if the model's config does not say it."""
WINDOW_POOLS: Mapping[str, str] = {"gpt_oss": "GptOssForCausalLM"}
"""Models whose layers with a window have a pool of their own in SGLang, by their type, with the name of their class."""
ONE_POOL: Mapping[str, str] = {
    "cohere2": "Cohere2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
"""Models of which SGLang keeps all tokens of each layer, whether it has a window or not."""
_WITHOUT = "run this model without the linker"


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """The options that an SGLang engine is started with."""

    shape: ShapeSettings
    page_tokens: int = 1

    def record_bytes(self, group: GroupSize) -> int:
        """Returns the size of a record: a page of one rank, or a state."""
        return (group.state_bytes or group.token_bytes * self.page_tokens) // self.shape.ranks


def read_pages(config: Mapping[str, Any], settings: PageSettings) -> ModelShape:
    """Reads a model's shape from its config, as SGLang's linker keeps it. ConfigError: the linker does not serve it, or
    the config says too little."""
    dtypes = settings.shape
    if dtypes.kv_dtype not in KV_DTYPES:
        raise ConfigError(
            f"kvoffload does not serve a KV cache of {dtypes.kv_dtype} in SGLang yet",
            remedy=f"allowed are {', '.join(KV_DTYPES)}",
        )
    if dtypes.state_dtype == "auto":
        text = config.get("text_config", config)
        said = text.get("mamba_ssm_dtype") if isinstance(text, Mapping) else None
        dtypes = replace(dtypes, state_dtype=str(said or STATE_DTYPE))
    shape = read_shape(config, dtypes)
    if len({layer.what for layer in shape.layers}) > 1 and any(layer.what == LATENT for layer in shape.layers):
        raise ConfigError(
            "kvoffload does not serve latents together with windows or states in SGLang yet", remedy=_WITHOUT
        )
    return replace(shape, layers=list(_list_layers(shape, settings.page_tokens)))


def _list_layers(shape: ModelShape, page_tokens: int) -> Iterator[LayerShape]:
    """Yields layers with the bytes of all ranks: each rank keeps its own, equal ones too."""
    for layer in shape.layers:
        own = replace(layer, token_bytes=layer.token_bytes * layer.copies, copies=1)
        if layer.keeps is Keeps.STATE and page_tokens > 1:
            raise ConfigError(
                f"kvoffload does not serve states with pages of {page_tokens} tokens in SGLang yet",
                remedy="start the engine with --page-size 1",
            )
        if layer.keeps is not Keeps.WINDOW:
            yield own
        elif layer.what == "sliding window" and shape.model_type in ONE_POOL:
            yield replace(own, keeps=Keeps.TOKENS, what="attention", tokens=0)
        elif layer.what == "sliding window" and shape.model_type in WINDOW_POOLS:
            pages = -(-(layer.tokens - 1) // page_tokens)
            yield replace(own, tokens=pages * page_tokens)
        else:
            raise ConfigError(
                f"it is not known how SGLang keeps the windows of {shape.model_type[:40]!r} models", remedy=_WITHOUT
            )
