"""Which tensors are a model's weights, and which engine they belong to."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise, record_metadata_for_reloading

from kvoffload.connector.identity.weights import find_weights
from tests.kit.connector.engine_configs import make_vllm_config


class Attention(nn.Module):
    """A layer with a KV cache: scales, and nothing else of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.ones(()))
        self.register_buffer("seen", torch.zeros(3), persistent=False)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)
        self.attn = Attention()
        self.experts = nn.ModuleDict({"one": nn.Linear(width, width, bias=False)})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.block = Block()


class Wrapper(nn.Module):
    """A wrapper as vLLM puts it around a layer for adapters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer


@pytest.fixture(autouse=True)
def no_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "LAYERWISE_INFO", type(layerwise.LAYERWISE_INFO)())


def load(model: nn.Module) -> Any:
    """Notes a model as vLLM's loader does."""
    record_metadata_for_reloading(model)
    return model


def config_of(*layers: nn.Module) -> Any:
    return make_vllm_config(layers={f"layer {number}": layer for number, layer in enumerate(layers)})


NAMES = ["0.embed.weight", "0.block.proj.weight", "0.block.attn._k_scale", "0.block.experts.one.weight"]


def test_parameters_and_lasting_buffers_are_found_by_their_names() -> None:
    model = load(Model())
    found = find_weights(config_of(model.block.attn))
    assert sorted(name for name, _ in found.tensors) == sorted(NAMES)
    assert dict(found.tensors)["0.block.proj.weight"] is model.block.proj.weight
    assert (found.apart, found.complaint, found.hidden) == (frozenset(), "", "")


def test_another_engines_model_in_this_process_is_left_out() -> None:
    _, mine, _ = (load(Model()) for _ in range(3))
    found = find_weights(config_of(mine.block.attn))
    assert {id(tensor) for _, tensor in found.tensors} == {
        id(tensor) for tensor in (*mine.parameters(), mine.block.attn.get_buffer("_k_scale"))
    }


def test_a_draft_models_weights_are_found_beside_the_models() -> None:
    model, draft = load(Model()), load(Block())
    found = find_weights(config_of(model.block.attn, draft.attn))
    assert {name.split(".")[0] for name, _ in found.tensors} == {"0", "1"}
    assert len(found.tensors) == 4 + 3


def test_a_model_that_was_made_within_another_is_a_part_of_it() -> None:
    """vLLM notes the inner one first."""
    inner = load(Model())
    outer = nn.Module()
    outer.language_model = inner
    load(outer)
    found = find_weights(config_of(inner.block.attn))
    assert len(found.tensors) == len(NAMES)
    assert all(name.startswith("0.language_model.") for name, _ in found.tensors)


def test_layers_that_serve_adapters_have_the_names_that_they_have_without() -> None:
    model = load(Model())
    model.block.proj = Wrapper(model.block.proj)
    model.block.experts["one"] = Wrapper(model.block.experts["one"])
    layers = (model.block.attn, model.block.experts["one"], model.block.experts["one"].base_layer)
    assert sorted(name for name, _ in find_weights(config_of(*layers)).tensors) == sorted(NAMES)


@pytest.mark.parametrize("replicas", [1, 2])
def test_experts_that_each_replica_has_others_of_are_set_apart(replicas: int) -> None:
    model = load(Model())
    config = config_of(model.block.attn, model.block.experts)
    config.compilation_config.static_all_moe_layers = ["layer 1"]
    config.parallel_config.data_parallel_size = replicas
    found = find_weights(config)
    assert found.apart == (frozenset() if replicas == 1 else {"0.block.experts.one.weight"})
    assert len(found.tensors) == len(NAMES)


@pytest.mark.parametrize("name", ["weight", "qweight", "w13_weight", "weight_packed"])
def test_a_weight_that_was_packed_away_is_told(name: str) -> None:
    model = load(Model())
    setattr(model.block.proj, name, nn.Parameter(torch.empty(0)))
    assert find_weights(config_of(model.block.attn)).hidden == f"0.block.proj.{name}"


def test_a_weight_without_memory_is_told() -> None:
    model = load(Model())
    model.embed.weight = nn.Parameter(torch.empty(8, 4, device="meta"))
    assert find_weights(config_of(model.block.attn)).hidden == "0.embed.weight"


@pytest.mark.parametrize("name", ["g_idx", "g_idx_sort_indices", "weight_zp"])
def test_other_parameters_are_often_empty(name: str) -> None:
    model = load(Model())
    setattr(model.block.proj, name, nn.Parameter(torch.empty(0)))
    assert find_weights(config_of(model.block.attn)).hidden == ""


def test_a_model_that_cannot_be_found_is_told() -> None:
    model, stranger = load(Model()), Attention()
    assert find_weights(config_of()).complaint == "the engine names no layers"
    found = find_weights(config_of(model.block.attn, stranger))
    assert (found.complaint, found.tensors) == ("the model of layer layer 1 is not known", ())
