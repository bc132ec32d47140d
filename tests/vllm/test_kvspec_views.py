"""The views that vLLM itself makes are where kvspec says, for every layout it has, scale views among them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvoffload.kvspec import (
    LAYOUTS,
    Allocation,
    KVGeometry,
    Registration,
    ScaleView,
    attention_layer,
    find_layout,
    place_dims,
)
from tests.kit.kvspec.builders import one_group
from tests.kit.kvspec.layouts import layer_dims, layout_dims

pytestmark = pytest.mark.vllm

NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(3)]
TOKENS, HEAD_SIZE = 16, 32


@pytest.mark.parametrize("quant", ["NONE", "INT8_PER_TOKEN_HEAD"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("num_blocks", [2, 3, 64])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "_" not in name])
def test_vllms_own_views_are_where_we_say(
    name: str, num_blocks: int, kernel_blocks: int, heads: int, quant: str
) -> None:
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1 import kv_cache_layout as layouts
    from vllm.v1.attention.backends import triton_attn as triton

    is_quantised = quant != "NONE"
    spec = triton.TritonAttentionBackend.customize_spec(
        interface.FullAttentionSpec(
            block_size=TOKENS,
            num_kv_heads=heads,
            head_size=HEAD_SIZE,
            dtype=torch.int8 if is_quantised else torch.bfloat16,
            kv_quant_mode=interface.KVQuantMode[quant],
        )
    )
    theirs = layouts.KVCacheLayout[name]
    layer_stride, block_stride, *_ = interface.compute_layout_strides(spec, num_blocks, len(NAMES), theirs)
    size = len(NAMES) * num_blocks * spec.page_size_bytes
    raw = torch.zeros(size, dtype=torch.int8)
    tensor = interface.KVCacheTensor(size=size, layers=NAMES, layer_stride=layer_stride, block_stride=block_stride)
    try:
        views = interface.create_kv_cache_views(
            raw, spec, num_blocks, theirs, tensor, kernel_block_size=TOKENS // kernel_blocks
        )
    except ValueError:
        assert kernel_blocks > 1, "vLLM splits blocks only where nothing lies between them"
        return

    layers = [
        attention_layer(
            layer,
            block_size=TOKENS,
            num_kv_heads=heads,
            head_size=HEAD_SIZE,
            dtype="int8_per_token_head" if is_quantised else "bfloat16",
        )
        for layer in NAMES
    ]
    assert {layer.page_bytes for layer in layers} == {spec.unpadded_page_size_bytes}
    dims = layout_dims(
        find_layout(name),
        sizes={
            "layer": len(NAMES),
            "block": num_blocks * kernel_blocks,
            "head": heads,
            "token": TOKENS // kernel_blocks,
            "content": spec.state_content_size_bytes,
        },
        strides={"layer": layer_stride, "block": block_stride // kernel_blocks},
    )
    placements = []
    for index, layer in enumerate(layers):
        offset, inner = layer_dims(dims, index)
        placements.append(
            place_dims(layer, allocation="kv", dims=inner, num_blocks=num_blocks, offset=offset, tensor_block_dim=0)
        )
    scales = make_scale_views(triton, views) if is_quantised else {}
    geometry = KVGeometry(
        num_blocks=num_blocks,
        hash_block_size=TOKENS,
        groups=(one_group(*layers),),
        allocations=(Allocation(name="kv", size_bytes=size),),
        placements=tuple(placements),
        scale_views=tuple(ScaleView(name=view, layer=view.rpartition(".")[0]) for view in scales),
        layout=name,
    )
    registration = Registration()
    report = registration.register(geometry, dict(zip(NAMES, views, strict=True)), scale_views=scales)
    assert report.allocations[0].page_bytes == size
    assert registration.unregister() == ()


def make_scale_views(triton: object, views: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Makes scale views by vLLM's own code, which is plain torch: early, before any load (vLLM #51091)."""
    scales = {}
    for name, view in zip(NAMES, views, strict=True):
        impl = SimpleNamespace(_k_scale_cache=None, _v_scale_cache=None)
        # private: an engine runs it at its first forward, and does not show the views that it made
        triton.TritonAttentionImpl._ensure_scale_caches(impl, view)  # type: ignore[attr-defined]
        # private: where it puts them, for itself alone
        scales[f"{name}.k_scale"], scales[f"{name}.v_scale"] = impl._k_scale_cache, impl._v_scale_cache
    return scales
