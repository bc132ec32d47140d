"""Below vLLM's own OffloadingConnector: what one engine has stored, the next one finds on the same server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import LOOK_S, LOOKS, SharedServer
from tests.vllm.engine import Engine, EnginePool, make_prompt, start_engine
from tests.vllm.test_equality import answer, restorable
from tests.vllm.tiny_models import DENSE, SLIDING, TinyModel

if TYPE_CHECKING:
    from kvoffload.connector.secondary_tier import KVOffloadTier

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.v1.kv_offload.tiering.base", reason="this vLLM has no secondary tiers")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with SharedServer(tmp_path_factory.mktemp("tier")) as server:
        server.start()
        yield server


def start(engines: EnginePool, model: TinyModel, **settings: object) -> Engine:
    """An engine whose CPU tier is empty, with ours below it."""
    engines.close()  # only one may run in this process
    tier = {"type": "KVOffloadTier", "module_path": "kvoffload.connector.secondary_tier", **probe.PATIENCE, **settings}
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
        if find_tier(engine)._cache.wait_until_served(LOOK_S):
            return engine
    engine.close()
    raise AssertionError("not served")


def find_tier(engine: Engine) -> KVOffloadTier:
    connector: Any = engine.core.scheduler.connector
    (tier,) = connector.connector_scheduler.manager.secondary_tiers
    found: KVOffloadTier = tier
    return found


def readable(engine: Engine) -> int:
    """Chunks that the server has, when all that was told it has arrived."""
    return int(find_tier(engine)._cache.stats().readable)


@pytest.mark.parametrize("model", [DENSE, SLIDING], ids=lambda model: model.name)
def test_an_engine_that_was_started_again_loads_what_the_one_before_stored(
    engines: EnginePool, server: SharedServer, model: TinyModel
) -> None:
    prompt, expected = make_prompt(seed=41, length=1400), restorable(model, 1400)
    settings = {"server": str(server.socket), "verify": "always"}
    engine = start(engines, model, **settings)
    try:
        before = readable(engine)
        assert answer(engine, prompt).cached == 0
        own = answer(engine, prompt)
        assert own.cached == expected
        engine.drain()
        stored = readable(engine) - before
        assert stored >= expected // 128
    finally:
        engine.close()
    engine = start(engines, model, **settings)
    try:
        restored = answer(engine, prompt)
        assert restored.cached == expected
        assert restored == own
        engine.forget()  # what this one stores and finds has other names from here on
        assert answer(engine, prompt).cached == 0
        assert answer(engine, prompt) == own
        engine.drain()
        assert find_tier(engine).faults == {}
        assert find_tier(engine)._cache.stats().leases == 0
    finally:
        engine.close()
