"""The weights that an engine computes with, as a mask over the names of its pages."""

from __future__ import annotations

import gc
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from kvoffload.engines.weight_digest import digest_tensors
from kvoffload.engines.weight_sample import AS_INTEGERS
from kvoffload.sglang.weight_updates import WeightUpdates
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOOKED_AT = 4
"""Tensors, all over the model, that are looked at before pages are named."""
LOOKED_ELEMENTS = 64
"""Of each of them, about."""
ATTENTION = "RadixAttention"
"""The class of SGLang's layers that have pages; a model is what they are in."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Look:
    """A few elements of a tensor, and what was in them when the mask was taken."""

    tensor: ReferenceType[torch.Tensor]
    address: int
    elements: torch.Tensor
    """As integers, where they lie."""
    seen: torch.Tensor

    @classmethod
    def at(cls, tensor: torch.Tensor) -> _Look:
        elements = _choose(tensor)
        return cls(tensor=ref(tensor), address=tensor.data_ptr(), elements=elements, seen=elements.clone())

    def has_changed(self) -> bool:
        tensor = self.tensor()
        if tensor is None or tensor.data_ptr() != self.address:
            return True
        return not self.elements.equal(self.seen)


def _choose(tensor: torch.Tensor) -> torch.Tensor:
    """Whole elements: of those of float32 weights that were loaded from bfloat16, half of the bytes are zeros."""
    each = max(1, round(LOOKED_ELEMENTS ** (1 / max(1, tensor.dim()))))
    steps = [max(1, size // each) for size in tensor.shape]
    some = tensor.detach()[tuple(slice(step // 2, None, step) for step in steps)]
    return some.view(AS_INTEGERS[tensor.element_size()])


class WeightMask:
    """Names the engine's weights by their content. Owned by one thread. Of weights that were replaced it keeps
    `LOOKED_AT` tensors at most, until it is asked next.

    Equal weights have equal masks, in every process, and different weights have different ones. Weights that cannot be
    read cannot be proved equal, so each mask of them is new.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[torch.nn.Module]] | None = None,
        *,
        updates: WeightUpdates | None = None,
        agree: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """`updates`: those of the engine, which are noted before they change anything. `agree`: where ranks have parts
        of the weights, makes one mask of those of all; each rank calls it as often as the others."""
        self._find = find or find_models
        self.updates = updates or WeightUpdates()
        self._agree = agree
        self._models = [ref(model) for model in self._find()]
        """Found once: later on the engine hides its objects from the search."""
        self._said = ""
        self._looks: list[_Look] = []
        self._has_changed = False
        self._seen = -1
        """Updates before the mask was made."""
        self._digest = b""
        self._secret = self._share(secrets.token_bytes(HASH_BYTES))

    @property
    def is_known(self) -> bool:
        """The weights could be looked at when the mask was taken."""
        return bool(self._digest)

    @property
    def is_told(self) -> bool:
        """The engine has begun an update since the mask was made."""
        return self.updates.count != self._seen

    def has_changed(self) -> bool:
        """Whether the weights may have changed since the mask was made: an update has begun, which may have left the
        engine's cache as it is, or one of a few tensors is another. A change of all weights that the engine does not
        know of shows in any of them."""
        if self.is_told or self.updates.is_open:
            return True
        if any(look.has_changed() for look in self._looks):
            self._has_changed, self._looks = True, []
        return self._has_changed

    def is_proved_equal(self) -> bool:
        """Whether the weights are byte for byte what they were when the mask was taken; then they count as unchanged.
        To be called only by the thread on which the engine updates them. With several ranks no rank can prove it
        without the others."""
        former = self._digest
        return self._agree is None and not self.updates.is_open and bool(former) and self._look_at_all() == former

    def take(self) -> bytes:
        """Takes the mask of the weights as they are now, of each byte of them."""
        return self._share(self._look_at_all())

    def invent(self, seen: int) -> bytes:
        """Makes up a mask of weights after so many updates, the same on all ranks of this engine and of no other
        one's."""
        self._begin(seen)
        try:
            self._looks = [_Look.at(tensor) for _, tensor in _spread(list(self._tensors()))]
        except Exception as fault:  # noqa: BLE001  (whatever this is, the engine computes on)
            logger.debug("no weight can be looked at: %s", fault)
        return sha256(self._secret + self._seen.to_bytes(8, "little")).digest()

    def _look_at_all(self) -> bytes:
        self._begin()
        try:
            tensors = list(self._tensors())
            self._looks = [_Look.at(tensor) for _, tensor in _spread(tensors)]
            self._digest = digest_tensors(tensors)
            return self._digest
        except Exception as fault:  # noqa: BLE001  (as above)
            self._looks = []
            if self._said != str(fault):
                self._said = str(fault)
                logger.warning("the weights cannot be looked at (%s): nothing is found that was saved before", fault)
            return secrets.token_bytes(HASH_BYTES)

    def _begin(self, seen: int | None = None) -> None:
        self._seen = self.updates.count if seen is None else seen
        self._has_changed, self._looks, self._digest = False, [], b""

    def _share(self, of_rank: bytes) -> bytes:
        return of_rank if self._agree is None else self._agree(of_rank)

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


def _spread(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """A few, all over the model."""
    return [tensors[at] for at in sorted({at * len(tensors) // LOOKED_AT for at in range(LOOKED_AT)})]


def find_models() -> list[torch.nn.Module]:
    """Finds the models: modules with the engine's attention in them that are in no other module."""
    import torch

    # By type: some objects answer for their class with a warning, or with more.
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inner]
    return [root for root in roots if any(type(module).__name__ == ATTENTION for module in root.modules())]
