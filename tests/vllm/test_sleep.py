"""An engine that sleeps and wakes goes on with our cache, and nothing is left behind by its sleep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt, start_engine
from tests.vllm.sleeping import TakenMemory, sleepy, tells_connectors
from tests.vllm.test_equality import answer, restorable, restored_answer
from tests.vllm.tiny_models import DENSE, GDN, TinyModel
from tests.vllm.workload import assert_nothing_is_held

pytestmark = pytest.mark.vllm

LENGTH = 700
CYCLES = 3


def sleep_and_wake(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.wake_up()


def sleep_deeply(engine: Engine) -> None:
    engine.llm.sleep(level=2)
    engine.llm.wake_up()


def wake_in_parts(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.wake_up(tags=["weights"])
    engine.llm.wake_up(tags=["kv_cache"])


def discard_then_sleep(engine: Engine) -> None:
    engine.llm.sleep(level=0)
    engine.llm.release_kv_cache_memory()
    engine.llm.sleep(level=1)
    engine.llm.wake_up()


SLEEPS = (sleep_and_wake, sleep_deeply, wake_in_parts, discard_then_sleep)
Sleep = Callable[[Engine], None]


def client_threads() -> set[threading.Thread]:
    """Each client of a cache server in this process has one."""
    return {thread for thread in threading.enumerate() if thread.name == "kvoffload-client"}


def check_cycles(engine: Engine, model: TinyModel, sleep: Sleep, memory: TakenMemory) -> None:
    """Each hit after a sleep is ours, and equals the engine's own before it."""
    parts = probe.scheduler_connector(engine)._scheduler._parts  # type: ignore[union-attr]
    clients = client_threads()
    assert clients
    for cycle in range(CYCLES):
        prompt = make_prompt(seed=90 + cycle, length=LENGTH)
        answer(engine, prompt)
        own = answer(engine, prompt)
        engine.drain()
        sleep(engine)
        answer(engine, prompt)
        with probe.watch_loads(engine) as loads:
            found = restored_answer(engine, prompt)
        engine.drain()
        assert found == own
        assert (found.cached, [tokens for tokens in loads if tokens]) == (own.cached, [own.cached])
        assert own.cached == restorable(model, LENGTH)
    assert client_threads() <= clients
    assert probe.scheduler_connector(engine)._scheduler._parts is parts  # type: ignore[union-attr]
    assert {is_held for what, is_held in memory.seen} == {not tells_connectors()}
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("sleep", SLEEPS)
def test_an_engine_that_wakes_has_our_cache_and_nothing_twice(engines: EnginePool, sleep: Sleep) -> None:
    engine = engines.acquire(DENSE, kv_transfer_config=probe.transfer(verify="always"))
    if sleep is discard_then_sleep and not hasattr(engine.llm, "release_kv_cache_memory"):
        pytest.skip("this vLLM cannot discard the KV cache alone")
    with sleepy(engine) as memory:
        check_cycles(engine, DENSE, sleep, memory)


def test_states_survive_a_sleep(engines: EnginePool) -> None:
    engine = engines.acquire(GDN, kv_transfer_config=probe.transfer(verify="always"))
    with sleepy(engine) as memory:
        check_cycles(engine, GDN, sleep_and_wake, memory)


@pytest.fixture
def beside_another(engines: EnginePool, tmp_path: Path) -> Iterator[Engine]:
    engines.close()  # only one may run in this process
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [probe.transfer(verify="always"), other]},
    }
    folder = engines.model_folder(DENSE)
    engine = start_engine(DENSE, folder, max_num_batched_tokens=4096, kv_transfer_config=transfer)
    try:
        probe.prepare(engine)
        yield engine
    finally:
        engine.close()


def test_beside_another_connector_too(beside_another: Engine) -> None:
    with sleepy(beside_another) as memory:
        check_cycles(beside_another, DENSE, sleep_and_wake, memory)


@pytest.mark.parametrize("is_beside", [False, True], ids=["alone", "beside another"])
def test_vllm_starts_an_engine_with_sleep_mode_and_us(engines: EnginePool, is_beside: bool) -> None:
    """What its configuration asks of a connector; on a CPU it refuses sleep mode before that."""
    from vllm.config import KVTransferConfig

    engine = engines.acquire(DENSE, kv_transfer_config=probe.transfer(verify="always"))
    config: Any = copy(engine.llm.llm_engine.vllm_config)
    config.model_config = copy(config.model_config)
    object.__setattr__(config.model_config, "enable_sleep_mode", True)
    if is_beside:
        children = {"connectors": [probe.transfer(), probe.transfer()]}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=children
        )
    config._verify_kv_transfer_compat()
