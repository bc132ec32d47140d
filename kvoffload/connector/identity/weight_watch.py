"""Samples the weights in a worker's memory. It only reads, and its faults never disturb the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from weakref import ReferenceType, ref

import torch

from kvoffload.connector.common.step_plan import WeightDigests
from kvoffload.connector.identity.weights import ModelWeights
from kvoffload.engines.weight_sample import WeightSample, sample_tensors

logger = logging.getLogger(__name__)

SHOWN_DIGITS = 12
LOOKED_AT = 16
"""Number of parameters that are sampled between two steps. An update changes nearly all parameters."""
PAUSE_S = 1.0
"""Seconds without a step after which parameters are sampled: an update takes at least that long."""


class WeightWatch:
    """Owned by the worker's thread. Keeps no weight alive."""

    def __init__(self, find: Callable[[], ModelWeights], clock: Callable[[], float] = time.monotonic) -> None:
        self._find = find
        self._clock = clock
        self._looked_at: list[tuple[str, ReferenceType[torch.Tensor]]] = []
        self._former: Mapping[str, bytes] | None = None
        """The last digests of the sampled parameters. None: there are none to compare with."""
        self._stepped_s: float | None = None
        self._said: str | None = None
        self.seconds = 0.0
        """How long the last look took."""

    def take(self) -> WeightDigests:
        """Samples every weight. Weights that cannot be read are logged once, and there is no proof then."""
        begun_s = time.monotonic()
        self._former = self._stepped_s = None
        try:
            weights = self._find()
            sample = None if weights.complaint else sample_tensors(weights.tensors)
        except Exception as fault:  # noqa: BLE001  (whatever this is, the engine computes on)
            weights, sample = ModelWeights(complaint=str(fault) or type(fault).__name__), None
        self.seconds = time.monotonic() - begun_s
        if sample is None:
            self._tell(weights, None, b"")
            return WeightDigests()
        shared = [name for name in sample.digests if not _is_of(name, weights.apart)] if weights.apart else None
        name = sample.digest(shared)
        self._tell(weights, sample, name)
        return WeightDigests(name=name, proof=b"" if weights.hidden else sample.digest())

    def has_changed(self) -> bool:
        """Returns whether the weights have changed. Called before a step that computes: after a pause, a few weights
        are sampled and compared with the last time."""
        now_s = self._clock()
        is_due = self._stepped_s is None or now_s - self._stepped_s >= PAUSE_S
        self._stepped_s = now_s
        if not is_due:
            return False
        former = self._former
        try:
            self._former = sample_tensors(self._choose()).digests
        except Exception as fault:  # noqa: BLE001  (as in `take`)
            self._former = None
            logger.debug("no weight can be looked at: %s", fault)
        return None not in (former, self._former) and former != self._former

    def _choose(self) -> list[tuple[str, torch.Tensor]]:
        """Returns parameters from all over the model. If one is gone, it was replaced, and others are chosen."""
        chosen = [(name, found) for name, tensor in self._looked_at if (found := tensor()) is not None]
        if not chosen or len(chosen) < len(self._looked_at):
            weights = self._find()
            known: list[tuple[str, torch.Tensor]] = [
                (name, tensor)
                for name, tensor in weights.tensors
                if isinstance(tensor, torch.nn.Parameter) and tensor.numel() and name not in weights.apart
            ]
            chosen = (
                [known[at * len(known) // LOOKED_AT] for at in range(LOOKED_AT)] if len(known) > LOOKED_AT else known
            )
            self._looked_at = [(name, ref(tensor)) for name, tensor in chosen]
        return chosen

    def _tell(self, weights: ModelWeights, sample: WeightSample | None, name: bytes) -> None:
        """Logs the result, if it has changed. `name` is equal in engines that share, even with different experts."""
        said = weights.complaint or weights.hidden
        if self._said == said:
            return
        self._said = said
        if sample is None:
            logger.info(
                "the weights cannot be read (%s): engines are told apart by their model's path, and this one "
                "finds no blocks after a sleep that were saved before it",
                weights.complaint,
            )
            return
        logger.info(
            "weights %s: sampled %d of %.4g elements of %d tensors in %.0f ms%s",
            name.hex()[:SHOWN_DIGITS],
            sample.sampled,
            sample.elements,
            len(sample.digests),
            1000 * self.seconds,
            f"; {weights.hidden} is packed and cannot be read: nothing proves after a sleep that it is the same"
            if weights.hidden
            else "",
        )


def _is_of(name: str, tensors: frozenset[str]) -> bool:
    """Whether a name is one of these tensors, or a part of one."""
    return name in tensors or any(name.startswith(f"{tensor}.") for tensor in tensors)
