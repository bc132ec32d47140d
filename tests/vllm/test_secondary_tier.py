"""Below vLLM's own OffloadingConnector: what one engine has stored the next one finds on the server or its disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import LOOK_S, LOOKS, SharedServer
from tests.vllm.disk_servers import WAIT_S, disk_server
from tests.vllm.engine import Engine, EnginePool, make_prompt, start_engine
from tests.vllm.equality import Answer, answer, restorable
from tests.vllm.tiny_models import DENSE, SLIDING, TinyModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvoffload.connector.secondary_tier import KVOffloadTier

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.v1.kv_offload.tiering.base", reason="this vLLM has no secondary tiers")

LENGTH = 1400


def start(engines: EnginePool, server: SharedServer, model: TinyModel, **settings: object) -> Engine:
    """Starts a new engine: its CPU tier is empty, and ours is below it."""
    tier = {
        "type": "KVOffloadTier",
        "module_path": "kvoffload.connector.secondary_tier",
        "server": str(server.socket),
        **probe.PATIENCE,
        **settings,
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.vllm.host_tiering",
            "cpu_bytes_to_use": 32 << 20,
            "secondary_tiers": [tier],
        },
    }
    engine = start_engine(model, engines.model_folder(model), kv_transfer_config=transfer)
    for _ in range(LOOKS):
        if find_tier(engine).cache.wait_until_served(LOOK_S):
            return engine
    engine.close()
    raise AssertionError("not served")


def find_tier(engine: Engine) -> KVOffloadTier:
    connector: Any = engine.core.scheduler.connector
    (tier,) = connector.connector_scheduler.manager.secondary_tiers
    found: KVOffloadTier = tier
    return found


def serve_and_store(engine: Engine, prompt: list[int], expected: int) -> Answer:
    """The answer to the engine's own hit, when the server has all of its chunks."""
    assert answer(engine, prompt).cached == 0
    own = answer(engine, prompt)
    assert own.cached == expected
    engine.drain()
    assert find_tier(engine).cache.stats().readable >= expected // 128
    return own


def assert_nothing_is_left(engine: Engine) -> None:
    engine.drain()
    tier = find_tier(engine)
    assert tier.faults == {}
    assert (len(tier.transfers), tier.lookups.questions) == (0, 0)
    # The server itself keeps what came up from disk for half a second.
    await_true(lambda: tier.cache.stats().leases == 0)


def test_an_engine_that_was_started_again_loads_what_the_one_before_stored(engines: EnginePool, tmp_path: Path) -> None:
    engines.leave_process()
    prompt, expected = make_prompt(seed=41, length=LENGTH), restorable(DENSE, LENGTH)
    with SharedServer(tmp_path) as server:
        server.start()
        engine = start(engines, server, DENSE)
        try:
            own = serve_and_store(engine, prompt, expected)
            assert_nothing_is_left(engine)
        finally:
            engine.close()
        engine = start(engines, server, DENSE, verify="always")
        try:
            restored = answer(engine, prompt)
            assert restored.cached == expected
            assert restored == own
            engine.forget()  # what this one stores and finds has other names from here on
            assert serve_and_store(engine, prompt, expected) == own
            assert_nothing_is_left(engine)
        finally:
            engine.close()


def test_windows_come_back_from_the_disk_of_a_server_that_was_started_again(
    engines: EnginePool, tmp_path: Path
) -> None:
    engines.leave_process()
    (tmp_path / "disk").mkdir(mode=0o700)
    prompt, expected = make_prompt(seed=42, length=LENGTH), restorable(SLIDING, LENGTH)
    with disk_server(tmp_path) as server:
        engine = start(engines, server, SLIDING)
        try:
            own = serve_and_store(engine, prompt, expected)
            await_true(lambda: disk_has_all(engine))
        finally:
            engine.close()
    # That was kill -9: what the next server has, it has from the disk.
    with disk_server(tmp_path) as server:
        engine = start(engines, server, SLIDING, promote_deadline="30s")
        try:
            assert find_tier(engine).cache.stats().readable == 0
            restored = answer(engine, prompt)
            assert restored.cached == expected
            assert restored == own
            assert_nothing_is_left(engine)
        finally:
            engine.close()


def disk_has_all(engine: Engine) -> bool:
    """The server's disk has what its memory has."""
    stats = find_tier(engine).cache.stats()
    (place,) = stats.places
    return place.records == stats.readable


def await_true(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)
