"""The cost of a step in the scheduler's process, in bytecode instructions of the connector: they are the same on any
machine. `benchmarks/vllm_connectors.py` has the time, with the client and on a real engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload import connector
from kvoffload.connector.saves.look_out import ROUND_STEPS
from kvoffload.connector.saves.worth import GATHERED_TOKENS
from tests.kit.connector.engine_configs import full
from tests.kit.connector.saving import make_engine
from tests.kit.connector.scripted import ScriptedEngine
from tests.kit.instructions import Instructions

DENSE = ((["a"], full(16)),)
REQUESTS = 32


def make_patient_engine() -> ScriptedEngine:
    """Makes an engine with the rounds that a real one has."""
    return make_engine(
        DENSE, num_blocks=2048, max_model_len=1024, round_steps=ROUND_STEPS, gathered_tokens=GATHERED_TOKENS
    )


def decode_steps(engine: ScriptedEngine, steps: int) -> tuple[list[int], int]:
    """Instructions of each step in which all requests decode, and how many blocks that saved."""
    costs, saved = [], 0
    for _ in range(steps):
        for request in engine.requests.values():
            engine.decode(request)
            assert engine.run(request, 1)
        spent = Instructions(connector)
        with spent.counted():
            plan = engine.step()
            engine.report(plan)
        saved += sum(len(job.moves) for job in plan.saves)
        costs.append(spent.count)
    return costs, saved


def serve_prompt(blocks: int) -> int:
    """Instructions that one prompt costs, from its arrival to its end."""
    engine, spent = make_patient_engine(), Instructions(connector)
    with spent.counted():
        engine.serve("a", range(blocks * 16 + 1))
        engine.report(engine.step())
    assert len(engine.cache.published) == blocks
    return spent.count


def test_steps_that_decode_cost_little() -> None:
    engine = make_patient_engine()
    for number in range(REQUESTS):
        engine.admit(engine.arrive(str(number), range(1000 * number, 1000 * number + 17 + number)))
        engine.report(engine.step())
    decode_steps(engine, ROUND_STEPS)
    costs, saved = decode_steps(engine, 8 * ROUND_STEPS)
    assert saved >= REQUESTS * 28, "of 32 blocks that each fills"
    assert sorted(costs)[len(costs) // 2] < 120, "one that looks at nobody"
    assert sum(costs) / len(costs) < 280


def test_a_block_costs_little_beside_its_request() -> None:
    few, many = serve_prompt(2), serve_prompt(15)
    assert (many - few) / 13 < 33
    assert few < 5700


def cost_of_backlog(requests: int) -> float:
    """Instructions of a step in which all decode and none of their blocks can be saved: there are no slots."""
    engine = make_engine(
        DENSE, num_blocks=8192, max_model_len=2048, round_steps=ROUND_STEPS, gathered_tokens=GATHERED_TOKENS
    )
    engine.cache.slots_left = 0
    for number in range(requests):
        engine.admit(engine.arrive(str(number), range(2000 * number, 2000 * number + 1600)))
        engine.step()
    for number in range(requests, REQUESTS):
        engine.admit(engine.arrive(str(number), range(2000 * number, 2000 * number + 8)))
        engine.step()
    costs, saved = decode_steps(engine, 40)
    assert saved == 0
    return sum(costs) / len(costs)


def test_a_backlog_costs_a_step_nothing_however_long_it_is() -> None:
    """Compares 32 requests with 100 blocks each that could not be saved with one such request."""
    assert cost_of_backlog(REQUESTS) < 1.2 * cost_of_backlog(1)
