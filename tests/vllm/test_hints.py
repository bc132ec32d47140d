"""Hints of requests on a real engine: what is retained outlives what displaces everything else, and is reported."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from kvoffload.protocol import AgentSessions, ListAgentSessions
from kvoffload.protocol.hints import ListRetained, Retained
from tests.vllm import connector_probe as probe
from tests.vllm import pool_probe
from tests.vllm.cache_server import SharedServer
from tests.vllm.engine import Engine, EnginePool, make_prompt, make_sampling, start_engine
from tests.vllm.equality import answer, restorable
from tests.vllm.tiny_models import DENSE

pytestmark = pytest.mark.vllm

LENGTH = 1400
MANY = 60
"""Prompts that are several times what the pool holds."""
ANSWER = 8


def envelope(*actions: tuple[str, dict[str, Any]], version: str = "1") -> dict[str, Any]:
    told = [
        {"action_id": str(at), "action_type": kind, "action_version": version, "payload": payload}
        for at, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": told}


def generate_with_envelope(engine: Engine, prompt: list[int], given: dict[str, Any]) -> None:
    """Gives the envelope to vLLM itself, as a router does."""
    if "kv_hints" not in inspect.signature(engine.llm.llm_engine.add_request).parameters:
        pytest.skip("this vLLM takes no kv_hints")
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    actions = [KvHintAction(**action) for action in given["actions"]]
    engine.llm.llm_engine.add_request(
        "enveloped",
        {"prompt_token_ids": prompt},
        make_sampling(max_tokens=ANSWER),
        kv_hints=KvHintsEnvelope(**{**given, "actions": actions}),
    )
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()


def look(engine: Engine, message: Any) -> Any:
    client: Any = probe.scheduler_connector(engine).scheduler_side.parts.cache
    with pool_probe.unhurried(client):
        return client.look_into(message)


def test_what_is_retained_outlives_the_others_and_sessions_are_reported(engines: EnginePool, tmp_path: Path) -> None:
    engines.leave_process()
    plain, pinned, by_envelope, by_params, turn = (make_prompt(seed, LENGTH) for seed in range(40, 45))
    with SharedServer(tmp_path, memory="64MiB") as server:
        server.start()
        transfer = probe.transfer(server=str(server.socket), save_policy="eager")
        engine = start_engine(DENSE, engines.model_folder(DENSE), kv_transfer_config=transfer)
        probe.prepare(engine)
        try:
            engine.generate(plain, max_tokens=ANSWER)
            engine.generate(pinned, max_tokens=ANSWER, pin_s=600)
            retain = ("retain", {"ttl_s": 600, "session": "routed", "priority": 3})
            unknown = ("dance", {"with": "me"})
            generate_with_envelope(engine, by_envelope, envelope(unknown, retain))
            engine.generate(by_params, max_tokens=ANSWER, kv_hints=envelope(("retain", {"ttl_s": 600})))
            # Hints that are wrong or of another version are ignored and do no harm.
            engine.generate(plain, max_tokens=1, kv_hints="wrong")
            engine.generate(plain, max_tokens=1, kv_hints=envelope(("retain", {"ttl_s": 600}), version="2"))
            agent = {"session": "agent", "session_ttl_s": 600}
            said = engine.generate(turn, max_tokens=ANSWER, **agent)
            second = [*turn, *said.outputs[0].token_ids, *make_prompt(50, 100)]
            engine.reset_local()
            assert engine.generate(second, max_tokens=ANSWER, **agent).num_cached_tokens == restorable(
                DENSE, LENGTH + ANSWER
            )
            engine.drain()
            told = look(engine, ListRetained())
            assert isinstance(told, Retained)
            assert sorted(one.session for one in told.prefixes) == ["", "", "agent", "routed"]
            assert {one.session: one.priority for one in told.prefixes}["routed"] == 3
            lengths = {one.session: one.tokens for one in told.prefixes}
            assert lengths["agent"] > lengths["routed"] >= restorable(DENSE, LENGTH)
            for seed in range(100, 100 + MANY):
                engine.generate(make_prompt(seed, LENGTH), max_tokens=1)
            engine.drain()
            engine.reset_local()
            assert answer(engine, plain).cached == 0, "it is not retained"
            for prompt in (pinned, by_envelope, by_params):
                assert answer(engine, prompt).cached == restorable(DENSE, LENGTH)
            assert answer(engine, second).cached == restorable(DENSE, len(second))
            engine.generate(plain, max_tokens=1, kv_hints=envelope(("release", {"session": "agent"})))
            engine.drain()
            assert "agent" not in {one.session for one in look(engine, ListRetained()).prefixes}
            reported = look(engine, ListAgentSessions())
            assert isinstance(reported, AgentSessions)
            (one,) = reported.sessions
            assert (one.name, one.turns, one.promised) == ("agent", 2, restorable(DENSE, LENGTH + ANSWER))
            assert one.asked == LENGTH + len(second)
            assert probe.faults(engine) == {}
        finally:
            engine.close()
