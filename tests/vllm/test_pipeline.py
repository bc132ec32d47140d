"""An engine whose layers are divided among the stages of a pipeline saves from its first request on, and restores what
it saved, bit-equal to its own hit.

vLLM's CPU build computes in pipelines once a stage has the tensors that it takes over from the one before; with a GPU
the engine's warm-up makes them. The tiny GDN model does not start so: vLLM finds that stages with and without an
attention layer want different layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt, make_room, start_engine
from tests.vllm.equality import answer, restorable, restored_answer
from tests.vllm.tiny_models import DENSE, SLIDING, TinyModel

pytestmark = pytest.mark.vllm

LENGTHS = (257, 640, 1281)


@contextmanager
def serving(engines: EnginePool, model: TinyModel, **arguments: object) -> Iterator[Engine]:
    """An engine that has stepped for nobody yet."""
    arguments = {**probe.TWO_STAGES, "kv_transfer_config": probe.transfer(), **arguments}
    engine = start_engine(model, engines.model_folder(model), has_own_processes=True, **arguments)
    try:
        probe.prepare(engine)
        assert all(engine.ask_workers(make_room))
        yield engine
    finally:
        engine.close()


def check_every_repeat(engine: Engine, model: TinyModel) -> None:
    """The very first request is one of a single step: nothing keeps the engine stepping after it but the connector."""
    first = make_prompt(899, 641)
    answer(engine, first, max_tokens=1)
    engine.reset_local()
    assert answer(engine, first, max_tokens=1).cached == restorable(model, 641)
    for seed, length in enumerate(LENGTHS, start=900):
        prompt, expected = make_prompt(seed, length), restorable(model, length)
        assert answer(engine, prompt).cached == 0
        local = answer(engine, prompt)
        assert local.cached == expected
        restored = restored_answer(engine, prompt)
        assert (restored.cached, restored) == (expected, local)
    engine.drain()
    held = probe.ask_core(engine, "inspect_scheduler")
    assert held["planned_loads"] == 1 + sum(restorable(model, length) > 0 for length in LENGTHS)
    assert (held["faults"], held["doomed_loads"], held["pins"]) == (0, 0, 0)
    assert probe.faults(engine) == {}


def test_every_repeat_is_restored_and_the_first_request_was_saved(engines: EnginePool) -> None:
    with serving(engines, DENSE) as engine:
        check_every_repeat(engine, DENSE)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "arguments"),
    [(SLIDING, {}), (DENSE, {"tensor_parallel_size": 2}), (DENSE, {"pipeline_parallel_size": 3})],
    ids=["sliding", "dense-two-ranks-a-stage", "dense-three-stages"],
)
def test_every_kind_of_pipeline_restores(engines: EnginePool, model: TinyModel, arguments: dict[str, object]) -> None:
    with serving(engines, model, **arguments) as engine:
        check_every_repeat(engine, model)
