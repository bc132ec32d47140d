"""Rule 4: no calculated KV scales for models with recurrent layers."""

from __future__ import annotations

import logging

import pytest

from kvoffload.kvspec import LayerKind, StateSpec, decide_scales, recurrent_layer
from kvoffload.kvspec.dtype import KV_DTYPES
from tests.kit.kvspec.builders import attention

HYBRID = (attention("layers.0"), recurrent_layer("layers.1", block_size=2, states=(StateSpec("s", (1,), "int8"),)))


def test_calculated_scales_are_turned_off_for_recurrent_layers(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM issue #37554 and PR #37565: scales from a pass over uninitialised state made Qwen3.5 hallucinate."""
    with caplog.at_level(logging.WARNING):
        decision = decide_scales(model="Qwen/rule-4a", calculate_scales=True, layers=HYBRID)
    assert (decision.calculate, decision.scale) == (False, 1.0)
    (record,) = caplog.records
    assert "Qwen/rule-4a" in record.getMessage()
    assert "recurrent layers" in record.getMessage()
    assert "uninitialised" in record.getMessage()


def test_there_is_one_warning_per_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for model in ("rule-4b", "rule-4b", "rule-4c", "rule-4b"):
            decide_scales(model=model, calculate_scales=True, layers=[LayerKind.RECURRENT])
    assert len(caplog.records) == 2


def test_the_warning_mentions_no_dtype(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM #37565, review: a warning about fp8 puzzled users of other dtypes."""
    with caplog.at_level(logging.WARNING):
        decide_scales(model="rule-4d", calculate_scales=True, layers=HYBRID)
    text = caplog.text.lower()
    assert not [name for name in ("fp8", "int8", *KV_DTYPES) if name in text]


@pytest.mark.parametrize(
    ("calculate", "layers", "checkpoint", "expected"),
    [
        (True, [LayerKind.FULL_ATTENTION, LayerKind.SLIDING_WINDOW], None, (True, None)),
        (False, [LayerKind.FULL_ATTENTION], None, (False, 1.0)),
        (False, [LayerKind.FULL_ATTENTION], 0.25, (False, 0.25)),
        (False, [LayerKind.RECURRENT], 0.25, (False, 0.25)),
    ],
)
def test_everything_else_is_left_as_it_is(
    calculate: bool,
    layers: list[LayerKind],
    checkpoint: float | None,
    expected: tuple[bool, float | None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    decision = decide_scales(model="m", calculate_scales=calculate, layers=layers, checkpoint_scale=checkpoint)
    assert (decision.calculate, decision.scale) == expected
    assert not caplog.records
