"""A real engine loads as many tokens of a prompt as /v1/prefix has answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvoffload.connector.common.block_chain import NO_MASK
from kvoffload.web.prefix_question import read_body
from kvoffload.web.prefixes import Prefixes
from kvoffload.web.server_calls import ServerCalls
from tests.vllm import connector_probe as probe
from tests.vllm import pool_probe
from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.tiny_models import DENSE, GDN, SLIDING, TinyModel

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("model", [DENSE, SLIDING, GDN], ids=lambda model: model.name)
def test_a_hit_is_counted_as_the_engine_counts_it(engines: EnginePool, model: TinyModel) -> None:
    engine = engines.acquire(model, kv_transfer_config=probe.transfer())
    side: Any = probe.scheduler_connector(engine).scheduler_side
    client: Any = side.parts.cache
    # A cache that was reset for an earlier test has masked names; a new engine has none.
    side.masks.generation = NO_MASK
    prompt = make_prompt(seed=9127, length=1400)
    longer = [*prompt, *make_prompt(seed=9128, length=300)]
    other = [*prompt[:1337], *make_prompt(seed=9129, length=60)]
    engine.generate(prompt)
    probe.drain(engine)
    prompts = [prompt, longer, other, make_prompt(seed=9130, length=700)]
    question = read_body({"prompts": [{"tokens": one} for one in prompts]})
    with pool_probe.unhurried(client):
        told = asyncio.run(Prefixes(ServerCalls(client), "").answer(question)).prompts
    fingerprint = client.settings.register.fingerprint.hex()
    hits = [row["hit_tokens"] for rows in told for row in rows if fingerprint.startswith(row["identity"])]
    found = []
    for one in prompts:
        engine.reset_local()
        found.append(engine.generate(one, max_tokens=1).num_cached_tokens)
        probe.drain(engine)
    assert hits == found
    assert hits[0] > 0
    assert hits[3] == 0
