"""Tiny random models, made with transformers' own classes, for running the real engine without a download.

Each takes one shape of KV cache to the engine: one group, window groups with full ones, recurrent state with padded
pages, one latent per token. The expected groups stand next to the builders, so a test that fails on them says that the
engine changed, not that a test was careless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

SEED = 20_261
VOCAB_SIZE = 512
MAX_POSITIONS = 8192
PAD, BOS, EOS = 0, 1, 2
# transformers' default of 0.02 leaves a random model repeating one token, whatever the prompt; a wider start makes
# attention matter, so that wrong KV bytes show in the tokens.
INIT_STD = 0.15

MLA_POSITIONS: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
"""Scaled as in the published models. Without it vLLM takes its CPU kernel for rotary embedding, which rotates wrong
elements of a strided query, and others for one token than for many."""

TOKENIZER_TEXT = (
    "A block that left the accelerator comes back byte for byte, or it does not come back.",
    "The engine asks for a prefix; the cache answers with the longest boundary that every group accepts.",
    "Seven grey boats lay in the harbour while the evening rain moved over the water.",
    "A miss costs one computation. A wrong hit costs the trust of everyone who reads the answer.",
    "She counted the pages twice, wrote 4,096 on the cover, and closed the book.",
    "Eviction begins with the block that nobody needs, never with the root of somebody's prompt.",
    "Between the hills a small train carried letters, apples and a very old clock.",
    "Slots, leases, records and shards: each word means one thing here and in the code.",
    "When the disk is full the write is dropped, a counter moves, and the engine never notices.",
    "Yesterday's question, quickly answered, became the prefix of tomorrow's.",
)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV-cache group of a tiny model as the engine has it."""

    kind: str  # the name of the engine's spec class
    layers: tuple[int, ...]
    block_size: int  # tokens
    page_bytes: int  # one block of one layer; of all layers, where each has pages of its own size
    padded_page_bytes: int  # the same with the padding that makes all groups' pages equal
    pages: tuple[int, ...] = ()  # where each layer has pages of its own size, these in bytes

    @property
    def layer_pages(self) -> tuple[tuple[int, int], ...]:
        """Each layer with the size of its pages."""
        return tuple(zip(self.layers, self.pages or [self.page_bytes] * len(self.layers), strict=True))


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model, the engine arguments it is meant to run with, and what the engine makes of it."""

    name: str
    build: Callable[[Path], None]
    groups: tuple[GroupShape, ...]
    hash_block_size: int
    layout: str
    engine_args: Mapping[str, object] = field(default_factory=dict)
    has_local_prefix_cache: bool = True
    starting: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context that engines of this model need while they start in this process."""

    @property
    def block_size(self) -> int:
        """Tokens between two boundaries that all groups share."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The spec class of each layer, in layer order."""
        return tuple(kind for _, kind in sorted((layer, group.kind) for group in self.groups for layer in group.layers))


def build_dense(folder: Path, *, kv_heads: int = 2) -> None:
    """Qwen3: full attention in every layer, one group."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **shared_shape(),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=64,
    )
    save_model(folder, config, Qwen3ForCausalLM)


def build_sliding(folder: Path) -> None:
    """Gemma3: two window layers, then a full one, twice."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **shared_shape(),
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=128,
        layer_types=_pattern(6, period=3, recurring="sliding_attention"),
    )
    save_model(folder, config, Gemma3ForCausalLM)


def build_gdn(folder: Path, *, kv_heads: int = 2) -> None:
    """Qwen3-Next: three gated-delta-net layers to one of full attention, with experts.

    vLLM's CPU kernel takes linear head dimensions of 128 only.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **shared_shape(),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=_pattern(4, period=4, recurring="linear_attention"),
    )
    save_model(folder, config, Qwen3NextForCausalLM)


def build_mla(folder: Path, *, nope_size: int = 64, value_size: int = 64) -> None:
    """DeepSeek-V2: one latent of 512 + 64 numbers per token instead of keys and values."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **shared_shape(),
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=nope_size,
        qk_rope_head_dim=64,
        v_head_dim=value_size,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        rope_parameters=dict(MLA_POSITIONS),
    )
    save_model(folder, config, DeepseekV2ForCausalLM)


def build_uneven(folder: Path) -> None:
    """Gemma4: every second layer has heads of twice the size, so that its pages are twice as large."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **shared_shape(),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=2,
        head_dim=64,
        global_head_dim=128,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB_SIZE,
        sliding_window=4096,
        layer_types=_pattern(4, period=2, recurring="sliding_attention"),
    )
    save_model(folder, config, Gemma4ForCausalLM)


def _pattern(layers: int, *, period: int, recurring: str) -> list[str]:
    return ["full_attention" if (i + 1) % period == 0 else recurring for i in range(layers)]


def shared_shape() -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INIT_STD,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def save_random_weights(folder: Path, config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Saves random weights, the same ones in every run."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = model_class(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def save_model(folder: Path, config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
    save_random_weights(folder, config, model_class)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    build_tokenizer(TOKENIZER_TEXT).save_pretrained(folder)


def build_tokenizer(text: Iterable[str], **named: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of VOCAB_SIZE tokens and those in `named`, as in `image_token="<image>"`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=MAX_POSITIONS,
        **named,
    )


_ATTENTION_PAGE = 128 * 2 * 2 * 64 * 2  # tokens, keys and values, heads, head dimension, bytes of a bfloat16
_GDN_PAGE = 4 * 128 * 128 * 4 + 3 * (2 * 2 * 128 + 4 * 128) * 2  # float32 state of 4 heads, then 3 steps of convolution

DENSE = TinyModel(
    name="dense",
    build=build_dense,
    groups=(GroupShape("FullAttentionSpec", (0, 1, 2, 3), 128, _ATTENTION_PAGE, _ATTENTION_PAGE),),
    hash_block_size=128,
    layout="LBHNC",
)
SLIDING = TinyModel(
    name="sliding",
    build=build_sliding,
    groups=(
        GroupShape("SlidingWindowSpec", (0, 3), 128, _ATTENTION_PAGE, _ATTENTION_PAGE),
        GroupShape("SlidingWindowSpec", (1, 4), 128, _ATTENTION_PAGE, _ATTENTION_PAGE),
        GroupShape("FullAttentionSpec", (2, 5), 128, _ATTENTION_PAGE, _ATTENTION_PAGE),
    ),
    hash_block_size=128,
    layout="LBHNC",
)
GDN = TinyModel(
    name="gdn",
    build=build_gdn,
    groups=(
        *(GroupShape("MambaSpec", (layer,), 640, _GDN_PAGE, 5 * _ATTENTION_PAGE) for layer in range(3)),
        GroupShape("FullAttentionSpec", (3,), 640, 5 * _ATTENTION_PAGE, 5 * _ATTENTION_PAGE),
    ),
    hash_block_size=640,
    layout="LBHNC",
    # The engine's own choice depends on the processor (bfloat16 instructions), and page sizes with it.
    engine_args={"mamba_ssm_cache_dtype": "float32"},
)
MLA = TinyModel(
    name="mla",
    build=build_mla,
    groups=(GroupShape("MLAAttentionSpec", (0, 1, 2), 16, 16 * (512 + 64) * 2, 16 * (512 + 64) * 2),),
    hash_block_size=16,
    layout="LBNHC",
    # On a processor with AMX the engine would choose another backend, other block sizes and local prefix caching.
    engine_args={"attention_backend": "CPU_MLA"},
    has_local_prefix_cache=False,
)
UNEVEN = TinyModel(
    name="uneven",
    build=build_uneven,
    groups=(GroupShape("UniformTypeKVCacheSpecs", (0, 1, 2, 3), 128, 6 * _ATTENTION_PAGE, 6 * _ATTENTION_PAGE),),
    hash_block_size=128,
    layout="LBHNC",
    # All layers in one group: windows are kept as if they were full attention.
    engine_args={"disable_hybrid_kv_cache_manager": True},
)
ALL_MODELS = (DENSE, SLIDING, GDN, MLA)
