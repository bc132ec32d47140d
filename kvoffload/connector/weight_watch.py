"""A worker's look at the weights in its memory. It looks, and never keeps the engine from anything."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvoffload.connector.model_weights import ModelWeights
from kvoffload.connector.step_plan import WeightDigests
from kvoffload.connector.weight_sample import WeightSample, sample_tensors

logger = logging.getLogger(__name__)

SHOWN_DIGITS = 12


class WeightWatch:
    """Owned by the worker's thread. Keeps no weight alive."""

    def __init__(self, find: Callable[[], ModelWeights]) -> None:
        self._find = find
        self._said: str | None = None
        self.seconds = 0.0
        """That the last look took."""

    def take(self) -> WeightDigests:
        """Looks at every weight. What cannot be looked at is told once and is no proof."""
        begun_s = time.monotonic()
        try:
            weights = self._find()
            sample = None if weights.complaint else sample_tensors(weights.tensors)
        except Exception as fault:  # noqa: BLE001  (whatever this is, the engine computes on)
            weights, sample = ModelWeights(complaint=str(fault) or type(fault).__name__), None
        self.seconds = time.monotonic() - begun_s
        self._tell(weights, sample)
        if sample is None:
            return WeightDigests()
        shared = [name for name in sample.digests if not _is_of(name, weights.apart)] if weights.apart else None
        return WeightDigests(name=sample.digest(shared), proof=b"" if weights.hidden else sample.digest())

    def _tell(self, weights: ModelWeights, sample: WeightSample | None) -> None:
        said = weights.complaint or weights.hidden
        if self._said == said:
            return
        self._said = said
        if sample is None:
            logger.info(
                "the weights cannot be looked at (%s): engines are told apart by where their model lies, and this one "
                "finds nothing after a sleep that was saved before it",
                weights.complaint,
            )
            return
        logger.info(
            "weights %s: sampled %d of %.4g elements of %d tensors in %.0f ms%s",
            sample.digest().hex()[:SHOWN_DIGITS],
            sample.sampled,
            sample.elements,
            len(sample.digests),
            1000 * self.seconds,
            f"; {weights.hidden} is packed where nobody can see it: nothing proves after a sleep that all are the same"
            if weights.hidden
            else "",
        )


def _is_of(name: str, tensors: frozenset[str]) -> bool:
    """One of them, or a part of one."""
    return name in tensors or any(name.startswith(f"{tensor}.") for tensor in tensors)
