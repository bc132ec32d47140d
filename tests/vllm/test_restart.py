"""A shared server outlives its engines: what one has saved, the next one and its neighbours find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.equality import answer, restorable
from tests.vllm.restarted import start
from tests.vllm.tiny_models import DENSE, GDN, SLIDING, TinyModel

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with SharedServer(tmp_path_factory.mktemp("shared")) as server:
        server.start()
        yield server


@pytest.mark.parametrize("model", [DENSE, SLIDING, GDN], ids=lambda model: model.name)
def test_an_engine_that_was_started_again_hits_at_its_first_request(
    engines: EnginePool, server: SharedServer, model: TinyModel
) -> None:
    engines.leave_process()
    prompt, expected = make_prompt(seed=21, length=1400), restorable(model, 1400)
    engine = start(engines, server, model)
    try:
        assert answer(engine, prompt).cached == 0
        local = answer(engine, prompt)
        assert local.cached == expected
        engine.drain()
    finally:
        engine.close()
    engine = start(engines, server, model)
    try:
        restored = answer(engine, prompt)
        assert restored.cached == expected
        assert restored == local
        engine.drain()
        assert probe.faults(engine) == {}
        assert probe.pool_stats(engine)["leases"] == 0
    finally:
        engine.close()


TENANTS = """
[[domains]]
name = "main"
memory = "256MiB"
[[domains.tenants]]
name = "own"
[[domains.tenants]]
name = "batch"
quota = "64MiB"
"""


def test_a_request_is_charged_to_its_tenant(engines: EnginePool, tmp_path: Path) -> None:
    engines.leave_process()
    prompts = {tenant: make_prompt(seed, 700) for seed, tenant in enumerate(("own", "batch", "stranger"), 24)}
    with SharedServer(tmp_path, tables=TENANTS) as server:
        server.start()
        engine = start(engines, server, DENSE)
        try:
            saved, paid = [probe.pool_stats(engine)["readable"]], []
            for tenant, prompt in prompts.items():
                engine.generate(prompt, **({} if tenant == "own" else {"tenant": tenant}))
                engine.drain()
                saved.append(probe.pool_stats(engine)["readable"])
                paid.append(probe.tenants(engine))
            assert saved[3] - saved[2] == saved[2] - saved[1] == saved[1] - saved[0] > 0
            # Slots that are held ready are the engine's own, and so are blocks saved for an unknown tenant.
            assert [one["batch"] > 0 for one in paid] == [False, True, True]
            assert paid[1]["batch"] == paid[2]["batch"]
            assert [one[""] for one in paid] == [0, 0, 0]
        finally:
            engine.close()


def test_two_engines_on_one_server_find_what_the_other_has_saved(engines: EnginePool, server: SharedServer) -> None:
    """Each with processes of its own, at the same time."""
    prompts = {seed: make_prompt(seed, 1400) for seed in (22, 23)}
    expected = restorable(SLIDING, 1400)
    both: list[Engine] = []
    try:
        for _ in range(2):
            both.append(start(engines, server, SLIDING, has_own_processes=True, **probe.INSPECTED))
        one, other = both
        for saves, finds, seed in ((one, other, 22), (other, one, 23)):
            assert answer(saves, prompts[seed]).cached == 0
            local = answer(saves, prompts[seed])
            saves.drain()
            restored = answer(finds, prompts[seed])
            assert (local.cached, restored.cached) == (expected, expected)
            assert restored == local
        for engine in both:
            engine.drain()
            assert probe.faults(engine) == {}
            left = probe.ask_core(engine, "inspect_scheduler")
            assert left["leases"] == left["pins"] == left["faults"] == left["blocks"] == 0
            assert left["planned_loads"] == 1
    finally:
        for engine in both:
            engine.close()
