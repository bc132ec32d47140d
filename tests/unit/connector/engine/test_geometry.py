"""vLLM's configuration objects as geometries, registered on tensors that vLLM's own code made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.kit.connector.registered import contradict, describe, register

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvoffload.connector.engine.geometry import describe_layer, with_scale_views
from kvoffload.errors import (
    BlockCountError,
    GeometryError,
    HoleError,
    StorageError,
    StrideError,
    UnknownLayerError,
)
from kvoffload.kvspec import LayerKind, Quantisation, Registration, ReuseRule
from tests.kit.connector.engine_configs import (
    TOKEN_BYTES,
    chunked,
    full,
    latent_window,
    make_config,
    make_tensors,
    mla,
    per_token_head,
    recurrent,
    ring,
    window,
)
from tests.kit.transfer.plain_copy import PlainCopy

PAGE = 4 * TOKEN_BYTES


UNIFORM = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": full(), "b": full(head_size=16), "c": full()})
SPARSE = UniformTypeKVCacheSpecs(
    block_size=4, kv_cache_specs={"a": mla(), "a.indexer": mla(head_size=12, cache_role=SparseCacheRole.INDEXER)}
)
# As of DeepSeek-V4: each layer's window, then what is compressed with an indexer's keys, then states of compressors.
COMPRESSED = UniformTypeKVCacheSpecs(
    block_size=16,
    kv_cache_specs={
        "b.indexer": mla(16, tokens_per_state=4, head_size=12, cache_role=SparseCacheRole.INDEXER, alignment=64),
        "b": mla(16, tokens_per_state=4, alignment=64),
        "c": mla(16, tokens_per_state=8, alignment=64),
    },
)
COMPRESSORS = UniformTypeKVCacheSpecs(
    block_size=2,
    kv_cache_specs={
        "b.indexer.state": latent_window(2, tokens=4, head_size=12, alignment=64),
        "b.state": latent_window(2, tokens=4, alignment=64),
    },
)
MODELS: dict[str, list[tuple[Sequence[str], KVCacheSpec]]] = {
    "dense": [(["a", "b", "c"], full())],
    "fp8": [(["a"], full(dtype=torch.float8_e4m3fn, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR))],
    "mla": [(["a", "b"], mla())],
    "window hybrid": [(["a", "b"], full()), (["c", "d"], window())],
    "chunk hybrid": [(["a"], full()), (["b"], chunked())],
    "recurrent hybrid": [(["a"], recurrent()), (["b"], recurrent()), (["c"], full())],
    "groups of different sizes": [(["a", "b"], full()), (["c"], window())],
    "blocks of different sizes": [(["a"], full(8)), (["b"], window(4, head_size=16))],
    "pages of different sizes": [(["a", "b", "c"], UNIFORM)],
    "a stride beyond the page": [(["a", "b"], full(block_stride_alignment=384))],
    "a sparse indexer in the latents' group": [(["a", "a.indexer"], SPARSE)],
    "compressed latents beside a ring": [(["a"], mla(8, tokens_per_state=4)), (["a.ring"], ring(2))],
    "compressed latents with padded pages": [(["a", "b"], mla(8, tokens_per_state=4, alignment=128))],
    "compressed latents beside windows and states": [
        (["a.window"], latent_window(4, alignment=64)),
        (["b.indexer", "b", "c"], COMPRESSED),
        (["b.indexer.state", "b.state"], COMPRESSORS),
        (["c.state"], latent_window(4, tokens=16, dtype=torch.float32, alignment=64)),
    ],
    "a window of latents that is computed again": [(["a"], mla()), (["b"], latent_window(bounded_replay=True))],
}
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
# vLLM's own rules: states are one run of bytes, and so are pages of different sizes or strides.
RUNS_ONLY = {
    "recurrent hybrid",
    "pages of different sizes",
    "a stride beyond the page",
    "a sparse indexer in the latents' group",
    "compressed latents with padded pages",
    "compressed latents beside windows and states",
}


HEADS_APART = {"LHBNC", "BHLNC"}
# Several groups with pages of different sizes: vLLM packs them, block by block.
PACKED, BLOCKS_APART = {"compressed latents beside windows and states"}, {"BLHNC", "BLNHC"}
BUILT = [
    (model, layout)
    for model in MODELS
    for layout in LAYOUTS
    if not (model in RUNS_ONLY and layout in HEADS_APART) and (model not in PACKED or layout in BLOCKS_APART)
]


@pytest.mark.parametrize("num_blocks", [2, 5])
@pytest.mark.parametrize(("model", "layout"), BUILT)
def test_every_model_registers_in_every_layout_on_vllms_own_tensors(model: str, layout: str, num_blocks: int) -> None:
    config = make_config(*MODELS[model], num_blocks=num_blocks, layout=layout)
    tensors = make_tensors(config)
    geometry = describe(config, tensors)
    registration = register(geometry, tensors)
    assert geometry.num_blocks == num_blocks
    for group, (names, _) in zip(geometry.groups, MODELS[model], strict=True):
        assert [layer.name for layer in group.layers] == list(names)
    assert registration.page_map.num_blocks == num_blocks


def test_dense_is_one_group_of_prefix_blocks() -> None:
    config = make_config((["a", "b"], full()))
    (group,) = describe(config, make_tensors(config)).groups
    assert (group.reuse_rule, group.window, group.block_size) == (ReuseRule.PREFIX, 0, 4)
    assert group.record_bytes == 2 * PAGE


def test_groups_of_a_hybrid_lie_on_the_same_bytes_by_declaration() -> None:
    """vLLM lays out a Qwen3-Next so: states are shorter than the page that attention needs, and the rest is padding."""
    config = make_config((["r0"], recurrent()), (["r1"], recurrent()), (["full"], full()))
    geometry = describe(config, make_tensors(config))
    assert geometry.overlays == (("group 0", "group 1", "group 2"),)
    assert [group.reuse_rule for group in geometry.groups] == [
        ReuseRule.EXACT_BOUNDARY,
        ReuseRule.EXACT_BOUNDARY,
        ReuseRule.PREFIX,
    ]
    assert [group.record_bytes for group in geometry.groups] == [152, 152, PAGE]
    (state,) = geometry.placements_of["r0"]
    assert [(run.base, run.length) for run in state.padding] == [(152, PAGE - 152)]


@pytest.mark.parametrize(
    ("spec", "rule", "tokens"),
    [
        (window(tokens=6), ReuseRule.WINDOW, 6),
        (window(tokens=6, extra_retained_tokens=2), ReuseRule.WINDOW, 8),
        (chunked(tokens=8), ReuseRule.CHUNK, 8),
        (full(sliding_window=6), ReuseRule.PREFIX, 0),  # the engine keeps all of its blocks
    ],
)
def test_windows_come_from_the_spec(spec: KVCacheSpec, rule: ReuseRule, tokens: int) -> None:
    config = make_config((["a"], spec))
    (group,) = describe(config, make_tensors(config)).groups
    assert (group.reuse_rule, group.window) == (rule, tokens)


def test_each_layer_of_a_uniform_group_has_its_own_page_bytes() -> None:
    config = make_config((["a", "b", "c"], UNIFORM), num_blocks=3)
    tensors = make_tensors(config)
    geometry = describe(config, tensors)
    assert [layer.page_bytes for layer in geometry.groups[0].layers] == [PAGE, 2 * PAGE, PAGE]
    assert geometry.groups[0].record_bytes == 4 * PAGE
    # Registering the flattened configuration of the scheduler would count bytes wrongly; the worker's has every spec.
    assert register(geometry, tensors).page_map.groups[0].record_bytes == 4 * PAGE


def test_rows_of_a_packed_layout_are_padded_by_declaration() -> None:
    """Block-outermost, groups of different bytes: the shorter row ends before the next block begins."""
    config = make_config((["a", "b"], full()), (["c"], window()), num_blocks=3, layout="BLHNC")
    geometry = describe(config, make_tensors(config))
    assert [(padding.group, padding.base, padding.length, padding.count) for padding in geometry.paddings] == [
        ("group 1", PAGE, PAGE, 3)
    ]


def test_a_layer_forgotten_in_the_middle_of_a_row_is_a_hole_and_no_padding() -> None:
    config = make_config((["a", "b", "c"], full()), num_blocks=3, layout="BLHNC")
    tensors = make_tensors(config)
    (row,) = config.kv_cache_tensors
    config.kv_cache_tensors = [
        replace(row, layers=["a"]),
        replace(row, layers=["c"], offset=row.offset + 2 * row.layer_stride),
    ]
    config.kv_cache_groups[0].layer_names.remove("b")
    del tensors["b"]
    with pytest.raises(HoleError, match=f"bytes {PAGE} to {2 * PAGE} belong to nothing"):
        register(describe(config, tensors), tensors)


def test_a_head_outermost_page_is_a_run_per_head() -> None:
    config = make_config((["a"], full()), num_blocks=3, layout="LHBNC")
    tensors = make_tensors(config)
    geometry = describe(config, tensors)
    (placement,) = geometry.placements_of["a"]
    assert [(run.base, run.stride, run.length) for run in placement.runs] == [
        (0, PAGE // 2, PAGE // 2),
        (3 * PAGE // 2, PAGE // 2, PAGE // 2),
    ]
    register(geometry, tensors)


def test_kernel_blocks_smaller_than_blocks_are_one_page() -> None:
    config = make_config((["a", "b"], full(8)), num_blocks=3)
    tensors = make_tensors(config, kernel_block_sizes=[2])
    assert tensors["a"].shape[0] == 12
    geometry = describe(config, tensors)
    register(geometry, tensors)
    assert geometry.groups[0].record_bytes == 2 * 8 * TOKEN_BYTES


@pytest.mark.parametrize("is_listed", [False, True])
def test_layers_that_share_pages_are_declared_whether_the_engine_lists_them_or_not(is_listed: bool) -> None:
    """vLLM adds them to the groups after the connector was given its configuration; their tensors are registered."""
    config = make_config((["a", "b"], full()))
    tensors = make_tensors(config)
    if is_listed:
        config.kv_cache_groups[0].layer_names.append("late")
    tensors["late"] = tensors["b"]
    geometry = describe(config, tensors, sharing={"late": "b"})
    assert [(layer.name, layer.alias_of) for layer in geometry.groups[0].layers] == [
        ("a", None),
        ("b", None),
        ("late", "b"),
    ]
    assert geometry.groups[0].record_bytes == 2 * PAGE
    register(geometry, tensors)


def test_a_shared_layer_that_has_pages_elsewhere_is_refused() -> None:
    config = make_config((["a", "b"], full()))
    tensors = make_tensors(config)
    tensors["late"] = tensors["a"]
    with pytest.raises(StrideError, match="late"):
        register(describe(config, tensors, sharing={"late": "b"}), tensors)


def test_a_layer_without_pages_that_shares_none_is_refused() -> None:
    config = make_config((["a"], full()))
    tensors = make_tensors(config)
    config.kv_cache_groups[0].layer_names.append("lost")
    with pytest.raises(UnknownLayerError, match="lost"):
        describe(config, tensors)


def test_groups_that_the_engine_does_not_cache_are_excluded_and_accounted_for() -> None:
    config = make_config((["a"], full()), (["b"], window()))
    config.kv_cache_groups[1].enable_kv_transfer = False
    tensors = make_tensors(config)
    geometry = describe(config, tensors)
    assert [group.is_stored for group in geometry.groups] == [True, False]
    assert geometry.groups[1].reuse_rule is ReuseRule.NOTHING
    register(geometry, tensors)


def test_per_token_head_pages_have_inline_scales_and_checked_views() -> None:
    config = make_config((["a"], per_token_head()), num_blocks=3)
    tensors = make_tensors(config)
    geometry = describe(config, tensors)
    layer = geometry.layers["a"]
    assert layer.quantisation is Quantisation.INT8_PER_TOKEN_HEAD
    assert layer.page_bytes == 4 * 2 * 24
    scales = tensors["a"].untyped_storage()
    floats = torch.tensor([], dtype=torch.float32).set_(scales)
    view = torch.as_strided(floats, (3, 4, 2), (48, 6, 24), 2)
    declared = with_scale_views(geometry, {"a.k_scales": view})
    Registration().register(declared, tensors, scale_views={"a.k_scales": view})
    moved = torch.as_strided(floats, (3, 4, 2), (24, 6, 24), 2)
    with pytest.raises(StrideError, match=r"a\.k_scales"):
        Registration().register(declared, tensors, scale_views={"a.k_scales": moved})


def test_formats_that_nobody_else_understands_are_opaque_bytes() -> None:
    layer = describe_layer("a", full(kv_quant_mode=KVQuantMode.NVFP4, state_content_bytes=9))
    assert layer.quantisation is Quantisation.OPAQUE
    assert layer.page_bytes == 2 * 4 * 9
    assert describe_layer("a", mla()).kind is LayerKind.MLA


def test_a_kind_of_cache_that_no_rule_covers_is_never_stored() -> None:
    spec = CrossAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    with pytest.raises(GeometryError, match="layer 'a': its content is of no use"):
        describe_layer("a", spec)
    assert not describe_layer("a", spec, excluded="an encoder's").is_stored


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_ring_is_excluded_and_its_bytes_are_accounted_for(is_registered: bool) -> None:
    """An engine may keep the memory of such a group as one raw tensor, without a tensor for each layer."""
    config = make_config((["a", "b"], mla(8, tokens_per_state=4)), (["a.ring", "b.ring"], ring(2)))
    tensors = make_tensors(config)
    if not is_registered:
        del tensors["a.ring"], tensors["b.ring"]
    geometry = describe(config, tensors)
    assert [group.is_stored for group in geometry.groups] == [True, False]
    page_map = register(geometry, tensors).page_map
    assert [pages.record_bytes for pages in page_map.groups] == [2 * 2 * 24 * 2, 0]


def test_a_hit_needs_the_indexers_keys_with_the_latents() -> None:
    config = make_config((["a", "a.indexer"], SPARSE))
    (group,) = describe(config, make_tensors(config)).groups
    assert group.reuse_rule is ReuseRule.PREFIX
    assert group.record_bytes == 4 * (24 + 12) * 2


def test_a_registered_tensor_that_nothing_describes_is_refused() -> None:
    config = make_config((["a"], full()))
    tensors = make_tensors(config)
    with pytest.raises(UnknownLayerError, match="stray"):
        register(describe(config, tensors), {**tensors, "stray": tensors["a"]})


def test_a_layer_that_was_not_registered_is_refused() -> None:
    config = make_config((["a", "b"], full()))
    tensors = make_tensors(config)
    del tensors["b"]
    with pytest.raises(UnknownLayerError, match="layer b was not registered"):
        describe(config, tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 8 * PAGE * 2 + 8192},
        {"size": 8 * PAGE},
        {"layer_stride": 7 * PAGE},
        {"offset": 64},
        {"block_stride": PAGE // 2},
        {"layers": ["a"]},
        {"layers": ["b", "a"]},
    ],
)
def test_a_configuration_that_contradicts_the_tensors_is_refused(changes: dict[str, Any]) -> None:
    config = make_config((["a", "b"], full()))
    tensors = make_tensors(config)
    with pytest.raises(GeometryError):
        register(describe(contradict(config, **changes), tensors), tensors)


@pytest.mark.parametrize("num_blocks", [7, 9])
def test_another_number_of_blocks_than_the_tensors_were_made_for_is_refused(num_blocks: int) -> None:
    config = make_config((["a", "b"], full()), num_blocks=8)
    tensors = make_tensors(config)
    with pytest.raises((BlockCountError, StorageError)):
        register(describe(replace(config, num_blocks=num_blocks), tensors), tensors)


def test_bytes_that_belong_to_nobody_are_refused() -> None:
    """A layer of the allocation that no group lists any more."""
    config = make_config((["a", "b"], full()))
    tensors = make_tensors(config)
    tensors.pop("b")
    config.kv_cache_groups[0].layer_names.remove("b")
    config.kv_cache_tensors[0].layers.remove("b")
    with pytest.raises(HoleError):
        register(describe(config, tensors), tensors)


# ---- decode context parallelism ----


def test_a_block_has_the_tokens_of_all_ranks_that_share_the_context() -> None:
    """A page is one rank's stripe. Recurrent states and layers that draft are whole on each rank."""
    config = make_config(
        (["r"], recurrent(8, PAGE)),
        (["a"], full(4)),
        (["d"], full(8, num_kv_heads=1, dcp_sharded=False)),
        context_ranks=2,
    )
    tensors = make_tensors(config)
    geometry = describe(config, tensors, context_ranks=2)
    assert [group.block_size for group in geometry.groups] == [8, 8, 8]
    assert [layer.page_bytes for layer in geometry.layers.values()] == [152, PAGE, PAGE]
    register(geometry, tensors)


def find_slot(table: list[int], position: int, *, rank: int, ranks: int, block_size: int, stripe: int) -> int | None:
    """Returns where vLLM's `BlockTable.compute_slot_mapping` puts a token on one rank, from its description of
    `cp_kv_cache_interleave_size`; None: another rank has the token. Its kernel does not run on CPUs."""
    block, offset = divmod(position, block_size * ranks)
    if offset // stripe % ranks != rank:
        return None
    return table[block] * block_size + offset // (ranks * stripe) * stripe + offset % stripe


@pytest.mark.parametrize("stripe", [1, 2, 4])
def test_records_of_all_ranks_bring_every_token_back_to_where_vllm_looks_for_it(stripe: int) -> None:
    ranks, tokens, block_size = 2, 24, 4
    old, new = [5, 2, 7], [1, 6, 3]
    for rank in range(ranks):
        config = make_config((["a"], full(block_size)), context_ranks=ranks)
        tensors = make_tensors(config)
        geometry = describe(config, tensors, context_ranks=ranks)
        registration = register(geometry, tensors)
        view = tensors["a"].zero_()  # [block, head, token, content]
        mine = {}
        for position in range(tokens):
            slot = find_slot(old, position, rank=rank, ranks=ranks, block_size=block_size, stripe=stripe)
            if slot is not None:
                view[slot // block_size, :, slot % block_size] = mine[position] = position + 1
        assert len(mine) == get_dcp_local_seq_lens(torch.tensor([tokens]), ranks, rank, stripe).item()
        copy = PlainCopy(registration.page_map, registration.memory)
        assert len(old) == tokens // geometry.groups[0].block_size
        rows = torch.empty((len(old), registration.page_map.groups[0].record_bytes), dtype=torch.uint8)
        copy.save(0, old, rows)
        view.zero_()
        copy.load(0, new, rows)
        for position, value in mine.items():
            slot = find_slot(new, position, rank=rank, ranks=ranks, block_size=block_size, stripe=stripe)
            assert slot is not None
            assert view[slot // block_size, :, slot % block_size].unique().tolist() == [value]
