"""A real engine's misses are counted by the server, and explained in the engine's own log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvoffload.client.insight import ServerInsight
from tests.vllm import connector_probe as probe
from tests.vllm import pool_probe
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.equality import restorable
from tests.vllm.tiny_models import DENSE

pytestmark = pytest.mark.vllm

TOKENS = 1000
WAIT_S = 30.0


@pytest.fixture
def engine(engines: EnginePool) -> Engine:
    return engines.acquire(DENSE, kv_transfer_config=probe.transfer())


def look(engine: Engine) -> ServerInsight:
    client: Any = probe.scheduler_connector(engine).scheduler_side.parts.cache
    with pool_probe.unhurried(client):
        found: ServerInsight = client.insight()
        return found


def await_that(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@contextmanager
def vllm_log_at_debug_level(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Within it, `caplog` has what comes to the one logger of vLLM's that has a handler and a level."""
    vllm = logging.getLogger("vllm")
    with caplog.at_level(logging.DEBUG, "vllm"):
        vllm.addHandler(caplog.handler)
        try:
            yield
        finally:
            vllm.removeHandler(caplog.handler)


def explained(engine: Engine, caplog: pytest.LogCaptureFixture, prompt: list[int]) -> str:
    """Returns the log's explanation of a prompt's first missing block."""
    caplog.clear()
    engine.reset_local()
    engine.generate(prompt)
    said = "the server says of its first missing block: "
    await_that(lambda: any(said in line for line in caplog.messages))
    return next(line.partition(said)[2] for line in caplog.messages if said in line)


def test_a_miss_says_why(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    side: Any = probe.scheduler_connector(engine).scheduler_side
    client: Any = side.parts.cache
    prompt = make_prompt(seed=4711, length=TOKENS)
    log = pool_probe.follow(side)
    with vllm_log_at_debug_level(caplog):
        assert explained(engine, caplog, prompt) == "never_seen"
        probe.drain(engine)
        first = log.entries()[0]
        client.invalidate(first.group, bytes.fromhex(first.name))
        assert explained(engine, caplog, prompt).startswith("untrusted ")
        probe.drain(engine)
        with pool_probe.unhurried(client):
            assert client.clear() > 0
        assert explained(engine, caplog, prompt).startswith("cleared ")
    probe.drain(engine)
    assert probe.faults(engine) == {}


def test_what_was_asked_and_had_is_counted_to_the_token(engine: Engine) -> None:
    block_size = engine.llm.llm_engine.vllm_config.cache_config.block_size
    prompt = make_prompt(seed=4712, length=TOKENS)
    before = look(engine)
    engine.reset_local()
    engine.generate(prompt)
    probe.drain(engine)
    engine.reset_local()
    assert engine.generate(prompt).num_cached_tokens == restorable(DENSE, TOKENS)

    def grown(name: str) -> int:
        return look(engine).outcomes.get(name, 0) - before.outcomes.get(name, 0)

    await_that(lambda: grown("hit_memory") >= restorable(DENSE, TOKENS))
    assert grown("hit_memory") == restorable(DENSE, TOKENS)
    assert grown("never_seen") == TOKENS
    assert grown("too_short") == TOKENS - restorable(DENSE, TOKENS)
    found = look(engine)
    assert found.asked_blocks - before.asked_blocks == 2 * (TOKENS // block_size)
    assert abs(found.distinct_blocks - before.distinct_blocks - TOKENS // block_size) <= 2
    assert [model.used_bytes > 0 for model in found.models[:1]] == [True]
    assert found.models[0].name
    calls = {timing.label: timing.count for timing in found.timings if timing.name == "call"}
    assert calls["acquire"] > 0
    assert calls["publish"] > 0
