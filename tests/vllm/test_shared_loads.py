"""Eight requests come at once with one long prefix that the engine has forgotten: it is loaded once. With recurrent
layers several requests load it, because vLLM lets one request in a step begin from a state that it has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.connector.loads import shared_loads
from tests.vllm import connector_probe as probe
from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.tiny_models import DENSE, GDN, SLIDING, TinyModel
from tests.vllm.workload import assert_nothing_is_held, connector_side, decided_tokens, serve, serve_alone

pytestmark = pytest.mark.vllm

REQUESTS = 8
PREFIX_TOKENS = 2560
"""A multiple of every model's blocks."""


@pytest.mark.parametrize("model", [DENSE, SLIDING, GDN], ids=lambda model: model.name)
@pytest.mark.parametrize("shares", [True, False], ids=["shared", "control_without_sharing"])
def test_requests_that_come_at_once_load_their_common_prefix_once(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch, model: TinyModel, shares: bool
) -> None:
    engine = engines.acquire(model, kv_transfer_config=probe.transfer(verify="always"))
    prefix = make_prompt(1, PREFIX_TOKENS)
    prompts = {f"request{number}": prefix + make_prompt(2 + number, 40) for number in range(REQUESTS)}
    alone = serve_alone(engine, dict(list(prompts.items())[::4]), max_tokens=8) if shares else {}
    engine.generate(prefix + make_prompt(100, 40))
    engine.reset_local()

    restores = connector_side(engine).parts.restores
    if not shares:
        monkeypatch.setattr(restores, "settings", replace(restores.settings, shares_loads=False))
    monkeypatch.setattr(shared_loads, "LEAST_WAIT_S", 1e6)  # however long this machine takes
    with probe.watch_load_jobs(engine) as jobs:
        run = serve(engine, prompts, max_tokens=8)

    if shares and model is not GDN:
        assert len(jobs) == 1
    else:
        # A request that the engine looks at after another one's load has ended has the engine's own hit.
        assert 1 < len(jobs) <= REQUESTS
    assert len({len(job.moves) for job in jobs}) == 1
    assert {output.num_cached_tokens for output in run.outputs.values()} == {PREFIX_TOKENS}
    for name, output in alone.items():
        expected = decided_tokens(output)
        assert run.tokens(name)[: len(expected)] == expected
    assert restores.shared.waiting == 0
    assert_nothing_is_held(engine)
