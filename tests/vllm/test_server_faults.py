"""The cache server dies, hangs or comes back while an engine saves, loads or rests: no request fails, none waits long.

Under vLLM's default policy a load that fails ends its request. So nothing here may make one fail: whatever was leased
stays mapped and is copied, and whatever is asked of a server that does not answer is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm import pool_probe
from tests.vllm.cache_server import SharedServer, await_served
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.tiny_models import SLIDING
from tests.vllm.workload import Run, assert_nothing_is_held, held_copies

if TYPE_CHECKING:
    from vllm import RequestOutput

pytestmark = pytest.mark.vllm

PROMPT = make_prompt(41, 700)
OTHER = make_prompt(42, 700)
RESTORABLE = 640
MAX_STEPS = 50_000
"""A step without a forward takes a fraction of a millisecond, and an answer is waited for 50 ms."""

STOCK_SLOTS = 3 * 256
"""Most slots that are held ready: 32 MiB of each group's records of 128 KiB."""

Logprobs = list[dict[int, float]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with SharedServer(tmp_path_factory.mktemp("faulty")) as server:
        yield server


@pytest.fixture
def engine(engines: EnginePool, server: SharedServer) -> Iterator[Engine]:
    """Served, with empty caches."""
    if not server.is_running:
        server.start()
    engine = engines.acquire(SLIDING, kv_transfer_config=probe.transfer(server=str(server.socket)))
    await_served(engine)
    yield engine
    if not server.is_running:  # the pool drains every engine that it gives away
        server.start()
    await_served(engine)
    engine.forget()


# ---- a pool that is too small ----


def test_without_room_in_the_pool_saves_are_dropped_and_answers_are_right(engine: Engine) -> None:
    cold, local = _learn(engine)
    engine.forget()
    squatter = pool_probe.Squatter(probe.scheduler_connector(engine).scheduler_side, leaves_bytes=0)  # type: ignore[arg-type]
    try:
        neighbour = probe.pool_stats(engine)["reserved"]
        for seed in range(50, 56):  # more than the few slots that are held ready
            engine.generate(make_prompt(seed, 700))
        for prompt in (PROMPT, OTHER, PROMPT):
            assert _generate(engine, prompt) in (cold[tuple(prompt)], local[tuple(prompt)])
            engine.reset_local()
        assert probe.held(engine)["pins"] == 0
        assert probe.pool_stats(engine)["reserved"] == neighbour
    finally:
        squatter.close()
    engine.drain()
    _assert_it_goes_on(engine, local)


def test_the_smallest_pool_keeps_a_prompt_of_a_model_with_several_groups(engines: EnginePool) -> None:
    engine = engines.acquire(SLIDING, kv_transfer_config=probe.transfer(memory="64MiB", save_policy="eager"))
    _, local = _learn(engine)
    for seed in range(60, 75):
        engine.generate(make_prompt(seed, 700))
    _assert_it_goes_on(engine, local)


# ---- what happens to the server ----


@dataclass(frozen=True)
class Fault:
    """`keeps`: what was saved before is there afterwards; else that depends on who is faster."""

    name: str
    strike: Callable[[SharedServer], None]
    recover: Callable[[SharedServer], None]
    keeps: bool
    loses_answers: bool


def _restart(server: SharedServer) -> None:
    server.kill()
    server.start()


def _succeed(server: SharedServer) -> None:
    server.kill()
    server.succeed()


def _nothing(server: SharedServer) -> None:
    pass


FAULTS = (
    Fault("killed", SharedServer.kill, SharedServer.start, keeps=False, loses_answers=True),
    Fault("stopped", SharedServer.stop, SharedServer.go_on, keeps=True, loses_answers=False),
    Fault("killed and started", _restart, _nothing, keeps=False, loses_answers=True),
    Fault("killed and succeeded", _succeed, _nothing, keeps=True, loses_answers=True),
)
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))


@contextmanager
def struck(engine: Engine, server: SharedServer, fault: Fault) -> Iterator[None]:
    """Within it the server is not what it was, and a late answer is a miss; then the engine is served again."""
    client: Any = probe.scheduler_connector(engine).scheduler_side.parts.cache
    settle, engine.settle = engine.settle, lambda: None
    # Slots asked for may have been granted by an answer that was lost.
    engine.lost_slots += STOCK_SLOTS
    try:
        fault.strike(server)
        try:
            with pool_probe.hurried(client):
                yield
        finally:
            fault.recover(server)
            await_served(engine)
    finally:
        engine.settle = settle
    engine.drain()


# ---- when ----


@each_fault
def test_a_fault_between_requests_costs_a_hit_at_most(engine: Engine, server: SharedServer, fault: Fault) -> None:
    cold, local = _learn(engine)
    with struck(engine, server, fault):
        for prompt in (PROMPT, OTHER, PROMPT):
            assert _generate(engine, prompt) in (cold[tuple(prompt)], local[tuple(prompt)])
            engine.reset_local()
    _assert_it_goes_on(engine, local)


@each_fault
def test_what_was_saved_before_a_fault_is_found_after_it_or_saved_again(
    engine: Engine, server: SharedServer, fault: Fault
) -> None:
    cold, local = _learn(engine)
    with struck(engine, server, fault):
        pass
    output = engine.generate(PROMPT, logprobs=2)
    assert output.num_cached_tokens in ((RESTORABLE,) if fault.keeps else (0, RESTORABLE))
    assert _result(output) == (local if output.num_cached_tokens else cold)[tuple(PROMPT)]
    engine.reset_local()
    _assert_it_goes_on(engine, local)


@each_fault
def test_a_fault_during_a_load_fails_no_request(engine: Engine, server: SharedServer, fault: Fault) -> None:
    """The lease is the engine's own: its records stay mapped, whatever becomes of the server."""
    _, local = _learn(engine)
    run = Run(engine)
    with held_copies(engine) as release:
        run.add("loading", PROMPT, max_tokens=8, logprobs=2)
        run.step_until(lambda: probe.held(engine)["loads"] == 1)
        with struck(engine, server, fault):
            run.add("beside it", OTHER, max_tokens=8, logprobs=2)
            run.step_until(lambda: "beside it" in run.outputs, max_steps=MAX_STEPS)
            release()
            run.finish(max_steps=MAX_STEPS)
    assert _result(run.outputs["loading"]) == local[tuple(PROMPT)]
    assert run.outputs["loading"].num_cached_tokens == RESTORABLE
    assert {output.outputs[0].finish_reason for output in run.outputs.values()} == {"length"}
    _assert_it_goes_on(engine, local)


@each_fault
def test_a_fault_during_a_save_loses_that_save_at_most(engine: Engine, server: SharedServer, fault: Fault) -> None:
    cold, local = _learn(engine)
    engine.forget()
    with held_copies(engine) as release:
        assert _generate(engine, PROMPT) == cold[tuple(PROMPT)]
        assert probe.pins(engine) > 0
        with struck(engine, server, fault):
            assert _generate(engine, OTHER) == cold[tuple(OTHER)]
            release()
            engine.drain()
            assert probe.pins(engine) == 0
    _assert_it_goes_on(engine, local)


@each_fault
def test_a_fault_while_a_hit_is_asked_for_is_a_miss_at_most(engine: Engine, server: SharedServer, fault: Fault) -> None:
    """A lease whose answer was lost with its server stays until the engine ends: one for each such request."""
    cold, local = _learn(engine)
    before = probe.pool_stats(engine)["leases"]
    run = Run(engine)
    run.add("asking", PROMPT, max_tokens=8, logprobs=2)
    with struck(engine, server, fault):
        run.finish(max_steps=MAX_STEPS)
    assert _result(run.outputs["asking"]) in (cold[tuple(PROMPT)], local[tuple(PROMPT)])
    assert run.outputs["asking"].outputs[0].finish_reason == "length"
    _assert_it_goes_on(engine, local, lost_leases=before + fault.loses_answers)


# ---- inside ----


def _learn(engine: Engine) -> tuple[dict[tuple[int, ...], Logprobs], dict[tuple[int, ...], Logprobs]]:
    """Returns the answers to both prompts when they are computed, and from the engine's own cache. They are saved
    afterwards."""
    cold, local = {}, {}
    for prompt in (PROMPT, OTHER):
        cold[tuple(prompt)] = _generate(engine, prompt)
        local[tuple(prompt)] = _generate(engine, prompt)
    engine.reset_local()
    return cold, local


def _assert_it_goes_on(engine: Engine, local: dict[tuple[int, ...], Logprobs], *, lost_leases: int = 0) -> None:
    """Checks that prompts computed now are saved and found again, bit for bit, and that nothing is left from before."""
    for prompt in (PROMPT, OTHER):
        engine.generate(prompt)
        engine.reset_local()
        output = engine.generate(prompt, logprobs=2)
        assert output.num_cached_tokens == RESTORABLE
        assert _result(output) == local[tuple(prompt)]
        engine.reset_local()
    assert_nothing_is_held(engine, lost_leases=lost_leases)


def _generate(engine: Engine, prompt: list[int]) -> Logprobs:
    output = engine.generate(prompt, logprobs=2)
    assert output.outputs[0].finish_reason == "length"
    return _result(output)


def _result(output: RequestOutput) -> Logprobs:
    """Per generated token, the logprobs of the best ones and of itself."""
    assert output.outputs[0].logprobs
    return [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs]
