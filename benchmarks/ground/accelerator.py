"""How long a step of a model takes on its GPUs: prefill by FLOPs, decode by the bytes that it reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.ground.models import Model
from kvoffload.connector.engine.layer_shapes import describe_spec
from kvoffload.plan.exact import read_rows
from kvoffload.plan.model_shape import Keeps, ModelShape, ShapeSettings, read_shape
from kvoffload.plan.sizing import size_model

ALL_REDUCE_S = 10e-6
"""The least that one takes: NCCL's and vLLM's own on NVLink are at 8 to 15 us for small messages."""
NVLINK_RATE = 300e9
"""Bytes a second that a rank sends: two thirds of the 450 GB/s of each direction."""
ALL_REDUCES_PER_LAYER = 2
STEP_S = 0.5e-3
"""The time that each step takes in addition to its kernels: launches, sampling, sending its outputs."""


@dataclass(frozen=True)
class Share:
    """A request's part of a step: tokens to compute, behind so many."""

    tokens: int
    context: int


def read_layers(model: Model) -> ModelShape:
    """Returns the layers of a model, of all ranks together: by its config, or by the specs of its own caches."""
    if model.make_layers is None:
        return read_shape(model.config, ShapeSettings(kv_dtype=model.kv_dtype, ranks=model.tensor_ranks))
    alone = dict(model.make_layers(replace(model, ranks=1, stages=1, context_ranks=1)))
    rows = [row for spec in alone.values() if (row := describe_spec(spec)) is not None]
    layers = [
        replace(layer, copies=1 if layer.keeps is Keeps.STATE else max(model.tensor_ranks // row.get("heads", 1), 1))
        for row, layer in zip(rows, read_rows(rows, 1), strict=True)
    ]
    return ModelShape(model_type=model.name, layers=layers, max_tokens=model.max_model_len)


class StepCost:
    """Computes how long the steps of one model take."""

    def __init__(self, model: Model) -> None:
        self._model = model
        shape = read_layers(model)
        self._sizing = size_model(shape)
        config = model.config
        queries = config["num_attention_heads"]
        keys = config.get("head_dim") or config["hidden_size"] // queries
        if "qk_nope_head_dim" in config:
            keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        values = config.get("v_head_dim", keys)
        self._attention_flops = 2 * queries * (keys + values)
        """Returns the operations for a token and one that it sees, in one layer."""
        self._full_layers = sum(layer.keeps is Keeps.TOKENS for layer in shape.layers)
        self._windows = [layer.tokens for layer in shape.layers if layer.keeps is Keeps.WINDOW]
        self._layers = config["num_hidden_layers"]

    def seconds(self, shares: Sequence[Share], *, drafts: int = 0) -> float:
        """Returns how long each stage takes for a step; 0 if nothing runs. `drafts` counts the passes of a
        drafting layer. A stage has its part of the work and of the GPUs."""
        if not shares:
            return 0.0
        model, tokens = self._model, sum(share.tokens for share in shares)
        flops = 2 * model.active_parameters * tokens + sum(self._attend(share) for share in shares)
        read = self._weights(tokens) + sum(self._read(share.context + share.tokens) for share in shares)
        computing_s = flops / (model.ranks * model.gpu.flops)
        reading_s = read / (model.ranks * model.gpu.memory_rate)
        drafting_s = drafts * (self._weights(tokens) / self._layers) / (model.ranks * model.gpu.memory_rate)
        return max(computing_s, reading_s) + drafting_s + self._reduce(tokens) + STEP_S

    def prefill_rate(self, *, chunk: int = 8192) -> float:
        """Tokens a second of prompts alone."""
        return chunk / self.seconds([Share(chunk, 0)])

    def _attend(self, share: Share) -> float:
        seen = share.context + share.tokens / 2
        layers = self._full_layers * seen + sum(min(seen, window) for window in self._windows)
        return self._attention_flops * share.tokens * layers

    def _read(self, tokens: int) -> int:
        """Returns the bytes of so many tokens that all ranks read, each its own copy."""
        return sum(group.hit_bytes(tokens) * group.copies for group in self._sizing.groups)

    def _weights(self, tokens: int) -> float:
        """Bytes of those that some token needs: every token chooses its own experts."""
        model = self._model
        share = model.active_parameters / model.parameters
        return model.weight_bytes * (1 - (1 - share) ** tokens)

    def _reduce(self, tokens: int) -> float:
        ranks = self._model.tensor_ranks
        if ranks == 1:
            return 0.0
        sent = 2 * (ranks - 1) / ranks * tokens * self._model.config["hidden_size"] * 2
        layers = self._layers / self._model.stages
        return layers * ALL_REDUCES_PER_LAYER * (ALL_REDUCE_S + sent / NVLINK_RATE)
