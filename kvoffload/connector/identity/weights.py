"""Finds the weights with which a process computes, and notices those that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvoffload.connector.engine import vllm_compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WRAPPER = "base_layer"
"""The attribute that holds a layer inside its wrapper for adapters; it is left out of the weights' names."""


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """The weights of a process. Its tensors are the model's own, not copies."""

    tensors: tuple[tuple[str, torch.Tensor], ...] = ()
    apart: frozenset[str] = frozenset()
    """Names of experts' weights that other replicas of the same engine do not hold, or that move while it runs."""
    complaint: str = ""
    """Why no weights were found; empty: they were."""
    hidden: str = ""
    """The first weight that a kernel has moved out of reach; then equal other weights prove nothing. Empty: none."""


def find_weights(config: VllmConfig) -> ModelWeights:
    """Returns the weights of every model that has a layer with a KV cache in this engine, the draft model included.

    Buffers that are in no checkpoint are left out: they are made from the configuration, which is part of an identity,
    or hold the last results.
    """
    layers = {id(layer): name for name, layer in vllm_compat.find_layers(config).items()}
    if not layers:
        return ModelWeights(complaint="the engine names no layers")
    roots = _find_roots(vllm_compat.loaded_modules(), layers.keys())
    missing = layers.keys() - {module for root in roots for module in _ids(root)}
    if missing:
        return ModelWeights(complaint=f"the model of layer {min(layers[layer] for layer in missing)} is not known")
    replicated = {id(layer) for layer in vllm_compat.expert_layers(config)}
    tensors: dict[str, torch.Tensor] = {}
    apart: set[str] = set()
    hidden = ""
    for number, root in enumerate(roots):
        experts = {one for module in root.modules() if id(module) in replicated for one in _ids(module)}
        for path, module in root.named_modules():
            for name, tensor in _own_tensors(module):
                full = ".".join(part for part in (str(number), *path.split("."), name) if part and part != _WRAPPER)
                tensors[full] = tensor
                if id(module) in experts:
                    apart.add(full)
                if not hidden and _is_hidden(name, tensor):
                    hidden = full
    return ModelWeights(tensors=tuple(tensors.items()), apart=frozenset(apart), hidden=hidden)


def _own_tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    lasting = (name for name in module._buffers if name not in module._non_persistent_buffers_set)
    named = {**module._parameters, **{name: module._buffers[name] for name in lasting}}
    return [(name, tensor) for name, tensor in named.items() if tensor is not None]


def _is_hidden(name: str, tensor: torch.Tensor) -> bool:
    """Whether a kernel has packed this weight in its own way and left it empty. Other tensors are often empty."""
    return tensor.is_meta or (tensor.numel() == 0 and name.endswith(("weight", "weight_packed")))


def _find_roots(modules: Iterable[torch.nn.Module], layers: Set[int]) -> list[torch.nn.Module]:
    """Returns the outermost modules that contain one of these layers, in their order."""
    known = list(modules)
    inner = {id(module) for one in known for module in one.children()}
    found = [one for one in known if id(one) not in inner and not layers.isdisjoint(_ids(one))]
    return [one for one in found if not any(id(one) in _ids(other) for other in found if other is not one)]


def _ids(root: torch.nn.Module) -> set[int]:
    return {id(module) for module in root.modules()}
