"""Short hits are loaded by each way that is compared, and wait for a step where they should."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.models import LLAMA_8B
from benchmarks.ground.trial import open_ideal
from benchmarks.short_hits import SIZES, make_hits, make_prefixes, measure

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(("in_step", "waits"), [(False, True), (True, False)])
def test_a_load_in_the_step_takes_no_step_of_its_own(in_step: bool, waits: bool) -> None:
    prefixes = make_prefixes(16, each=1)
    with open_ideal(LLAMA_8B, EngineSettings(is_async=False), in_step=in_step) as engine:
        engine.serve(prefixes)
        assert engine.forget()
        run = engine.serve(make_hits(prefixes, 16, from_s=1.0))
    assert [one.external_tokens for one in run.served] == [16 * size for size in SIZES]
    # The end of each request is told to the connector by a step of its own.
    empty = sum(step.tokens == 0 for step in run.steps) - len(SIZES)
    assert (empty >= len(SIZES)) if waits else empty == 0


def test_each_size_is_measured_beside_others() -> None:
    times, found = measure(LLAMA_8B, 4, lambda model, settings: open_ideal(model, settings, in_step=True), each=1)
    assert found == dict.fromkeys(SIZES, 1)
    assert set(times) == set(SIZES)
