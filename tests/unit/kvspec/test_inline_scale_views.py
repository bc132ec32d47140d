"""Rule 5 for scales that lie inside the pages: the views over them are checked with the pages, block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvoffload.errors import RegistrationError, StrideError
from kvoffload.kvspec import (
    Allocation,
    KVGeometry,
    Registration,
    ScaleView,
    attention_layer,
    place_dims,
    place_strided,
)
from tests.kit.kvspec.builders import one_group

HEADS, TOKENS, HEAD_SIZE = 2, 4, 8
CONTENT = 2 * (HEAD_SIZE + 4)


def inline_scales(num_blocks: int) -> tuple[KVGeometry, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The layout of vLLM's Triton backend for int8_per_token_head: content [K | scale | V | scale] per head and token,
    and two strided fp32 views over the scales (`_k_scale_cache`, `_v_scale_cache`)."""
    layer = attention_layer(
        "l", block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype="int8_per_token_head"
    )
    geometry = KVGeometry(
        num_blocks=num_blocks,
        hash_block_size=TOKENS,
        groups=(one_group(layer),),
        allocations=(Allocation(name="kv", size_bytes=num_blocks * layer.page_bytes),),
        placements=(place_strided(layer, allocation="kv", block_stride=layer.page_bytes),),
        scale_views=(ScaleView(name="l.k_scale", layer="l"), ScaleView(name="l.v_scale", layer="l")),
    )
    pages = torch.zeros(num_blocks * layer.page_bytes, dtype=torch.int8).view(num_blocks, HEADS, TOKENS, CONTENT)
    return geometry, {"l": pages}, {"l.k_scale": scale_view(pages, 0), "l.v_scale": scale_view(pages, 1)}


def scale_view(pages: torch.Tensor, half: int) -> torch.Tensor:
    """(blocks, tokens, heads) of fp32 over int8 pages."""
    floats = torch.tensor([], dtype=torch.float32).set_(pages.untyped_storage())
    block, head, token, _ = (stride // 4 for stride in pages.stride())
    start = (half * CONTENT // 2 + HEAD_SIZE) // 4
    return floats.as_strided((len(pages), TOKENS, HEADS), (block, token, head), start)


def test_inline_scale_views_lie_inside_their_pages() -> None:
    geometry, tensors, views = inline_scales(3)
    registration = Registration()
    registration.register(geometry, tensors, scale_views=views)
    assert registration.report.allocations[0].page_bytes == geometry.sizes["kv"], "their bytes are the pages'"


def test_a_page_in_several_runs_may_have_inline_scales() -> None:
    """Heads outermost: a block's scales are in several runs."""
    geometry, tensors, views = inline_scales(3)
    (layer,) = geometry.layers.values()
    runs = tuple(
        geometry.placements[0].runs[0]._replace(base=head * 3 * TOKENS * CONTENT, stride=TOKENS * CONTENT,
                                                length=TOKENS * CONTENT)
        for head in range(HEADS)
    )  # fmt: skip
    pages = tensors["l"].view(HEADS, 3, TOKENS, CONTENT).transpose(0, 1)
    dims = (("block", 3, TOKENS * CONTENT), ("head", HEADS, 3 * TOKENS * CONTENT), ("byte", TOKENS * CONTENT, 1))
    placed = place_dims(layer, allocation="kv", dims=dims, num_blocks=3)
    assert placed.runs == runs
    good = {name: scale_view(pages, half) for half, name in enumerate(views)}
    Registration().register(replace(geometry, placements=(placed,)), {"l": pages}, scale_views=good)
    with pytest.raises(StrideError, match=r"scale view l\.k_scale of shape \(3, 4, 2\) is not inside the pages"):
        Registration().register(replace(geometry, placements=(placed,)), {"l": pages}, scale_views=views)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda view: view.as_strided(view.shape, (view.stride(0) + 1, view.stride(1), view.stride(2))),
        lambda view: view.as_strided((2, *view.shape[1:]), view.stride()),
        lambda view: view.as_strided(view.shape, view.stride(), view.storage_offset() + 40),
        lambda view: view.clone(),
    ],
)
def test_a_scale_view_elsewhere_is_refused(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    geometry, tensors, views = inline_scales(3)
    longer = torch.zeros(geometry.sizes["kv"] + 512, dtype=torch.int8)
    geometry = replace(geometry, allocations=(replace(geometry.allocations[0], slack_bytes=512),))
    tensors = {"l": longer[: geometry.sizes["kv"]].view(3, HEADS, TOKENS, CONTENT)}
    views = {name: scale_view(tensors["l"], half) for half, name in enumerate(views)}
    Registration().register(geometry, tensors, scale_views=views)
    with pytest.raises(StrideError, match=r"l\.v_scale") as caught:
        Registration().register(geometry, tensors, scale_views={**views, "l.v_scale": wrong(views["l.v_scale"])})
    assert caught.value.remedy


def test_a_declared_scale_view_that_is_absent_is_refused() -> None:
    """vLLM #51091: a view that is made on the first forward pass overwrites the scales that were restored before it."""
    geometry, tensors, views = inline_scales(2)
    with pytest.raises(RegistrationError, match=r"scale view l\.v_scale is declared and was not given; create scale"):
        Registration().register(geometry, tensors, scale_views={"l.k_scale": views["l.k_scale"]})
