"""DeepSeek-V4 with random weights, and what vLLM's CPU build needs to run it on any processor.

Each layer keeps a window of latents. Two of the three also keep latents of 4 or 128 tokens each, with what is not yet
compressed, and one of them the keys of an indexer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.vllm.tiny_models import (
    BOS,
    EOS,
    INIT_STD,
    MAX_POSITIONS,
    PAD,
    SEED,
    VOCAB_SIZE,
    GroupShape,
    TinyModel,
    save_tokenizer,
)

if TYPE_CHECKING:
    import torch

RATIOS = (0, 4, 128)
"""How many tokens become one latent, layer by layer; 0: there are none but the window's."""
WINDOW = 128
HIDDEN, HEADS, HEAD_DIM, QUERY_RANK = 256, 4, 512, 128
OUTPUT_GROUPS, OUTPUT_RANK = 2, 64
INDEX_HEADS, INDEX_DIM = 8, 128
INDEXED_LATENTS = 512
INDEXED_TOKENS = 4 * INDEXED_LATENTS
"""A layer with an indexer reads all latents of a prompt of this length, and those that it chooses of a longer one."""
EXPERTS, CHOSEN_EXPERTS, INNER = 64, 6, 32  # the kernel that chooses experts takes these numbers, and larger ones
STREAMS = 4
MIXES = (2 + STREAMS) * STREAMS


def build_deepseek_v4(folder: Path) -> None:
    """Three layers, the experts of the first chosen by the token itself. No weight is quantised."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(_make_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    save_tokenizer(folder)


_CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": len(RATIOS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "qk_rope_head_dim": 64,
    "q_lora_rank": QUERY_RANK,
    "o_lora_rank": OUTPUT_RANK,
    "o_groups": OUTPUT_GROUPS,
    "sliding_window": WINDOW,
    "compress_ratios": RATIOS,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_DIM,
    "index_topk": INDEXED_LATENTS,
    "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65_536,
    },
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN_EXPERTS,
    "n_shared_experts": 1,
    "moe_intermediate_size": INNER,
    "num_hash_layers": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def _make_weights() -> dict[str, torch.Tensor]:
    """Norms and the scales of the mixing of streams are ones, all else is random."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    made: dict[str, torch.Tensor] = {}
    for name, shape in _list_shapes():
        if name.endswith("tid2eid"):
            ranks = torch.rand(VOCAB_SIZE, EXPERTS, generator=generator).argsort(dim=1)
            made[name] = ranks[:, :CHOSEN_EXPERTS].to(torch.int32).contiguous()
        elif name.endswith(("norm.weight", "_scale")):
            made[name] = torch.ones(shape)
        else:
            made[name] = INIT_STD * torch.randn(shape, generator=generator)
        if name.endswith(".weight"):
            made[name] = made[name].to(torch.bfloat16)
    return made


def _list_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the tensors by the names that the published checkpoints have."""
    yield from (("embed.weight", (VOCAB_SIZE, HIDDEN)), ("head.weight", (VOCAB_SIZE, HIDDEN)))
    yield from (("norm.weight", (HIDDEN,)), ("hc_head_fn", (STREAMS, STREAMS * HIDDEN)))
    yield from (("hc_head_base", (STREAMS,)), ("hc_head_scale", (1,)))
    for layer, ratio in enumerate(RATIOS):
        shapes = {**_attention_shapes(ratio), **_expert_shapes(by_token=layer == 0)}
        for part in ("attn", "ffn"):
            shapes |= {f"{part}_norm.weight": (HIDDEN,), f"hc_{part}_fn": (MIXES, STREAMS * HIDDEN)}
            shapes |= {f"hc_{part}_base": (MIXES,), f"hc_{part}_scale": (3,)}
        yield from ((f"layers.{layer}.{name}", shape) for name, shape in shapes.items())


def _attention_shapes(ratio: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a.weight": (QUERY_RANK, HIDDEN),
        "q_norm.weight": (QUERY_RANK,),
        "wq_b.weight": (HEADS * HEAD_DIM, QUERY_RANK),
        "wkv.weight": (HEAD_DIM, HIDDEN),
        "kv_norm.weight": (HEAD_DIM,),
        "wo_a.weight": (OUTPUT_GROUPS * OUTPUT_RANK, HEADS * HEAD_DIM // OUTPUT_GROUPS),
        "wo_b.weight": (HIDDEN, OUTPUT_GROUPS * OUTPUT_RANK),
        "attn_sink": (HEADS,),
    }
    if ratio:
        shapes |= _compressor_shapes("compressor", ratio, HEAD_DIM)
    if ratio == 4:
        shapes |= {"indexer.wq_b.weight": (INDEX_HEADS * INDEX_DIM, QUERY_RANK)}
        shapes |= {"indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN)}
        shapes |= _compressor_shapes("indexer.compressor", ratio, INDEX_DIM)
    return {f"attn.{name}": shape for name, shape in shapes.items()}


def _compressor_shapes(name: str, ratio: int, size: int) -> dict[str, tuple[int, ...]]:
    width = (2 if ratio == 4 else 1) * size  # latents of 4 tokens overlap: each is made of 8
    weights = {f"{name}.{part}.weight": (width, HIDDEN) for part in ("wkv", "wgate")}
    return {**weights, f"{name}.ape": (ratio, width), f"{name}.norm.weight": (size,)}


def _expert_shapes(*, by_token: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (EXPERTS, HIDDEN)}
    shapes |= {"gate.tid2eid": (VOCAB_SIZE, CHOSEN_EXPERTS)} if by_token else {"gate.bias": (EXPERTS,)}
    for name in ("shared_experts", *(f"experts.{number}" for number in range(EXPERTS))):
        shapes |= {f"{name}.{part}.weight": (INNER, HIDDEN) for part in ("w1", "w3")}
        shapes |= {f"{name}.w2.weight": (HIDDEN, INNER)}
    return {f"ffn.{name}": shape for name, shape in shapes.items()}


# ---- what the CPU build lacks ----


@contextmanager
def on_any_processor() -> Iterator[None]:
    """Lets an engine that starts meanwhile cache prefixes, and skips the test where vLLM has no kernels for it.

    On a processor without AMX vLLM caches no prefixes of a model with latents. None of this model's kernels needs AMX,
    and on a processor that has it nothing is changed.
    """
    import pytest
    import torch

    pytest.importorskip("vllm.models.deepseek_v4.cpu", reason="this vLLM has no DeepSeek-V4 for processors")
    from vllm import _custom_ops  # noqa: F401  # private: what loads vLLM's kernels
    from vllm.platforms import current_platform

    if not hasattr(torch.ops._C, "flash_mla_with_kvcache_cpu"):  # private: what vLLM calls its own kernels
        pytest.skip("vLLM has no kernels of DeepSeek-V4 for this processor")
    decide = current_platform.check_and_update_config

    def decide_as_with_amx(config: Any) -> None:
        # private: what vLLM asks of torch
        with patch("torch.cpu._is_amx_tile_supported", return_value=True):
            decide(config)

    with patch.object(type(current_platform), "check_and_update_config", staticmethod(decide_as_with_amx)):
        yield


def replace_triton_kernels() -> None:
    """Puts torch functions in the place of five small Triton kernels, for this process.

    They prepare a step's metadata. vLLM has no other form of them for processors, and does not bring the Triton that
    compiles for these. Attention, compression and the indexer have compiled kernels, which stay.
    """
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    places: Any = (metadata, sparse_swa, compressor_utils, indexer, cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder)
    requests, windows, slots, chunks, plans = places
    requests._token_request_mapping_kernel = _Launched(_map_tokens_to_requests)  # private: vLLM's kernels
    slots._COMPRESSED_SLOT_MAPPING_KERNEL = _map_compressed_slots  # private: the same
    chunks._BUILD_PREFILL_CHUNK_METADATA_KERNEL = _describe_prefills  # private: the same
    # Kernels for GPUs read these tables; those for processors find the same in positions and block tables.
    windows._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = _do_nothing  # private: the same
    windows._COMPUTE_PREFILL_METADATA_KERNEL = _do_nothing  # private: the same
    # Of the five plans that vLLM 0.32 reads there, its own function makes three. On a processor each is None.
    plans.build_tile_scheduler = lambda self, decodes: dict.fromkeys(("swaonly", "c4a", "c128a", "c1a", "c2a"))


class _Launched:
    """A function that is called as Triton's kernels are: `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


def _do_nothing(*_: object, **__: object) -> None:
    pass


def _owners(starts: torch.Tensor) -> torch.Tensor:
    """Returns for each element the piece that it is in, from where the pieces start and the last one ends."""
    import torch

    return torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())


def _positions(owners: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns each token's position in its request, whose tokens in this step are its last."""
    import torch

    return torch.arange(len(owners)) - starts[owners + 1] + lengths[owners]


def _map_tokens_to_requests(
    starts: torch.Tensor, out: torch.Tensor, requests: int, mapped: int, tokens: int, **_: int
) -> None:
    import torch

    numbers = torch.arange(tokens)
    found = torch.searchsorted(starts[1 : requests + 1].long(), numbers, right=True).clamp(max=requests - 1)
    out[:tokens] = torch.where(numbers < mapped, found, 0)


def _map_compressed_slots(
    out: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    block_size: int,
    ratio: int,
    *_: int,
) -> None:
    """The last token of those that become one latent writes it; -1: the token writes none."""
    import torch

    owners = _owners(starts)
    positions = _positions(owners, starts, lengths)
    writes = ((positions + 1) % ratio == 0) & (slots[: len(owners)] != -1)
    latents = positions // ratio
    blocks = table[owners, torch.where(writes, latents // block_size, 0)].long()
    out[: len(owners)] = torch.where(writes, blocks * block_size + latents % block_size, -1)


def _describe_prefills(
    starts: torch.Tensor,
    lengths: torch.Tensor,
    compressed_starts: torch.Tensor,
    row_starts: torch.Tensor,
    owners_out: torch.Tensor,
    first_out: torch.Tensor,
    end_out: torch.Tensor,
    begin: int,
    end: int,
    *_: int,
    num_reqs: int,
    COMPRESS_RATIO: int,  # noqa: N803  (vLLM's own name)
) -> None:
    """Finds for each token of a prefill the latents that were made before it or by it."""
    owners = _owners(starts[: num_reqs + 1])
    first = row_starts[owners]
    first_out[:] = first[begin:end]
    end_out[:] = (first + (_positions(owners, starts, lengths) + 1) // COMPRESS_RATIO)[begin:end]
    owners_out[:] = _owners(compressed_starts[: num_reqs + 1])


_LATENT = 584  # bytes: 448 numbers of one byte, 64 of two, scales and a byte that fills up
INDEX_KEYS_BYTES = 64 * (INDEX_DIM + 4)
"""At the beginning of a block of compressed latents: 64 keys, each with its scale."""
_WINDOWS = 64 * _LATENT, 37_440  # the bytes of a page, and the same up to the next multiple of 576
_LATENTS = (INDEX_KEYS_BYTES, 64 * _LATENT, 2 * _LATENT), 8_640 + 37_440 + 1_728
# Latents and weights in float32, for latents that overlap twice.
_STATES = (4 * 4 * INDEX_DIM * 4, 4 * 4 * HEAD_DIM * 4), 8_640 + 32_832
_LONG_STATES = 8 * 2 * HEAD_DIM * 4, 32_832

WORKER = "tests.vllm.worker_without_triton.WorkerWithoutTriton"
DEEPSEEK_V4 = TinyModel(
    name="deepseek-v4",
    build=build_deepseek_v4,
    groups=(
        *(GroupShape("SlidingWindowMLASpec", (layer,), 64, *_WINDOWS, _WINDOWS[:1]) for layer in range(3)),
        GroupShape("MLAAttentionSpec", (1, 1, 2), 256, sum(_LATENTS[0]), _LATENTS[1], _LATENTS[0]),
        GroupShape("SlidingWindowMLASpec", (1, 1), 4, sum(_STATES[0]), _STATES[1], _STATES[0]),
        GroupShape("SlidingWindowMLASpec", (2,), 8, *_LONG_STATES, _LONG_STATES[:1]),
    ),
    hash_block_size=4,
    layout="BLHNC",
    engine_args={"worker_cls": WORKER},
    starting=on_any_processor,
)
