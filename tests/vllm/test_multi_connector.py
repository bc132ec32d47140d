"""With another connector under vLLM's MultiConnector, the first one that has a hit loads, and both save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt, start_engine
from tests.vllm.equality import LENGTHS, Answer, answer, restorable, restored_answer
from tests.vllm.tiny_models import DENSE
from tests.vllm.workload import assert_nothing_is_held, serve

pytestmark = pytest.mark.vllm


@pytest.fixture(params=["ours first", "ours second"])
def is_first(request: pytest.FixtureRequest) -> bool:
    return request.param == "ours first"


@pytest.fixture
def engine(engines: EnginePool, tmp_path: Path, is_first: bool) -> Iterator[Engine]:
    """The other one keeps what it saves, whatever is reset."""
    engines.leave_process()
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    children = [probe.transfer(verify="always"), other]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children if is_first else children[::-1]},
    }
    folder = engines.model_folder(DENSE)
    engine = start_engine(DENSE, folder, max_num_batched_tokens=4096, kv_transfer_config=transfer)
    try:
        probe.prepare(engine)
        yield engine
    finally:
        engine.close()


def run(engine: Engine, prompt: list[int]) -> tuple[Answer, list[int]]:
    """An answer without the engine's own cache, and the loads of ours for it."""
    with probe.watch_loads(engine) as loads:
        found = restored_answer(engine, prompt)
    engine.drain()
    return found, [tokens for tokens in loads if tokens]


def test_hits_equal_the_engines_own_and_nothing_stays_held(engine: Engine, is_first: bool) -> None:
    by_other = []
    for length in LENGTHS:
        prompt, expected = make_prompt(length, length), restorable(DENSE, length)
        assert answer(engine, prompt).cached == 0
        own = answer(engine, prompt)
        found, loads = run(engine, prompt)
        assert (own.cached, found.cached) == (expected, expected), length
        assert found == own, length
        assert loads in ([], [expected]), length
        by_other += [length] if not loads else []
        # Both are asked, and one is taken: of a hit of ours that was not, nothing may stay leased.
        assert probe.pool_stats(engine)["leases"] == 0
    assert bool(by_other) is not is_first, by_other
    assert_nothing_is_held(engine)


def test_what_only_the_other_one_has_is_restored_by_it_and_saved_again_by_ours(engine: Engine, is_first: bool) -> None:
    prompt = make_prompt(seed=31, length=700)
    answer(engine, prompt)
    own = answer(engine, prompt)
    engine.forget()  # ours has it under a name that is gone; the other one keeps it
    assert probe.names(engine) == set()
    found, loads = run(engine, prompt)
    assert (found.cached, loads) == (640, [])
    assert found == own
    assert len(probe.names(engine)) == 5
    found, loads = run(engine, prompt)
    assert loads == ([640] if is_first else [])
    assert found == own
    assert_nothing_is_held(engine)


def test_many_at_once_leave_nothing_held(engine: Engine) -> None:
    beginning = make_prompt(seed=32, length=300)
    prompts = {f"prompt{i}": beginning + make_prompt(seed=100 + i, length=200) for i in range(8)}
    for _ in range(2):
        outputs = serve(engine, prompts, max_tokens=12).outputs
        assert sorted(outputs) == sorted(prompts)
        engine.reset_local()
    assert_nothing_is_held(engine)
