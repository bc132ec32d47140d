"""Differences between vLLM versions, and the scale views that must exist before anything is restored."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.lora.request import LoRARequest
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.connector.engine import vllm_compat
from kvoffload.errors import UnsupportedError
from tests.kit.connector.engine_configs import (
    full,
    make_config,
    make_tensors,
    make_vllm_config,
    per_token_head,
    window,
)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class Impl:
    """The part of vLLM's attention implementation that makes scale views: its own method, and nothing else."""

    _k_scale_cache: torch.Tensor | None = None
    _v_scale_cache: torch.Tensor | None = None
    _ensure_scale_caches = TritonAttentionImpl._ensure_scale_caches  # private: what is tested is that very method

    def run_first(self, pages: torch.Tensor) -> None:
        """Does what the first forward does."""
        self._ensure_scale_caches(pages)

    @property
    def key_scales(self) -> torch.Tensor | None:
        return self._k_scale_cache


@pytest.fixture
def cache() -> tuple[Any, dict[str, torch.Tensor], Impl]:
    config = make_config((["a"], per_token_head()), num_blocks=5)
    impl = Impl()
    return make_vllm_config(layers={"a": SimpleNamespace(impl=impl)}), make_tensors(config), impl


def test_restored_scales_are_wiped_by_the_first_forward_without_our_views(
    cache: tuple[Any, dict[str, torch.Tensor], Impl],
) -> None:
    """vLLM #51091, as it is: what the views' creation at registration is for."""
    _, tensors, impl = cache
    memory = memory_of(tensors["a"])
    memory.fill_(3)  # a restored cache
    impl.run_first(tensors["a"])
    changed = memory.reshape(-1, 12) != 3
    assert changed[:, 8:].all()  # each head's scale, of keys and of values
    assert not changed[:, :8].any()  # and nothing else


def test_scales_that_are_restored_after_registration_stay(cache: tuple[Any, dict[str, torch.Tensor], Impl]) -> None:
    config, tensors, impl = cache
    views = vllm_compat.create_scale_views(config, tensors, ["a"])
    assert set(views) == {"a.k_scales", "a.v_scales"}
    assert [tuple(view.shape) for view in views.values()] == [(5, 4, 2)] * 2
    assert all((view == 1.0).all() for view in views.values())
    memory = memory_of(tensors["a"])
    memory.fill_(3)
    impl.run_first(tensors["a"])
    assert (memory == 3).all()
    assert impl.key_scales is views["a.k_scales"]


def test_layers_without_scales_have_no_views() -> None:
    layers = {"a": SimpleNamespace(impl=SimpleNamespace()), "b": SimpleNamespace()}
    tensors = make_tensors(make_config((["a", "b"], full())))
    assert vllm_compat.create_scale_views(make_vllm_config(layers=layers), tensors, ["a", "b", "c"]) == {}


def test_hash_block_size_is_what_the_engine_says() -> None:
    config = make_config((["a"], full(8)), (["b"], window(4, head_size=16)))
    config.hash_block_size, config.cache_hit_alignment_tokens = 2, 16
    assert vllm_compat.hash_block_size(make_vllm_config(), config) == 2
    assert vllm_compat.hit_alignment(make_vllm_config(), config) == 16


@pytest.mark.parametrize("is_field_there", [True, False])
def test_an_engine_that_does_not_say_is_asked_for_what_it_will_use(is_field_there: bool) -> None:
    """vLLM 0.31 has no such fields; a worker of 0.32 may be asked before they are filled."""
    config = make_config((["a"], full(8)), (["b"], window(4, head_size=16)))
    known = {"kv_cache_groups": config.kv_cache_groups}
    if is_field_there:
        known |= {"hash_block_size": None, "cache_hit_alignment_tokens": None}
    old: Any = SimpleNamespace(**known)
    assert vllm_compat.hash_block_size(make_vllm_config(), old) == 4
    assert vllm_compat.hit_alignment(make_vllm_config(), old) == 8


def test_one_group_is_hashed_in_the_engines_block_size() -> None:
    config = make_vllm_config()
    config.cache_config.block_size = 16
    old: Any = SimpleNamespace(kv_cache_groups=make_config((["a"], full(16))).kv_cache_groups)
    assert vllm_compat.hash_block_size(config, old) == 16


def test_the_seed_of_hashes_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first = vllm_compat.hash_seed(make_vllm_config())
    assert first == vllm_compat.hash_seed(make_vllm_config())
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    assert vllm_compat.hash_seed(make_vllm_config()) == "17" != first


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_random_seed_is_one_engines_own(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def seed(engine_id: str) -> str:
        config = make_vllm_config()
        config.cache_config.prefix_caching_hash_algo = algorithm
        config.kv_transfer_config.engine_id = engine_id
        return vllm_compat.hash_seed(config)

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert seed("one") == seed("one") != seed("other")
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    assert seed("one") == seed("other") == "17"


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", ""),
        ("bfloat16", ""),
        ("float16", ""),
        ("fp8", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("fp8_ds_mla", "fp8_ds_mla"),
        ("turboquant_3bit_nc", "turboquant_3bit_nc"),
    ],
)
def test_a_format_that_has_no_dtype_has_a_name(dtype: str, expected: str) -> None:
    assert vllm_compat.page_format(SimpleNamespace(kv_cache_dtype=dtype)) == expected


def test_a_device_with_another_fp8_has_another_name_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(vllm_compat.current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    assert vllm_compat.page_format(SimpleNamespace(kv_cache_dtype="fp8")) == "fp8_e4m3fnuz"
    assert vllm_compat.page_format(SimpleNamespace(kv_cache_dtype="fp8_e5m2")) == "fp8_e5m2"


def test_who_writes_pages_has_a_name_and_an_instruction_set() -> None:
    def writer(**more: Any) -> str:
        return vllm_compat.page_writer(SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend, **more))

    assert writer() == "CPU_ATTN"
    assert writer(isa="amx") == "CPU_ATTN amx"


def test_scales_are_told_in_the_order_keys_values() -> None:
    one = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor([2.0]))
    assert vllm_compat.page_scales(one) == ((0.5,), (2.0,))
    heads = SimpleNamespace(_k_scale=torch.tensor([0.5, 0.25]), _v_scale=torch.tensor([2.0, 4.0]))
    assert vllm_compat.page_scales(heads) == ((0.5, 0.25), (2.0, 4.0))


def test_a_layer_that_the_engine_does_not_know_tells_nothing() -> None:
    assert vllm_compat.page_format(None) == vllm_compat.page_writer(None) == ""
    assert vllm_compat.page_scales(None) == ()


def test_layers_that_share_pages_are_found_by_their_target() -> None:
    layers = {
        "a": SimpleNamespace(kv_sharing_target_layer_name=None),
        "b": SimpleNamespace(kv_sharing_target_layer_name="a"),
        "moe": SimpleNamespace(),
    }
    assert vllm_compat.find_sharing(make_vllm_config(layers=layers)) == {"b": "a"}


HOST, DISK, P2P, UNSPECIFIED = (
    CacheHitSource.HOST,
    CacheHitSource.DISK,
    CacheHitSource.P2P,
    CacheHitSource.EXTERNAL_UNSPECIFIED,
)


@pytest.mark.parametrize(
    ("sources", "tokens", "labels"),
    [
        ((("memory", 16),), 16, {HOST: 16}),
        ((("memory", 16), ("disk", 8), ("peer", 4), ("memory", 4)), 32, {HOST: 20, DISK: 8, P2P: 4}),
        ((("valkey", 16), ("s3", 8), ("mooncake", 4), ("custom", 4), ("unknown", 4)), 36, {UNSPECIFIED: 36}),
        ((("memory", 16), ("disk", 8)), 18, {HOST: 16, DISK: 2}),
        ((("memory", 16),), 20, {HOST: 16, UNSPECIFIED: 4}),
        ((), 16, {UNSPECIFIED: 16}),
        ((("memory", 16),), 0, {}),
    ],
)
def test_labels_of_a_hit_always_sum_up_to_its_tokens(
    sources: tuple[tuple[str, int], ...], tokens: int, labels: dict[CacheHitSource, int]
) -> None:
    assert vllm_compat.label_hit(sources, tokens) == labels
    assert sum(labels.values()) == tokens


def test_an_engine_without_labels_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm.v1.metrics.cache_hit_source", None)
    assert vllm_compat.label_hit((("memory", 16),), 16) == {}


def test_a_layout_that_was_not_resolved_is_not_guessed() -> None:
    config = make_config((["a"], full()))
    assert vllm_compat.cache_layout(config) == config.kv_cache_layout
    config.kv_cache_layout = None
    with pytest.raises(UnsupportedError, match="not resolved a KV cache layout"):
        vllm_compat.cache_layout(config)


@pytest.mark.parametrize(
    ("cache_config", "expected"),
    [
        ({}, 0),
        ({"prefix_cache_retention_interval": 0}, 0),
        ({"prefix_cache_retention_interval": 4096}, 4096),
        ({"prefix_cache_retention_interval": None}, None),
    ],
)
def test_an_engine_without_retention_retains_nothing_at_intervals(
    cache_config: dict[str, Any], expected: int | None
) -> None:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(**cache_config))
    assert vllm_compat.retention_interval(config) == expected


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (None, False),
        (SimpleNamespace(enable_kv_cache_events=False), False),
        (SimpleNamespace(enable_kv_cache_events=True), True),
    ],
)
def test_events_are_wanted_by_who_publishes_them(events: Any, expected: bool) -> None:
    config: Any = SimpleNamespace(kv_events_config=events)
    assert vllm_compat.wants_events(config) is expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SimpleNamespace(), 0),
        (SimpleNamespace(speculative_config=None), 0),
        (SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=None)), 0),
        (SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=5)), 5),
    ],
)
def test_drafts_are_those_of_speculative_decoding(config: Any, expected: int) -> None:
    assert vllm_compat.draft_tokens(config) == expected


@pytest.mark.parametrize(("cache", "expected"), [({}, 1), ({"kv_tp_replicas": None}, 1), ({"kv_tp_replicas": 4}, 4)])
def test_an_engine_that_does_not_say_has_no_replicas(cache: dict[str, Any], expected: int) -> None:
    given: Any = SimpleNamespace(**cache)
    assert vllm_compat.kv_replicas(given) == expected


# ---- the free queue ----


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8, enable_caching=True, hash_block_size=4)


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


@pytest.mark.parametrize("limit", [0, 1, 5, 7, 100])
def test_the_next_free_blocks_are_those_that_the_engine_gets(pool: BlockPool, limit: int) -> None:
    pool.free_blocks(pool.get_new_blocks(3))
    pool.touch([pool.blocks[5]])
    before = pool.get_num_free_blocks()
    found = vllm_compat.next_free_blocks(pool, limit)
    assert pool.get_num_free_blocks() == before == 6
    assert found == pool.get_new_blocks(before)[:limit]


def test_an_engine_without_free_blocks_has_none_next(pool: BlockPool) -> None:
    pool.get_new_blocks(7)
    assert vllm_compat.next_free_blocks(pool, 5) == []


@pytest.mark.parametrize(
    ("group", "tokens", "expected"),
    [
        pytest.param(0, 16, True, id="whole"),
        pytest.param(0, None, True, id="of an engine without partial blocks"),
        pytest.param(0, 20, False, id="partial"),
        pytest.param(1, 20, True, id="of a group with smaller blocks"),
        pytest.param(2, 16, False, id="of a group without a size"),
        pytest.param(None, None, False, id="nothing is cached in it"),
    ],
)
def test_whole_blocks_have_a_key(group: int | None, tokens: int | None, expected: bool) -> None:
    block = KVCacheBlock(block_id=3)
    if group is not None:
        block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"h" * 32), group), num_tokens=tokens)
    assert vllm_compat.full_block_key(block, {0: 8, 1: 4}) == ((group, b"h" * 32) if expected else None)


def test_an_engine_of_before_partial_blocks_has_whole_ones() -> None:
    """vLLM 0.31's blocks do not say how many tokens their hash covers."""
    block: Any = SimpleNamespace(block_hash=make_block_hash_with_group_id(BlockHash(b"h" * 32), 1))
    assert vllm_compat.full_block_key(block, {1: 4}) == (1, b"h" * 32)


def test_blocks_that_are_freed_first_are_taken_first_in_their_order(pool: BlockPool) -> None:
    one, two, three = pool.get_new_blocks(3)
    pool.touch([three, pool.null_block])
    assert pool.null_block.ref_cnt == 1
    one.set_block_hash(make_block_hash_with_group_id(BlockHash(b"h" * 32), 0))
    vllm_compat.free_first(pool, [two, three, one, pool.null_block])
    assert (three.ref_cnt, pool.get_num_free_blocks()) == (1, 6)
    assert ids(pool.get_new_blocks(6)) == [2, 1, 4, 5, 6, 7]


def test_a_connector_hears_that_the_engine_is_told_to_stop_before_the_engine_does() -> None:
    heard: list[str] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: heard.append("engine"))
    try:
        vllm_compat.on_sigterm(lambda: heard.append("connector"))
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert heard == ["connector", "engine"]


def test_where_no_step_follows_the_signal_its_handler_is_left_alone() -> None:
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        vllm_compat.on_sigterm(lambda: None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, former)


def test_kinds_of_groups_are_those_of_the_engines_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_config((["a"], full(16)))
    assert vllm_compat.group_kinds(cache) == (("full_attention", None),)
    monkeypatch.delattr(kv_cache_interface, "get_kv_cache_spec_sliding_window")
    assert vllm_compat.group_kinds(cache) == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"cache_salt": "s"}, [("s",), None]),
        ({"cache_salt": "s", "lora_request": LoRARequest("poet", 1, "/poet")}, [("poet", "s"), ("poet",)]),
    ],
)
def test_what_names_come_of_beside_tokens_is_said_as_the_engines_own_events_say_it(
    changes: dict[str, Any], expected: list[tuple[str, ...] | None] | None
) -> None:
    given = {"lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None, **changes}
    request: Any = SimpleNamespace(**given)
    assert vllm_compat.list_extra_keys(request, range(2), 16) == expected


@pytest.mark.parametrize(
    ("changes", "has_some"),
    [
        ({}, False),
        ({"cache_salt": ""}, False),
        ({"cache_salt": "s"}, True),
        ({"mm_features": ["an image"]}, True),
        ({"lora_request": object()}, True),
        ({"prompt_embeds": torch.zeros(2)}, True),
    ],
)
def test_names_that_come_of_more_than_tokens(changes: dict[str, Any], has_some: bool) -> None:
    request = SimpleNamespace(**{"lora_request": None, "cache_salt": None, "mm_features": [], **changes})
    assert vllm_compat.has_extra_keys(request) is has_some  # type: ignore[arg-type]
