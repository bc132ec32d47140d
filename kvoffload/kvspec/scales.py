"""No calculated KV scales for models with recurrent layers (rule 4).

From vLLM issue #37554 and PR #37565: during the dummy pass that calculates scales the recurrent layers' state is
uninitialised, activations are garbage, and so are the scales made from them; the model then loops or hallucinates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from kvoffload.kvspec.spec import LayerKind, LayerSpec

DEFAULT_SCALE = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScaleDecision:
    """`calculate`: whether the engine may calculate scales. If it may not, `scale` replaces them all."""

    calculate: bool
    scale: float | None
    reason: str = ""


def decide_scales(
    *,
    model: str,
    calculate_scales: bool,
    layers: Iterable[LayerSpec | LayerKind],
    checkpoint_scale: float | None = None,
) -> ScaleDecision:
    """Decides whether an engine may calculate KV scales. Refusing it is one warning per model, not an error.

    Scales that come with a checkpoint were calibrated on real text and stay what they are.
    """
    if not calculate_scales:
        return ScaleDecision(calculate=False, scale=DEFAULT_SCALE if checkpoint_scale is None else checkpoint_scale)
    kinds = {layer.kind if isinstance(layer, LayerSpec) else layer for layer in layers}
    if LayerKind.RECURRENT not in kinds:
        return ScaleDecision(calculate=True, scale=None)
    # No dtype in this text: users of every dtype see it.
    reason = (
        f"KV scales are not calculated for {model}: it has recurrent layers, whose state is uninitialised "
        f"in the calibration pass; scale {DEFAULT_SCALE} is used"
    )
    _warn_once(reason)
    return ScaleDecision(calculate=False, scale=DEFAULT_SCALE, reason=reason)


@lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
