"""The weights that an engine computes with, as a mask over the names of its pages."""

from __future__ import annotations

import gc
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from kvoffload.engines.weight_sample import sample_tensors
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOOKED_AT = 4
"""Tensors, all over the model, that are looked at in turn before pages are named."""
LOOKED_BYTES = 256
ATTENTION = "RadixAttention"
"""The class of SGLang's layers that have pages; a model is what they are in."""
_TAG = b"kvoffload sglang weights 1\n"


class WeightMask:
    """Owned by the scheduler's thread. Keeps no weight alive.

    Equal sampled weights have equal masks, in every process. Of weights that cannot be looked at nobody can prove
    anything, so that each mask is new.
    """

    def __init__(self, find: Callable[[], Iterable[torch.nn.Module]] | None = None) -> None:
        self._find = find or find_models
        self._models = [ref(model) for model in self._find()]
        """Found once: later on the engine hides its objects from the search."""
        self._said = ""
        self._looked_at: list[tuple[ReferenceType[torch.Tensor], torch.Tensor]] = []
        """With what was there when the mask was taken."""
        self._turn = 0

    def has_changed(self) -> bool:
        """Since `take`, without a word of the engine: an update may leave its cache as it is. One tensor is looked at,
        the next one at the next call; an update of all of them shows in any."""
        if not self._looked_at:
            return False
        self._turn = (self._turn + 1) % len(self._looked_at)
        found, seen = self._looked_at[self._turn]
        tensor = found()
        return tensor is None or not _look(tensor).equal(seen)

    def take(self) -> bytes:
        """Of the weights as they are now."""
        try:
            tensors = list(self._tensors())
            chosen = [tensors[at * len(tensors) // LOOKED_AT] for at in range(LOOKED_AT)]
            self._looked_at = [(ref(tensor), _look(tensor).clone()) for tensor in dict(chosen).values()]
            return sha256(_TAG + sample_tensors(tensors).digest()).digest()
        except Exception as fault:  # noqa: BLE001  (whatever this is, the engine computes on)
            self._looked_at = []
            if self._said != str(fault):
                self._said = str(fault)
                logger.warning("the weights cannot be looked at (%s): nothing is found that was saved before", fault)
            return secrets.token_bytes(HASH_BYTES)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        models = [model for one in self._models if (model := one()) is not None]
        if not models or len(models) < len(self._models):
            raise ValueError("the model is not known")
        for number, model in enumerate(models):
            # Buffers are left out: they are made from the configuration, or while the model runs.
            for name, tensor in model.named_parameters():
                if tensor.is_meta or not tensor.numel():
                    # A kernel that packs a weight in its own way leaves an empty one behind.
                    raise ValueError(f"{name} has no bytes")
                yield f"{number}.{name}", tensor


def _look(tensor: torch.Tensor) -> torch.Tensor:
    """A few of its bytes, all over it."""
    import torch

    data = tensor.detach().reshape(-1).view(torch.uint8)
    return data[:: max(1, len(data) // LOOKED_BYTES)]


def find_models() -> list[torch.nn.Module]:
    """Those with attention of the engine in them that are in no other one."""
    import torch

    # By type: some objects answer for their class with a warning, or with more.
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inner]
    return [root for root in roots if any(type(module).__name__ == ATTENTION for module in root.modules())]
