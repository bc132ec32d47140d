"""Pools with the interface of SGLang's, made without SGLang."""

from __future__ import annotations

from typing import Any

import torch

PAGE = 4


class Pool:
    """The part that both kinds have; a test may set anything else."""

    def __init__(
        self,
        *,
        size: int = 32,
        page_size: int = PAGE,
        layer_num: int = 2,
        start_layer: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.size, self.page_size, self.layer_num, self.start_layer = size, page_size, layer_num, start_layer
        self.dtype = self.store_dtype = dtype
        self.data_ptrs = torch.zeros(layer_num, dtype=torch.int64)
        self.custom_mem_pool = None

    @property
    def rows(self) -> int:
        return self.size + self.page_size


class MHATokenToKVPool(Pool):
    """Keys and values are halves of one storage if their shapes are equal, whose rows are whole pages."""

    def __init__(self, *, heads: int = 2, head_dim: int = 8, v_head_dim: int = 8, **shape: Any) -> None:
        super().__init__(**shape)
        layer_num, page_size, dtype = self.layer_num, self.page_size, self.dtype
        self.head_num, self.head_dim, self.v_head_dim = heads, head_dim, v_head_dim
        self.kv_cache_layout = "nhd"
        self.k_scale_buffer = None
        self.is_quantized_kv_cache = False
        whole = -(-self.rows // page_size) * page_size
        if head_dim == v_head_dim:
            fused = [torch.zeros(2, whole, heads, head_dim, dtype=dtype) for _ in range(layer_num)]
            self.k_buffer = [both[0, : self.rows] for both in fused]
            self.v_buffer = [both[1, : self.rows] for both in fused]
        else:
            self.k_buffer = [torch.zeros(self.rows, heads, head_dim, dtype=dtype) for _ in range(layer_num)]
            self.v_buffer = [torch.zeros(self.rows, heads, v_head_dim, dtype=dtype) for _ in range(layer_num)]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        return sum(map(_bytes, self.k_buffer)), sum(map(_bytes, self.v_buffer))


class MLATokenToKVPool(Pool):
    """One buffer a layer."""

    def __init__(self, *, dim: int = 24, **shape: Any) -> None:
        super().__init__(**shape)
        self.kv_cache_dim = dim
        self.kv_scale_buffer = None
        self.use_dsa = self.dcp_replicated = self.layer_shard_enabled = False
        self.kv_buffer = [torch.zeros(self.rows, 1, dim, dtype=self.dtype) for _ in range(self.layer_num)]

    def get_kv_size_bytes(self) -> int:
        return sum(map(_bytes, self.kv_buffer))


class SWAKVPool:
    """Layers 0, 2 and so on see a window, the others all; each kind has a pool of its own."""

    def __init__(self, *, size: int = 32, size_swa: int = 24, page_size: int = PAGE, start_layer: int = 0) -> None:
        self.size, self.size_swa, self.page_size, self.start_layer = size, size_swa, page_size, start_layer
        self.dtype = torch.bfloat16
        self.full_kv_pool = MHATokenToKVPool(size=size, page_size=page_size)
        self.swa_kv_pool = MHATokenToKVPool(size=size_swa, page_size=page_size, heads=1)
        self.layer_num = 4
        self.layers_mapping = {1: (0, False), 3: (1, False), 0: (0, True), 2: (1, True)}
        self.full_to_swa_index_mapping = torch.zeros(size + page_size + 1, dtype=torch.int64)
        self.custom_mem_pool = None
        self.post_capture_active = False


class MambaPool:
    """A slot holds the states of all recurrent layers at one length; slot 0 is unused."""

    class State:
        """Layer by layer, slot by slot."""

        def __init__(self, layers: int, slots: int) -> None:
            self.conv = [torch.zeros(layers, slots, 6, 3), torch.zeros(layers, slots, 2, 3)]
            self.temporal = torch.zeros(layers, slots, 2, 4, 5)
            self.replayssm_d = None

    def __init__(self, *, size: int = 9, layers: tuple[int, ...] = (0, 2)) -> None:
        self.size, self.mamba_layer_ids = size, list(layers)
        self.mamba_cache = self.State(len(layers), size + 1)
        self.custom_mem_pool = None
        self.enable_linear_replayssm = False


class HybridLinearKVPool:
    """Layers 1 and 3 attend to all tokens; the others have states, in a pool that requests share."""

    def __init__(self, *, size: int = 32, page_size: int = PAGE, states: int = 9) -> None:
        self.size, self.page_size, self.start_layer, self.use_mla = size, page_size, 0, False
        self.dtype = torch.bfloat16
        self.full_kv_pool = MHATokenToKVPool(size=size, page_size=page_size)
        self.mamba_pool = MambaPool(size=states)
        self.full_attention_layer_id_mapping = {1: 0, 3: 1}
        self.custom_mem_pool = None


SWAKVPool.__module__ = "sglang.srt.mem_cache.swa_memory_pool"

for _kind in (MHATokenToKVPool, MLATokenToKVPool, HybridLinearKVPool, MambaPool, MambaPool.State):
    _kind.__module__ = "sglang.srt.mem_cache.memory_pool"


def fill(pool: Any, seed: int) -> None:
    """Other numbers in every row of every buffer."""
    random = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
        buffer.copy_(torch.randn(buffer.shape, generator=random))


def clear(pool: Any) -> None:
    for buffer in buffers_of(pool):
        buffer.zero_()


def copy_rows(pool: Any, rows: list[int]) -> list[torch.Tensor]:
    return [buffer[rows].clone() for buffer in buffers_of(pool)]


def buffers_of(pool: Any) -> list[torch.Tensor]:
    """By rows, or by slots."""
    if isinstance(pool, MambaPool):
        return [layer for kind in (*pool.mamba_cache.conv, pool.mamba_cache.temporal) for layer in kind]
    return [*getattr(pool, "k_buffer", ()), *getattr(pool, "v_buffer", ()), *getattr(pool, "kv_buffer", ())]


def rows_of(*pages: int, page_size: int = PAGE) -> list[int]:
    return [page * page_size + at for page in pages for at in range(page_size)]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
