"""Layers that share a block table, and what may be reused of them."""

from __future__ import annotations

import pytest

from kvoffload.errors import BlockCountError, GeometryError, UnknownLayerError
from kvoffload.kvspec import GroupSpec, LayerKind, LayerSpec, ReuseRule, StateSpec, mla_layer, recurrent_layer
from tests.kit.kvspec.builders import attention, one_group


def sliding(name: str, window: int) -> LayerSpec:
    return attention(name, kind=LayerKind.SLIDING_WINDOW, window=window)


def chunked(name: str, window: int) -> LayerSpec:
    return attention(name, kind=LayerKind.CHUNKED_LOCAL, window=window)


def recurrent(name: str) -> LayerSpec:
    return recurrent_layer(name, block_size=2, states=(StateSpec("s", (4,), "float32"),))


def mla(name: str) -> LayerSpec:
    return mla_layer(name, block_size=2, latent_size=8, dtype="bfloat16")


@pytest.mark.parametrize(
    ("layers", "rule", "window"),
    [
        ([attention("a")], ReuseRule.PREFIX, 0),
        ([mla("a")], ReuseRule.PREFIX, 0),
        ([attention("a"), mla("b")], ReuseRule.PREFIX, 0),
        ([sliding("a", 8), sliding("b", 16)], ReuseRule.WINDOW, 16),
        ([attention("a"), sliding("b", 16)], ReuseRule.PREFIX, 0),
        ([attention("a", window=16)], ReuseRule.PREFIX, 0),
        ([chunked("a", 8), chunked("b", 8)], ReuseRule.CHUNK, 8),
        ([recurrent("a"), recurrent("b")], ReuseRule.EXACT_BOUNDARY, 0),
        ([attention("a", excluded="not ours")], ReuseRule.NOTHING, 0),
        ([sliding("a", 8), attention("b", excluded="not ours")], ReuseRule.WINDOW, 8),
    ],
)
def test_the_reuse_rule_follows_from_the_kinds(layers: list[LayerSpec], rule: ReuseRule, window: int) -> None:
    group = one_group(*layers)
    assert (group.reuse_rule, group.window, group.is_stored) == (rule, window, rule is not ReuseRule.NOTHING)
    assert group.has_recurrent == (rule is ReuseRule.EXACT_BOUNDARY)


def test_layers_of_a_group_may_have_different_page_sizes() -> None:
    """vLLM's UniformTypeKVCacheSpecs: one block table, pages of 64 and 128 bytes and no page for an alias."""
    group = one_group(attention("a"), attention("b", head_size=8), attention("c", alias_of="a"))
    assert group.record_bytes == 64 + 128


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: GroupSpec.from_names("g", layer_names=["a", "x"], specs={"a": attention("a")}, block_size=2),
            UnknownLayerError,
            r"group g: layer x has no spec \(1 of 2 have none\)",
        ),
        (lambda: one_group(attention("a"), attention("a")), GeometryError, "layer a is listed twice"),
        (lambda: GroupSpec(name="g", layers=(attention("a"),), block_size=0), BlockCountError, "block_size is 0"),
        (lambda: GroupSpec(name="g", layers=(), block_size=2), GeometryError, "no layer"),
        (
            lambda: GroupSpec(name="g", layers=(attention("a"), attention("b", block_size=4)), block_size=2),
            GeometryError,
            "layer b has blocks of 4 tokens, the group of 2",
        ),
        (
            lambda: one_group(attention("a"), recurrent("b")),
            GeometryError,
            "full_attention and recurrent layers cannot",
        ),
        (lambda: one_group(sliding("a", 8), chunked("b", 8)), GeometryError, "chunked_local and sliding_window"),
        (lambda: one_group(chunked("a", 8), chunked("b", 16)), GeometryError, "different chunk sizes"),
    ],
)
def test_a_wrong_group_is_refused_with_a_remedy(make: object, error: type[GeometryError], message: str) -> None:
    assert callable(make)
    with pytest.raises(error, match=message) as caught:
        make()
    assert caught.value.remedy


def test_a_group_from_names_keeps_their_order() -> None:
    specs = {name: attention(name) for name in "abc"}
    group = GroupSpec.from_names("g", layer_names=["c", "a"], specs=specs, block_size=2)
    assert [layer.name for layer in group.layers] == ["c", "a"]
