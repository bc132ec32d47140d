"""Corrects modules when they are imported: what SGLang's engine for processors computes wrong or not at all, and what
breaks imports there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def read_windows_in_order(module: ModuleType) -> None:
    """Corrects `torch_native` attention on models with windows.

    It writes a window layer's keys where the pool of windows has room for them, and reads them at the numbers that the
    same tokens have in the other pool. Here both numbers are the same for a reader: a layer's buffer comes in the order
    of the other pool. Without it an engine's own hits differ from its computations, and there is nothing to compare
    with.
    """
    pool = module.SWAKVPool
    for name in ("get_key_buffer", "get_value_buffer"):
        setattr(pool, name, _in_order_of_tokens(getattr(pool, name)))


def _in_order_of_tokens(read: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    def read_ordered(pool: Any, layer: int) -> Any:
        rows = read(pool, layer)
        _, has_window = pool.layers_mapping[layer]
        if not has_window:
            return rows
        # A token without a row in this pool is out of every window: whatever stands there is masked.
        return rows[pool.full_to_swa_index_mapping.clamp(min=0).long()]

    return read_ordered


def norm_on_processors(module: ModuleType) -> None:
    """Of gated delta nets: the kernel is Triton's, which has none for processors."""
    import torch

    def norm(x: Any, g: Any, weight: Any, bias: Any, activation: str, *, eps: float, **_: object) -> Any:
        assert bias is None
        assert activation in ("silu", "swish")
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return (scaled * weight.float() * torch.nn.functional.silu(g.float())).to(x.dtype)

    module.rms_norm_gated = norm  # type: ignore[attr-defined]


def add_shared_experts_on_processors(module: ModuleType) -> None:
    """Adds the shared experts of mixtures of experts in plain torch."""

    def add(hidden_states: Any, gate_weight: Any, shared_output: Any, final_hidden_states: Any) -> None:
        gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
        final_hidden_states += (gate[:, None] * shared_output.float()).to(final_hidden_states.dtype)

    module.fused_gate_sigmoid_mul_add = add  # type: ignore[attr-defined]


def copy_on_processors(module: ModuleType) -> None:
    """Replaces the copies of HiCache's host pools."""
    from host_copies import correct

    correct(module)


def scan_on_processors(module: ModuleType) -> None:
    """Replaces the scan of Mamba 2."""
    from state_spaces import correct

    correct(module)


def pin_nothing(module: ModuleType) -> None:
    """Of adapters: without an accelerator torch pins no memory, and has no need to."""
    import torch

    def without_pins(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_unpinned(*given: Any, pin_memory: bool = False, **options: Any) -> Any:
            return make(*given, **options)

        return make_unpinned

    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, without_pins(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def name_operators(module: ModuleType) -> None:
    """Declares two operators of torchvision, without which it cannot be imported. Its build for a torch with CUDA does
    not load into a torch without. An engine for text calls neither."""
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):
        names = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        # The declarations last as long as this object.
        module.names = names  # type: ignore[attr-defined]


CORRECTIONS: Mapping[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.mha": copy_on_processors,
    "sglang.srt.mem_cache.pool_host.mla": copy_on_processors,
    "sglang.srt.mem_cache.swa_memory_pool": read_windows_in_order,
    "sglang.srt.lora.layers": pin_nothing,
    "sglang.srt.layers.attention.mamba.mamba": scan_on_processors,
    "sglang.kernels.ops.elementwise.elementwise": add_shared_experts_on_processors,
    "torchvision.extension": name_operators,
    "sglang.kernels.ops.attention.fla.fused_norm_gate": norm_on_processors,
}
