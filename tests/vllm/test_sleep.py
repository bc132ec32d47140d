"""An engine that sleeps and wakes goes on with our cache, and nothing is left behind by its sleep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from kvoffload.connector.identity import weight_watch
from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt, start_engine
from tests.vllm.equality import Answer, answer, restorable, restored_answer
from tests.vllm.sleeping import TakenMemory, sleepy, tells_connectors
from tests.vllm.tiny_models import DENSE, GDN, TinyModel
from tests.vllm.weights import compare_with_the_model, scale_all, scale_keys, seen_weights
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
    parts = probe.scheduler_connector(engine).scheduler_side.parts  # type: ignore[union-attr]
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
    assert probe.scheduler_connector(engine).scheduler_side.parts is parts  # type: ignore[union-attr]
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
    engines.leave_process()
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


def test_with_another_connector_an_engine_sleeps_too(beside_another: Engine) -> None:
    with sleepy(beside_another) as memory:
        check_cycles(beside_another, DENSE, sleep_and_wake, memory)


@pytest.mark.parametrize("is_beside", [False, True], ids=["alone", "beside another"])
def test_vllm_starts_an_engine_with_sleep_mode_and_us(engines: EnginePool, is_beside: bool) -> None:
    """Makes the check of vLLM's configuration on a connector; on a CPU, vLLM refuses sleep mode before that."""
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
    config._verify_kv_transfer_compat()  # private: what vLLM runs where it makes a configuration, on a GPU


# ---- weights ----

PROMPT = make_prompt(seed=60, length=LENGTH)


@pytest.fixture(scope="module")
def provable(engines: EnginePool) -> Iterator[Engine]:
    """An engine whose weights can all be seen."""
    engines.leave_process()
    transfer = probe.transfer(verify="always", memory="64MiB")
    with seen_weights():
        engine = start_engine(DENSE, engines.model_folder(DENSE), kv_transfer_config=transfer)
    try:
        probe.prepare(engine)
        yield engine
    finally:
        engine.close()


@pytest.fixture
def saved(provable: Engine) -> Answer:
    """The engine's own hit of a prompt that we have saved, with nothing else saved."""
    provable.forget()
    answer(provable, PROMPT)
    own = answer(provable, PROMPT)
    provable.drain()
    assert own.cached == restorable(DENSE, LENGTH)
    return own


def cached_after_a_sleep(own: Answer) -> int:
    """Older versions tell a connector of a sleep as they do of new weights, and of nothing else."""
    return own.cached if tells_connectors() else 0


def assert_is_computed(engine: Engine, prompt: list[int]) -> Answer:
    """Nothing of it is found, and its answer is what the engine says without us."""
    found = answer(engine, prompt)
    engine.reset_local()
    output = engine.generate(prompt, logprobs=3, skip_load=True)
    assert (found.cached, output.num_cached_tokens) == (0, 0)
    assert tuple(output.outputs[0].token_ids) == found.tokens
    return found


def test_every_weight_of_the_model_is_found(provable: Engine) -> None:
    assert provable.ask_workers(compare_with_the_model) == [[[], 0]]


@pytest.mark.parametrize("sleep", [sleep_and_wake, sleep_deeply, wake_in_parts])
def test_what_was_saved_is_found_after_a_sleep_that_the_weights_survive(
    provable: Engine, saved: Answer, sleep: Sleep
) -> None:
    with sleepy(provable):
        for _ in range(2):
            sleep(provable)
            found = answer(provable, PROMPT)
            provable.drain()
            assert found.cached == cached_after_a_sleep(saved)
            assert found.tokens == saved.tokens
            assert found == saved or not found.cached
    assert_nothing_is_held(provable)


def test_weights_that_are_loaded_again_in_a_deep_sleep_are_the_same(provable: Engine, saved: Answer) -> None:
    with sleepy(provable):
        provable.llm.sleep(level=2)
        provable.ask_workers(scale_keys, 0.25)
        provable.llm.wake_up(tags=["weights"])
        provable.ask_workers(scale_keys, 4.0)
        provable.llm.wake_up(tags=["kv_cache"])
        assert answer(provable, PROMPT).cached == cached_after_a_sleep(saved)


@pytest.mark.parametrize("moment", ["asleep", "awake"])
def test_weights_that_change_with_a_sleep_find_nothing_of_the_old_ones(
    provable: Engine, saved: Answer, moment: str
) -> None:
    """This holds even if they change when the engine is awake already, without a reset."""
    with sleepy(provable):
        provable.llm.sleep(level=1)
        if moment == "asleep":
            provable.ask_workers(scale_keys, 4.0)
        provable.llm.wake_up()
        if moment == "awake":
            provable.ask_workers(scale_keys, 4.0)
        try:
            assert assert_is_computed(provable, PROMPT).logprobs != saved.logprobs
            again = restored_answer(provable, PROMPT)
            assert again.cached == saved.cached, "what was saved since is found"
        finally:
            provable.ask_workers(scale_keys, 0.25)
            provable.forget()


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_a_reset_finds_nothing_whether_the_weights_have_changed_or_not(
    provable: Engine, saved: Answer, factor: float
) -> None:
    """A user who resets without a sleep may want a cold cache."""
    provable.ask_workers(scale_keys, factor)
    try:
        provable.forget()
        computed = assert_is_computed(provable, PROMPT)
        assert (computed.tokens == saved.tokens) >= (factor == 1.0)
        assert (computed.logprobs != saved.logprobs) >= (factor != 1.0)
    finally:
        provable.ask_workers(scale_keys, 1 / factor)
        provable.forget()


def test_weights_that_change_and_nobody_resets_anything_are_seen_by_the_next_step(
    provable: Engine, saved: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_watch, "PAUSE_S", 0.0)  # or a test would have to wait
    assert [restored_answer(provable, PROMPT).cached for _ in range(3)] == [saved.cached] * 3
    provable.ask_workers(scale_all, 2.0)
    try:
        answer(provable, make_prompt(seed=61, length=LENGTH))
        provable.drain()
        assert restored_answer(provable, PROMPT).cached == 0
        assert probe.faults(provable) == {}
    finally:
        provable.ask_workers(scale_all, 0.5)
        provable.forget()
    assert answer(provable, PROMPT).cached == 0
    again = restored_answer(provable, PROMPT)
    assert (again, again.cached) == (saved, saved.cached)
