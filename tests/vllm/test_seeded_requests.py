"""Hundreds of requests from one seed, with shared prefixes, aborts and preemptions: none is lost, nothing is left."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.tiny_models import SLIDING
from tests.vllm.workload import MAX_STEPS, Run, decided_tokens, held_copies, serve_alone, watch_blocks

pytestmark = pytest.mark.vllm

SEED = 4
FAMILIES = 5
PROMPTS = 30
MAX_UNDER_WAY = 14
ENGINE = {
    "num_gpu_blocks_override": 40,
    "max_model_len": 768,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 12,
    "kv_transfer_config": probe.transfer(verify="always"),
    **probe.INSPECTED,
}
POOL_BYTES = 6 << 20  # 48 records of 128 KiB, a fourth of what the prompts fill
COUNTERS = ("preemptions", "planned_loads", "doomed_loads", "evicted", "mismatches")
UNHELD = {"reserved", "used_bytes", "sessions"}


@dataclass(frozen=True)
class Ask:
    """One request of the run."""

    name: str
    prompt: str
    max_tokens: int
    steps_until_abort: int | None


def make_prompts(rng: random.Random) -> dict[str, list[int]]:
    """Prompts of a family share their first two blocks. Most end a few tokens before a block does, so that decoding
    needs another one."""
    families = [make_prompt(rng.randrange(1 << 30), 256) for _ in range(FAMILIES)]
    return {
        f"prompt{i}": families[i % FAMILIES] + make_prompt(rng.randrange(1 << 30), rng.choice([20, 123, 125, 250, 251]))
        for i in range(PROMPTS)
    }


def make_asks(rng: random.Random, prompts: list[str], number: int) -> list[Ask]:
    return [
        Ask(
            name=f"request{i}",
            prompt=rng.choice(prompts),
            max_tokens=rng.choice([2, 6, 12, 24]),
            steps_until_abort=rng.randrange(6) if rng.random() < 0.2 else None,
        )
        for i in range(number)
    ]


def serve_asks(engine: Engine, asks: list[Ask], prompts: dict[str, list[int]]) -> Run:
    """Keeps as many under way as there is room for, and aborts each one that is to be aborted after its steps."""
    run = Run(engine)
    waiting, under_way = list(reversed(asks)), dict[str, tuple[Ask, int]]()
    while waiting or under_way:
        assert run.steps < MAX_STEPS, f"{len(waiting)} waiting, {sorted(under_way)} do not end"
        while waiting and len(under_way) < MAX_UNDER_WAY:
            ask = waiting.pop()
            run.add(ask.name, prompts[ask.prompt], max_tokens=ask.max_tokens)
            under_way[ask.name] = (ask, run.steps)
        late = [
            ask.name
            for ask, begun in under_way.values()
            if ask.steps_until_abort is not None and run.steps - begun >= ask.steps_until_abort
        ]
        run.abort(*late)
        if not run.is_done:
            run.step()
        under_way = {name: found for name, found in under_way.items() if name not in late and name not in run.outputs}
    engine.drain()
    return run


@pytest.mark.parametrize(
    ("has_own_processes", "requests"), [(False, 120), (True, 300)], ids=["in_process", "own_processes"]
)
def test_hundreds_of_requests_leave_nothing_behind_and_none_is_lost(
    engines: EnginePool, has_own_processes: bool, requests: int
) -> None:
    """In one process every block is compared as well."""
    rng = random.Random(SEED)
    prompts = make_prompts(rng)
    asks = make_asks(rng, list(prompts), requests)
    engine = engines.acquire(SLIDING, has_own_processes=has_own_processes, **ENGINE)
    alone = serve_alone(engine, prompts)
    probe.ask_core(engine, "limit_pool", POOL_BYTES)
    before = probe.ask_core(engine, "inspect_scheduler")
    try:
        with nullcontext() if has_own_processes else watch_blocks(engine) as ledger:
            run = serve_asks(engine, asks, prompts)
        after = probe.ask_core(engine, "inspect_scheduler")
    finally:
        probe.ask_core(engine, "limit_pool", 0)

    assert after["reserved"] == before["reserved"], "all but what the neighbour holds"
    grown = {name: after.pop(name) - before[name] for name in COUNTERS}
    assert grown["preemptions"] >= 2
    assert grown["planned_loads"] >= 10
    assert grown["evicted"] > 100
    assert grown["mismatches"] == grown["doomed_loads"] == 0
    assert after.pop("readable") > 0
    assert not any(after[name] for name in after.keys() - UNHELD), after
    assert probe.faults(engine) == {}
    engine.reset_local()

    for ask in asks:
        output = run.outputs.get(ask.name)
        if ask.steps_until_abort is None:
            assert output is not None, f"{ask} is lost"
        if output is None:
            continue
        assert output.outputs[0].finish_reason == "length"
        assert len(run.tokens(ask.name)) == ask.max_tokens
        expected = decided_tokens(alone[ask.prompt])[: ask.max_tokens]
        assert run.tokens(ask.name)[: len(expected)] == expected, ask
    assert sum(len(decided_tokens(output)) for output in alone.values()) > PROMPTS
    if ledger is not None:
        assert len(ledger.restored) > 50
        assert all(ledger.restored)
        assert all(ledger.saved.values())


def test_an_idle_engine_releases_its_pins_by_itself(engines: EnginePool) -> None:
    engine = engines.acquire(SLIDING, has_own_processes=True, **ENGINE)
    with held_copies(engine) as release:
        engine.generate(make_prompt(1, 700))
        assert probe.ask_core(engine, "inspect_scheduler")["pins"] > 0
        assert not engine.llm.reset_prefix_cache()
        release()
    engine.drain()  # no request comes: it waits for the engine's own word that it has come to rest
    assert probe.ask_core(engine, "inspect_scheduler")["pins"] == 0
    assert probe.ask_core(engine, "inspect_scheduler")["blocks"] == 0
    assert engine.llm.reset_prefix_cache()
