"""A pool's pages: every byte of every storage is placed or excluded by name; a pool that is not known is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvoffload.errors import GeometryError, KVOffloadError, UnknownLayerError, UnsupportedError
from kvoffload.kvspec import Registration, ReuseRule, build_page_map, prove_complete
from kvoffload.sglang.pools import describe_pool
from tests.kit.sglang.pools import PAGE, HybridLinearKVPool, MambaPool, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool

POOLS = {
    "halves of one storage": MHATokenToKVPool,
    "storages of keys and values": lambda: MHATokenToKVPool(v_head_dim=16),
    "rows that are no whole pages": lambda: MHATokenToKVPool(size=30),
    "a stage's layers": lambda: MHATokenToKVPool(start_layer=5),
    "float32": lambda: MHATokenToKVPool(dtype=torch.float32),
    "latents": MLATokenToKVPool,
    "latents with rows that are no whole pages": lambda: MLATokenToKVPool(size=29),
}


@pytest.mark.parametrize("make", POOLS.values(), ids=POOLS)
def test_every_byte_belongs_to_a_page_or_is_excluded_by_name(make: Any) -> None:
    pool = make()
    pages = describe_pool(pool, page_size=PAGE)
    report = prove_complete(pages.geometry)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in pages.tensors.values()
    }
    assert sum(report.claims.values()) == sum(storages.values())
    assert pages.geometry.num_blocks == pool.rows // PAGE
    rounding = [exclusion.name for exclusion in pages.geometry.exclusions]
    assert bool(rounding) == bool(pool.rows % PAGE)
    assert all("rounding" in name for name in rounding)
    Registration().register(pages.geometry, pages.tensors)


def test_a_page_is_its_rows_of_every_layer_and_the_padding_page_is_none() -> None:
    pool = MHATokenToKVPool()
    page_map = build_page_map(describe_pool(pool, page_size=PAGE).geometry)
    runs = page_map.block_runs(0, 3)
    row_bytes = 2 * 8 * 2
    assert [run.length for run in runs] == [PAGE * row_bytes] * 4
    assert [run.start for run in runs] == [3 * PAGE * row_bytes, (36 + 3 * PAGE) * row_bytes] * 2
    with pytest.raises(GeometryError, match="null block"):
        page_map.check_blocks([0], group=0)


def test_layers_are_named_by_their_place_in_the_model() -> None:
    pages = describe_pool(MLATokenToKVPool(start_layer=7), page_size=PAGE)
    assert list(pages.geometry.layers) == ["layer 7", "layer 8"]
    assert (pages.first_layer, pages.num_layers) == (7, 2)


class OtherPool(MHATokenToKVPool):
    """Derived from one that is served."""


def test_a_pool_of_another_class_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedError, match=r"test_pools\.OtherPool is not served"):
        describe_pool(OtherPool(), page_size=PAGE)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("kv_cache_layout", "hnd", "layout hnd"),
        ("k_scale_buffer", [torch.ones(3)], "k_scale_buffer"),
        ("post_capture_active", True, "post_capture_active"),
        ("store_dtype", torch.uint8, "as torch.uint8"),
        ("is_quantized_kv_cache", True, "quantised"),
        ("page_size", 8, "pages of 8 tokens"),
    ],
)
def test_a_pool_that_is_otherwise_than_was_tested_is_refused(name: str, value: object, told: str) -> None:
    pool = MHATokenToKVPool()
    setattr(pool, name, value)
    with pytest.raises(UnsupportedError, match=told):
        describe_pool(pool, page_size=PAGE)


@pytest.mark.parametrize(
    "hide",
    [
        lambda pool, tensor: setattr(pool, "index_buffer", tensor),
        lambda pool, tensor: setattr(pool, "index_buffer", [tensor]),
        lambda pool, tensor: setattr(pool, "index_buffer", {"deep": (tensor,)}),
        lambda pool, tensor: setattr(pool, "index_buffer", MLATokenToKVPool(dim=8)),
    ],
)
def test_a_tensor_that_was_not_placed_is_named(hide: Any) -> None:
    pool = MHATokenToKVPool()
    hide(pool, torch.ones(8))
    with pytest.raises(UnknownLayerError, match=r"tensor index_buffer"):
        describe_pool(pool, page_size=PAGE)


def test_a_view_of_placed_rows_is_no_other_tensor() -> None:
    pool = MHATokenToKVPool()
    pool.first_rows = pool.k_buffer[0][:4]
    describe_pool(pool, page_size=PAGE)


def test_a_pool_that_counts_other_bytes_than_were_found_is_refused() -> None:
    pool = MLATokenToKVPool()
    pool.get_kv_size_bytes = lambda: 17
    with pytest.raises(KVOffloadError, match="says that it has 17 bytes"):
        describe_pool(pool, page_size=PAGE)


def test_a_buffer_of_other_rows_is_refused() -> None:
    pool = MHATokenToKVPool()
    pool.k_buffer[1] = pool.k_buffer[1][:-PAGE]
    with pytest.raises(KVOffloadError, match=r"layer 1\.k has shape"):
        describe_pool(pool, page_size=PAGE)


WINDOW = 7
"""Two pages of it are behind a boundary."""


def test_layers_with_a_window_are_a_group_of_their_own_pool() -> None:
    pages = describe_pool(SWAKVPool(), page_size=PAGE, window=WINDOW)
    prove_complete(pages.geometry)
    Registration().register(pages.geometry, pages.tensors)
    full, swa = pages.geometry.groups
    assert [layer.name for layer in full.layers] == ["layer 1", "layer 3"]
    assert [layer.name for layer in swa.layers] == ["layer 0", "layer 2"]
    assert (full.reuse_rule, swa.reuse_rule, swa.window) == (ReuseRule.PREFIX, ReuseRule.WINDOW, WINDOW + 1)
    assert pages.group_names == ("kv", "swa")
    assert [settings.trailing_pages for settings in pages.pool_settings] == [0, 2]
    assert pages.num_layers == 4


def test_pages_beyond_the_smaller_pool_are_refused() -> None:
    page_map = build_page_map(describe_pool(SWAKVPool(size_swa=24), page_size=PAGE, window=WINDOW).geometry)
    page_map.check_blocks([8], group=0)
    page_map.check_blocks([6], group=1)
    with pytest.raises(GeometryError, match="block 7 is not one of 0 to 6"):
        page_map.check_blocks([7], group=1)


def test_the_pool_with_a_window_may_be_the_larger_one() -> None:
    pages = describe_pool(SWAKVPool(size_swa=64), page_size=PAGE, window=WINDOW)
    assert [pages.geometry.count_blocks(layer) for layer in ("layer 1", "layer 0")] == [9, 17]


def test_states_are_slots_of_their_own_pool() -> None:
    pool = HybridLinearKVPool()
    pages = describe_pool(pool, page_size=PAGE)
    report = prove_complete(pages.geometry)
    Registration().register(pages.geometry, pages.tensors)
    assert set(report.claims) == {"page", "padding", "exclusion"}
    assert pages.group_names == ("kv", "mamba")
    kv, mamba = pages.geometry.groups
    assert [layer.name for layer in mamba.layers] == ["layer 0", "layer 2"]
    assert (kv.reuse_rule, mamba.reuse_rule) == (ReuseRule.PREFIX, ReuseRule.EXACT_BOUNDARY)
    assert [(settings.page_rows, settings.trailing_pages) for settings in pages.pool_settings] == [(PAGE, 0), (1, 1)]
    assert mamba.record_bytes == 2 * 4 * (18 + 6 + 40)
    page_map = build_page_map(pages.geometry)
    page_map.check_blocks([9], group=1)
    with pytest.raises(GeometryError, match="block 9 is not one of 0 to 8"):
        page_map.check_blocks([9], group=0)
    with pytest.raises(GeometryError, match="null block"):
        page_map.check_blocks([0], group=1)


def test_between_others_may_be_layers_that_keep_nothing() -> None:
    """The engine waits for a layer by its number."""
    pages = describe_pool(hybrid(full_attention_layer_id_mapping={1: 0, 5: 1}), page_size=PAGE)
    kv, mamba = pages.geometry.groups
    assert [layer.name for layer in kv.layers] == ["layer 1", "layer 5"]
    assert [layer.name for layer in mamba.layers] == ["layer 0", "layer 2"]
    assert pages.num_layers == 6


def hybrid(*, of_states: bool = False, **given: object) -> HybridLinearKVPool:
    pool = HybridLinearKVPool()
    for name, value in given.items():
        setattr(pool.mamba_pool if of_states else pool, name, value)
    return pool


class OtherStates(MambaPool):
    """Derived from one that is served."""


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        (hybrid(use_mla=True), "which is not served"),
        (hybrid(full_attention_layer_id_mapping={1: 0, 2: 1}), r"has layers \[0, 1, 2, 2\]"),
        (hybrid(mamba_pool=OtherStates()), "OtherStates in"),
        (hybrid(full_kv_pool=MLATokenToKVPool()), "MLATokenToKVPool in"),
        (hybrid(of_states=True, enable_linear_replayssm=True), "enable_linear_replayssm"),
        (hybrid(of_states=True, mamba_cache=object()), "states builtins.object"),
        (hybrid(of_states=True, size=12), "temporal has shape|conv0 has shape"),
        (hybrid(of_states=True, side_states=[torch.ones(3)]), "tensor side_states.0"),
    ],
    ids=["latents", "a layer of both", "states", "rows", "replay", "drafts' states", "slots", "a sibling"],
)
def test_states_that_are_otherwise_than_was_tested_are_refused(pool: HybridLinearKVPool, told: str) -> None:
    with pytest.raises(KVOffloadError, match=told):
        describe_pool(pool, page_size=PAGE)


def make_odd(**given: object) -> SWAKVPool:
    pool = SWAKVPool()
    for name, value in given.items():
        setattr(pool, name, value)
    return pool


@pytest.mark.parametrize(
    ("pool", "window", "told"),
    [
        (SWAKVPool(), 0, "a window of 0"),
        (make_odd(layers_mapping={0: (0, True), 1: (1, True)}), WINDOW, "has layers"),
        (make_odd(swa_kv_pool=MLATokenToKVPool()), WINDOW, "MLATokenToKVPool in"),
        (make_odd(swa_req_ring_size=4), WINDOW, "swa_req_ring_size"),
        (make_odd(request_window=object()), WINDOW, "request_window"),
    ],
    ids=["no window", "no full attention", "latents", "a ring", "windows of requests"],
)
def test_windows_that_are_otherwise_than_was_tested_are_refused(pool: SWAKVPool, window: int, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        describe_pool(pool, page_size=PAGE, window=window)


def test_a_tensor_of_the_pool_of_pools_that_was_not_placed_is_named() -> None:
    with pytest.raises(UnknownLayerError, match="tensor sink"):
        describe_pool(make_odd(sink=torch.ones(4)), page_size=PAGE, window=WINDOW)


def test_states_that_do_not_lie_one_behind_the_other_are_refused_by_name() -> None:
    """SGLang lays states out so for a processor with AMX."""
    pool = HybridLinearKVPool()
    states = pool.mamba_pool.mamba_cache
    states.conv[0] = states.conv[0].transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises(UnsupportedError, match=r"states conv0 .* AMX"):
        describe_pool(pool, page_size=PAGE)
