"""Host pools with the interface of SGLang's, made without SGLang."""

from __future__ import annotations

from typing import Any

import torch

from tests.kit.sglang.pools import PAGE

PAGES = 9


class HostPool:
    """The part that both kinds have; a test may set anything else."""

    stores_page_envelope = False
    storage_format_tag = None
    dcp_size = 1

    def __init__(
        self, layout: str, *, layer_num: int = 2, start_layer: int = 0, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.layout, self.page_size, self.page_num = layout, PAGE, PAGES
        self.layer_num = self.target_layer_num = layer_num
        self.start_layer, self.dtype = start_layer, dtype
        self.kv_buffer = torch.zeros(*self.parts, *self._dims(), dtype=dtype)

    @property
    def parts(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def row(self) -> tuple[int, int]:
        """Heads and content of a layer's token."""
        raise NotImplementedError

    def _dims(self) -> tuple[int, ...]:
        layers, rows = self.layer_num, self.page_num * self.page_size
        return {
            "layer_first": (layers, rows),
            "page_first": (rows, layers),
            "page_first_direct": (self.page_num, layers, self.page_size),
            "page_head": (self.page_num, layers, self.page_size),
        }[self.layout] + self.row

    def rows(self, *pages: int) -> torch.Tensor:
        """Of the pages, [part, layer, row]."""
        buffer = self.kv_buffer.reshape(-1, *self._dims())
        if self.layout == "page_first":
            buffer = buffer.transpose(1, 2)
        elif self.layout == "page_first_direct":
            buffer = buffer.transpose(1, 2).flatten(2, 3)
        return buffer[:, :, [page * self.page_size + at for page in pages for at in range(self.page_size)]]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Where each page lies, and how long its pieces are."""
        size = self.kv_buffer.element_size()
        page = self.page_size * self.row[0] * self.row[1] * size
        part_bytes = self.kv_buffer.numel() // (self.parts or (1,))[0] * size
        starts = []
        for row in indices.tolist()[:: self.page_size]:
            at = row // self.page_size
            for part in range((self.parts or (1,))[0]):
                base = self.kv_buffer.data_ptr() + part * part_bytes
                if self.layout == "layer_first":
                    starts += [base + (layer * self.page_num + at) * page for layer in range(self.layer_num)]
                else:
                    starts.append(base + at * page * self.layer_num)
        length = page if self.layout == "layer_first" else page * self.layer_num
        return starts, [length] * len(starts)


class MHATokenToKVPoolHost(HostPool):
    """Keys and values are halves of one buffer."""

    head_num, head_dim, v_head_dim = 2, 8, 8
    parts = (2,)
    row = (2, 8)


class MLATokenToKVPoolHost(HostPool):
    """One latent a token."""

    kv_cache_dim = 24
    parts = ()
    row = (1, 24)


MHATokenToKVPoolHost.__module__ = "sglang.srt.mem_cache.pool_host.mha"
MLATokenToKVPoolHost.__module__ = "sglang.srt.mem_cache.pool_host.mla"


def fill_host(pool: Any, seed: int) -> None:
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
