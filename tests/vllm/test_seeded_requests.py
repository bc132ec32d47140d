"""Hundreds of requests from one seed, with shared prefixes, aborts and preemptions: none is lost, nothing is left."""

from __future__ import annotations

import random

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.equality import answer
from tests.vllm.seeded_traffic import (
    DENSE_TRAFFIC,
    GDN_TRAFFIC,
    SLIDING_TRAFFIC,
    Traffic,
    assert_it_was_what_it_claims,
    is_said_after_a_prefill,
    run_traffic,
)
from tests.vllm.workload import held_copies

pytestmark = pytest.mark.vllm

SEED = 4


@pytest.mark.parametrize(
    ("traffic", "requests"),
    [
        pytest.param(DENSE_TRAFFIC, 120, marks=pytest.mark.campaign),
        pytest.param(SLIDING_TRAFFIC, 120, marks=pytest.mark.campaign),
        (GDN_TRAFFIC, 80),
    ],
    ids=["dense", "sliding", "gdn"],
)
def test_seeded_requests_restore_what_was_saved_and_leave_nothing_behind(
    engines: EnginePool, traffic: Traffic, requests: int
) -> None:
    counts = run_traffic(traffic.acquire(engines), traffic, requests=requests, prompts=30, seed=SEED)
    assert_it_was_what_it_claims(counts)
    assert counts["restored_blocks"] >= 8
    assert counts["evicted"] > 20 or not traffic.pool_bytes


def test_what_a_preempted_request_says_is_what_the_engine_says_after_a_prefill(engines: EnginePool) -> None:
    """The measure for the recurrent model, on the prompt that needs it."""
    engine = GDN_TRAFFIC.acquire(engines)
    prompt = GDN_TRAFFIC.make_prompts(random.Random(SEED), 30)["prompt29"]
    engine.forget()
    said = list(answer(engine, prompt, max_tokens=2).tokens)
    engine.forget()
    (third,) = answer(engine, prompt + said, max_tokens=1).tokens
    assert is_said_after_a_prefill(engine, prompt, [*said, third], 2)
    assert not is_said_after_a_prefill(engine, prompt, [*said, third + 1], 2)
    assert not is_said_after_a_prefill(engine, prompt, said, 0), "its first token comes after a prefill anyway"
    engine.forget()


def test_hundreds_of_requests_to_an_engine_with_its_own_processes_leave_nothing_behind(engines: EnginePool) -> None:
    engine = SLIDING_TRAFFIC.acquire(engines, has_own_processes=True)
    counts = run_traffic(engine, SLIDING_TRAFFIC, requests=200, prompts=30, seed=SEED)
    assert_it_was_what_it_claims(counts)
    assert counts["evicted"] > 100


def test_an_idle_engine_releases_its_pins_by_itself(engines: EnginePool) -> None:
    engine = SLIDING_TRAFFIC.acquire(engines, has_own_processes=True)
    with held_copies(engine) as release:
        engine.generate(make_prompt(1, 700))
        assert probe.ask_core(engine, "inspect_scheduler")["pins"] > 0
        assert not engine.llm.reset_prefix_cache()
        release()
    engine.drain()  # no request comes: it waits for the engine's own word that it has come to rest
    assert probe.ask_core(engine, "inspect_scheduler")["pins"] == 0
    assert probe.ask_core(engine, "inspect_scheduler")["blocks"] == 0
    assert engine.llm.reset_prefix_cache()
