"""The output of `kvoffload inspect` about a real engine agrees with the engine's own figures."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvoffload.client.inspector import Inspector
from kvoffload.connector.engine.pipeline import combine_weights, name_pipeline
from tests.vllm import connector_probe as probe
from tests.vllm import pool_probe
from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.tiny_models import GDN

pytestmark = pytest.mark.vllm


def test_sessions_report_identity_and_blocks_of_a_hybrid_engine(engines: EnginePool) -> None:
    engine = engines.acquire(GDN, kv_transfer_config=probe.transfer())
    side: Any = probe.scheduler_connector(engine).scheduler_side
    client: Any = side.parts.cache
    log = pool_probe.follow(side)
    engine.generate(make_prompt(seed=4713, length=1400))
    probe.drain(engine)
    inspector = Inspector(client.look_into)
    with pool_probe.unhurried(client):
        processes = inspector.list_sessions()
        report = inspector.read_report()
        [identity] = [one for one in inspector.list_identities() if one["used_bytes"]]
        blocks, total = inspector.find_blocks()
    assert {(one["role"], one["pid"]) for one in processes} == {("scheduler", os.getpid()), ("worker", os.getpid())}
    assert [one["report"] for one in processes if one["role"] == "worker"] == [True]
    assert report == str(probe.worker_side().registration.report)
    facts = probe.worker_side().facts
    assert facts is not None
    assert facts.weights.name, "what lies in memory is part of who the engine is"
    assert identity["fingerprint"] == name_pipeline([facts.fingerprint], combine_weights([facts.weights.name])).hex()
    assert {group["reuse"] for group in identity["groups"]} == {"prefix", "exact_boundary"}
    assert (total, {(one["group"], one["hash"]) for one in blocks}) == (
        len(blocks),
        {(group, name.hex()) for group, name in log.names()},
    )
    with pool_probe.unhurried(client):
        life = inspector.follow_block(bytes.fromhex(blocks[0]["hash"]))
    assert all(row["where"] == ["memory"] for row in life)
