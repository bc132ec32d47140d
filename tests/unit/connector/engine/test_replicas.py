"""Tensor ranks hold the same bytes of a layer only where vLLM says so, or its projection does."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import QKVParallelLinear

from kvoffload.connector.engine import replicas, vllm_compat
from kvoffload.connector.engine.replicas import count_replicas, find_replicas
from tests.kit.connector.engine_configs import full, make_config, make_vllm_config, mla, recurrent, window


def bare(kind: Any, **values: Any) -> Any:
    """vLLM's own class, with what matters here."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in values.items():
        setattr(module, name, value)
    return module


def attention(heads: int = 1) -> Any:
    return bare(Attention, num_kv_heads=heads)


def projection(total: int, heads: int = 1, *, disable_tp: bool = False) -> Any:
    return bare(QKVParallelLinear, total_num_kv_heads=total, num_kv_heads=heads, disable_tp=disable_tp)


@pytest.mark.parametrize(
    ("spec", "layer", "maker", "ranks", "expected"),
    [
        pytest.param(full(num_kv_heads=1), attention(), projection(1), 2, 2, id="one head, two ranks"),
        pytest.param(full(num_kv_heads=1), attention(), projection(8), 16, 2, id="eight heads, sixteen ranks"),
        pytest.param(window(num_kv_heads=1), attention(), projection(2), 8, 4, id="window"),
        pytest.param(full(num_kv_heads=1), attention(), projection(8), 8, 1, id="a head for each rank"),
        pytest.param(full(num_kv_heads=2), attention(2), projection(8, 2), 4, 1, id="more heads than ranks"),
        pytest.param(full(num_kv_heads=1), attention(), None, 2, 1, id="nobody knows its projection"),
        pytest.param(full(num_kv_heads=1), attention(), projection(3), 8, 1, id="no whole number of ranks"),
        pytest.param(full(num_kv_heads=1), attention(2), projection(1), 2, 1, id="the layer says otherwise"),
        pytest.param(full(num_kv_heads=2), attention(), projection(1), 2, 1, id="its pages say otherwise"),
        pytest.param(full(num_kv_heads=1), attention(), projection(1, disable_tp=True), 2, 1, id="not divided"),
        pytest.param(mla(), bare(MLAAttention), None, 8, 8, id="latent, vLLM does not say"),
        pytest.param(mla(max_tp_shards=1), bare(MLAAttention), None, 8, 8, id="latent, vLLM says"),
        pytest.param(mla(max_tp_shards=2), bare(MLAAttention), None, 8, 4, id="divided latent"),
        pytest.param(mla(), None, None, 8, 1, id="a latent of an unknown layer"),
        pytest.param(mla(max_tp_shards=1), None, None, 8, 8, id="an unknown layer of which vLLM says it"),
        pytest.param(recurrent(), bare(torch.nn.Module), None, 8, 1, id="recurrent"),
        pytest.param(
            recurrent(tp_replicated=True), bare(torch.nn.Module), None, 8, 8, id="a state that is not divided"
        ),
    ],
)
def test_ranks_hold_the_same_bytes_where_that_is_certain(
    spec: Any, layer: Any, maker: Any, ranks: int, expected: int
) -> None:
    assert count_replicas(spec, layer, maker, ranks) == expected


class Block(torch.nn.Module):
    """An attention layer's surroundings."""

    def __init__(self, *children: torch.nn.Module) -> None:
        super().__init__()
        for at, child in enumerate(children):
            self.add_module(str(at), child)


def find(monkeypatch: pytest.MonkeyPatch, tensor_ranks: int, *groups: Any, **blocks: list[Any]) -> dict[str, int]:
    """Replicas of the layers of these groups, which lie in these blocks; the first child of a block is its layer."""
    config = make_vllm_config(layers={name: children[0] for name, children in blocks.items()})
    config.parallel_config.tensor_parallel_size = tensor_ranks
    monkeypatch.setattr(vllm_compat, "loaded_modules", lambda: [Block(*children) for children in blocks.values()])
    return find_replicas(config, make_config(*groups))


def test_each_layer_is_judged_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid keeps what its attention layers have in common, and layers of one group may differ."""
    one = full(8, num_kv_heads=1)
    found = find(
        monkeypatch,
        4,
        (["a", "b", "c"], one),
        (["m"], recurrent(8, page_bytes=256)),
        a=[attention(), projection(1)],
        b=[attention(), projection(2)],
        c=[attention(), projection(4)],
        m=[bare(torch.nn.Module), projection(1)],
    )
    assert found == {"a": 4, "b": 2}


def test_ranks_that_share_the_context_hold_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are not striped, as those that draft, are still the same on all of them."""
    config = make_vllm_config(layers={"a": bare(MLAAttention), "b": bare(MLAAttention)})
    config.parallel_config.tensor_parallel_size = 4
    config.parallel_config.decode_context_parallel_size = 2
    monkeypatch.setattr(vllm_compat, "loaded_modules", list)
    cache = make_config((["a"], mla(4)), (["b"], mla(8, dcp_sharded=False, head_size=12)), context_ranks=2)
    assert replicas.find_replicas(config, cache) == {"b": 4}


def test_an_engine_of_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(monkeypatch, 1, (["a"], full(num_kv_heads=1)), a=[attention(), projection(1)]) == {}


def test_a_projection_under_an_adapter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = Block()
    adapter.base_layer = projection(1)
    assert find(monkeypatch, 2, (["a"], full(num_kv_heads=1)), a=[attention(), adapter]) == {"a": 2}


@pytest.mark.parametrize(
    "others", [[attention(), projection(1)], [projection(1), projection(2)]], ids=["two layers", "two projections"]
)
def test_a_projection_that_may_be_another_layers_says_nothing(
    monkeypatch: pytest.MonkeyPatch, others: list[Any]
) -> None:
    assert find(monkeypatch, 2, (["a"], full(num_kv_heads=1)), a=[attention(), *others]) == {}


def test_where_vllm_notes_no_modules_only_latents_are_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_vllm_config(layers={"a": attention(), "b": bare(MLAAttention)})
    config.parallel_config.tensor_parallel_size = 2
    monkeypatch.setattr(vllm_compat, "loaded_modules", list)
    cache = make_config((["a"], full(num_kv_heads=1)), (["b"], mla(head_size=16)))
    assert replicas.find_replicas(config, cache) == {"b": 2}
