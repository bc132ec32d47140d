"""A tiny decoder with random weights of a fixed seed: full attention, sliding window and gated delta rule layers.

One request at a time, in float32, so that the same chunk of tokens over the same KV bytes gives the same bits. All that
outlives a chunk goes through the pages, in a cold run as well as in a restored one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, rms_norm, silu

from kvoffload.kvspec import LayerKind

LINEAR, FULL, WINDOW = LayerKind.RECURRENT, LayerKind.FULL_ATTENTION, LayerKind.SLIDING_WINDOW
LAYER_SETS = {
    "full": (FULL, FULL, FULL),
    "window": (FULL, WINDOW, FULL, WINDOW),
    "hybrid": (LINEAR, FULL, LINEAR, WINDOW, FULL, WINDOW),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    layers: tuple[LayerKind, ...] = LAYER_SETS["hybrid"]
    kv_heads: tuple[int, ...] = (2,)
    """Taken in turn by the attention layers of each kind: two values give two page sizes within a group."""
    window: int = 12
    vocabulary: int = 96
    hidden: int = 32
    query_heads: int = 4
    head_size: int = 8
    state_heads: int = 2
    convolution: int = 4

    def __post_init__(self) -> None:
        if any(heads < 1 or self.query_heads % heads for heads in self.kv_heads):
            raise ValueError(f"kv heads {self.kv_heads}: each number divides the {self.query_heads} query heads")

    @property
    def channels(self) -> int:
        """q, k and v of a linear attention layer, side by side."""
        return 3 * self.state_heads * self.head_size

    def kv_heads_of(self, layer: int) -> int:
        return self.kv_heads[self.layers[:layer].count(self.layers[layer]) % len(self.kv_heads)]


@dataclass(frozen=True, eq=False)
class AttentionPages:
    """`values` is (kernel blocks, 2, tokens, heads, size) by strides. `scales`, if quantised, is the same without size.

    A block of the block table is `kernel_split` kernel blocks in a row.
    """

    values: Tensor
    scales: Tensor | None
    kernel_split: int

    def write(self, table: Tensor, start: int, key: Tensor, value: Tensor) -> None:
        block, token = self._address(table, start, start + len(key))
        new = torch.stack([key, value], dim=1)
        if self.scales is not None:
            scale = (new.abs().amax(dim=-1) / 127).clamp(min=1e-8)
            self.scales[block, :, token] = scale
            new = (new / scale[..., None]).round()
        self.values[block, :, token] = new.to(self.values.dtype)

    def read(self, table: Tensor, first: int, end: int) -> Tensor:
        """(tokens, 2, heads, size) in float32."""
        block, token = self._address(table, first, end)
        both = self.values[block, :, token].float()
        return both if self.scales is None else both * self.scales[block, :, token][..., None]

    def _address(self, table: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(first, end, device=table.device)
        unit, token = position // self.values.shape[2], position % self.values.shape[2]
        return table[unit // self.kernel_split] * self.kernel_split + unit % self.kernel_split, token


@dataclass(frozen=True, eq=False)
class StatePages:
    """Recurrent state. Block i of a request holds the state after the last token computed in it.

    So a full block is a snapshot at its boundary, and the one that is being filled is overwritten step by step.
    """

    state: Tensor
    history: Tensor
    block_tokens: int

    def read(self, table: Tensor, start: int) -> tuple[Tensor, Tensor]:
        if start == 0:
            return torch.zeros_like(self.state[0]), torch.zeros_like(self.history[0])
        block = table[(start - 1) // self.block_tokens]
        return self.state[block].clone(), self.history[block].clone()

    def write(self, table: Tensor, end: int, state: Tensor, history: Tensor) -> None:
        block = table[(end - 1) // self.block_tokens]
        self.state[block] = state
        self.history[block] = history.to(self.history.dtype)


LayerPages = AttentionPages | StatePages
"""Views of one layer's memory, whatever its layout: never copies of the cache."""


class AttentionLayer:
    def __init__(self, config: ModelConfig, index: int, draw: Callable[[int, int], Tensor]) -> None:
        self._heads, self._kv_heads, self._size = config.query_heads, config.kv_heads_of(index), config.head_size
        self._window = config.window if config.layers[index] == WINDOW else None
        self._project = draw((self._heads + 2 * self._kv_heads) * config.head_size, config.hidden)
        self._output = draw(config.hidden, config.query_heads * config.head_size)

    def forward(self, x: Tensor, pages: LayerPages, table: Tensor, start: int) -> Tensor:
        assert isinstance(pages, AttentionPages)
        end = start + len(x)
        positions = torch.arange(start, end, device=x.device)
        heads = linear(x, self._project).view(len(x), -1, self._size)
        query, key, value = torch.split(heads, [self._heads, self._kv_heads, self._kv_heads], dim=1)
        pages.write(table, start, rotate(key, positions), value)
        # The chunk's own keys are read back too: what a page rounds away must be gone in a cold run as well.
        first = 0 if self._window is None else max(0, start - self._window + 1)
        key, value = pages.read(table, first, end).repeat_interleave(self._heads // self._kv_heads, dim=2).unbind(1)
        scores = torch.einsum("thd,shd->hts", rotate(query, positions), key) * self._size**-0.5
        distance = positions[:, None] - torch.arange(first, end, device=x.device)
        hidden = (distance < 0) | (distance >= (self._window or end))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return linear(torch.einsum("hts,shd->thd", weights, value).reshape(len(x), -1), self._output)


class LinearAttentionLayer:
    """A short causal convolution, then the gated delta rule: a state of constant size instead of keys and values."""

    def __init__(self, config: ModelConfig, draw: Callable[[int, int], Tensor]) -> None:
        self._heads, self._channels, self._width = config.state_heads, config.channels, config.convolution
        self._project = draw(config.channels + 2 * config.state_heads, config.hidden)
        self._taps = draw(config.channels, config.convolution)
        self._output = draw(config.hidden, config.state_heads * config.head_size)

    def forward(self, x: Tensor, pages: LayerPages, table: Tensor, start: int) -> Tensor:
        assert isinstance(pages, StatePages)
        state, history = pages.read(table, start)
        mixed, gates = torch.split(linear(x, self._project), [self._channels, 2 * self._heads], dim=1)
        # The page keeps the last inputs in a narrower dtype; rounding them all makes chunk borders invisible.
        inputs = torch.cat([history, mixed.to(history.dtype)]).float()
        convolved = silu(torch.einsum("tcw,cw->tc", inputs.unfold(0, self._width, 1), self._taps))
        query, key, value = convolved.view(len(x), 3, self._heads, -1).unbind(1)
        query, key = normalize(query, dim=-1), normalize(key, dim=-1)
        keep, learn = gates.sigmoid().view(len(x), 2, self._heads, 1, 1).unbind(1)
        outputs = []
        for t in range(len(x)):
            state = state * keep[t]
            error = value[t] - torch.einsum("hk,hkv->hv", key[t], state)
            state = state + learn[t] * key[t][:, :, None] * error[:, None, :]
            outputs.append(torch.einsum("hk,hkv->hv", query[t], state))
        pages.write(table, start + len(x), state, inputs[len(x) :])
        return linear(torch.stack(outputs).reshape(len(x), -1), self._output)


class Model:
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        # Drawn on the CPU, so that every device gets the same model.
        generator = torch.Generator().manual_seed(7)

        def draw(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator).div(columns**0.5).to(device)

        self._embedding, self._head = draw(config.vocabulary, config.hidden), draw(config.vocabulary, config.hidden)
        self._layers: list[tuple[AttentionLayer | LinearAttentionLayer, Tensor, Tensor]] = []
        for index, kind in enumerate(config.layers):
            mixer = LinearAttentionLayer(config, draw) if kind == LINEAR else AttentionLayer(config, index, draw)
            up, down = draw(2 * config.hidden, config.hidden), draw(config.hidden, 2 * config.hidden)
            self._layers.append((mixer, up, down))

    @torch.inference_mode()
    def forward(self, tokens: list[int], start: int, pages: list[LayerPages], tables: list[Tensor]) -> Tensor:
        """Logprobs of what follows the last token. `tables` has the block table of each layer's group."""
        x = self._embedding[torch.tensor(tokens, device=self._embedding.device)]
        for (mixer, up, down), layer_pages, table in zip(self._layers, pages, tables, strict=True):
            x = x + mixer.forward(rms_norm(x, x.shape[1:]), layer_pages, table, start)
            x = x + linear(silu(linear(rms_norm(x, x.shape[1:]), up)), down)
        return linear(rms_norm(x[-1], x.shape[1:]), self._head).log_softmax(dim=-1)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of neighbouring pairs."""
    pairs = torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)).contiguous())
    frequencies = 10000.0 ** (-torch.arange(pairs.shape[-1], device=x.device) / pairs.shape[-1])
    angles = (positions[:, None] * frequencies)[:, None, :]
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
