"""Stands in for SGLang's copies between an engine's pool and its host pool, which have no build for a CPU engine; and
for the registration of a host pool with a GPU, which asks CUDA even where there is none."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def copy_rows(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Between two pools that have a buffer for each layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_layer_from_pages(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer, out of pages that have all layers, [page, layer, row in page]."""
    pages, rows = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, rows]


def copy_layers_to_pages(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers, into pages that have all layers. Sources: those of the first target, then those of the next."""
    pages, rows = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for at, source in enumerate(src_ptrs):
        dst_ptrs[at // layers][pages, at % layers, rows] = source[src_indices]


def allocate(dims: Any, *, dtype: torch.dtype, device: str, allocator: Any, **_: object) -> torch.Tensor:
    made: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return made


def correct(module: ModuleType) -> None:
    """Replaces the copies in a module of SGLang's host pools."""
    functions: Any = module
    if hasattr(module, "ALLOC_MEMORY_FUNCS"):
        functions.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    functions.transfer_kv_direct = copy_rows
    functions.transfer_kv_per_layer_direct_pf_lf = copy_layer_from_pages
    functions.transfer_kv_all_layer_direct_lf_pf = copy_layers_to_pages
