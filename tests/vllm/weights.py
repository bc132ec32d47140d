"""A real engine's weights: kept where they can be seen, and changed while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.vllm.engine import Json

CHANGED = "model.layers.1.self_attn.k_norm.weight"
"""Keys of a layer are multiplied with it."""


@contextmanager
def seen_weights() -> Iterator[None]:
    """Lets the weights of engines that start within it be seen, as on a GPU. The CPU build packs a linear layer's
    weight where it cannot be read, and leaves an empty one behind."""
    from vllm import _custom_ops as ops  # private: where vLLM asks what the CPU's kernels can do
    from vllm.model_executor.layers import utils

    with (
        patch.object(ops, "_supports_onednn", False),  # private: no setting turns its packing off
        patch.object(utils, "check_cpu_sgl_kernel", lambda *given: False),
    ):
        yield


@contextmanager
def loaded_with_other_keys(factor: float) -> Iterator[None]:
    """Engines that start within it have weights in memory that lie in no folder."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load_model = BaseModelLoader.load_model

    def load(self: BaseModelLoader, *given: Any, **named: Any) -> Any:
        model = load_model(self, *given, **named)
        model.get_parameter(CHANGED).data.mul_(factor)
        return model

    with patch.object(BaseModelLoader, "load_model", load):
        yield


def scale_keys(worker: Any, factor: float) -> Json:
    """In place, as an update of weights does it; a power of two is undone by its inverse, bit for bit."""
    worker.get_model().get_parameter(CHANGED).data.mul_(factor)
    return None


def scale_all(worker: Any, factor: float) -> Json:
    """Scales every parameter in place."""
    for parameter in worker.get_model().parameters():
        parameter.data.mul_(factor)
    return None


def compare_with_the_model(worker: Any) -> Json:
    """Names of parameters that our worker side does not find, and whether it finds any that the model has not."""
    from kvoffload.connector.identity.weights import find_weights

    found = {id(tensor) for _, tensor in find_weights(worker.vllm_config).tensors}
    model = worker.get_model()
    missed: list[Json] = [name for name, one in model.named_parameters() if id(one) not in found]
    strange = found - {id(one) for one in (*model.parameters(), *model.buffers())}
    return [missed, len(strange)]
