"""The weights that a process computes with: where they lie, and which of them nobody can look at."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvoffload.connector.engine import vllm_compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WRAPPER = "base_layer"
"""What stands around a layer for adapters; the layer is the same one."""


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """Tensors are the model's own, not copies."""

    tensors: tuple[tuple[str, torch.Tensor], ...] = ()
    apart: frozenset[str] = frozenset()
    """Of experts that other replicas of the same engine do not hold, or that move while it runs: their names."""
    complaint: str = ""
    """Why there are none."""
    hidden: str = ""
    """The first weight that was moved to where nobody can see it; what is equal in the others proves nothing."""


def find_weights(config: VllmConfig) -> ModelWeights:
    """Those of every model that has a layer with a KV cache in this engine: the draft model's too.

    Buffers that are in no checkpoint are left out: they are made from the configuration, which an identity has, or hold
    what was computed last.
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
    """A kernel that packs a weight in its own way leaves an empty one behind. Other tensors are often empty."""
    return tensor.is_meta or (tensor.numel() == 0 and name.endswith(("weight", "weight_packed")))


def _find_roots(modules: Iterable[torch.nn.Module], layers: Set[int]) -> list[torch.nn.Module]:
    """Those with one of these layers in them that are in no other one, in their order."""
    known = list(modules)
    inner = {id(module) for one in known for module in one.children()}
    found = [one for one in known if id(one) not in inner and not layers.isdisjoint(_ids(one))]
    return [one for one in found if not any(id(one) in _ids(other) for other in found if other is not one)]


def _ids(root: torch.nn.Module) -> set[int]:
    return {id(module) for module in root.modules()}
