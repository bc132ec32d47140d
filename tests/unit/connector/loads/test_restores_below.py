"""Loads from below the server's memory: who asks for them, and how often."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.client import PendingAcquire
from tests.kit.connector.measured import measured_engine, take
from tests.kit.connector.scripted import Admission, ScriptedEngine
from tests.kit.connector.warm import DENSE, warm_engine


def tiered_engine(**options: Any) -> ScriptedEngine:
    engine = warm_engine(DENSE, **options)
    engine.cache.has_tiers = True
    return engine


def test_a_request_that_memory_has_not_whole_asks_what_lies_below_once() -> None:
    engine = tiered_engine()
    request = engine.arrive("second", range(60))
    assert [far.wait_s for far in engine.cache.far if far is not None] == [2.0]
    assert engine.cache.asked == [(0, 28)]
    assert engine.match(request) == 28
    engine.cache.far.clear()
    engine.parts.restores.drop_answers()
    assert engine.match(request) == 28
    assert engine.cache.far == [None], "what was waited for is not waited for again"


def test_nothing_is_asked_of_what_lies_below_that_the_engine_has_itself() -> None:
    engine = ScriptedEngine(*DENSE)
    engine.cache.has_tiers = True
    engine.serve("first", range(30))
    engine.cache.far.clear()
    engine.arrive("second", range(30))
    assert engine.cache.far == []
    engine.arrive("third", [*range(30), *range(100, 140)])
    assert len(engine.cache.far) == 1


def test_a_deadline_of_nothing_asks_nothing_below() -> None:
    engine = warm_engine(DENSE, extra={"promote_deadline": "0s"})
    engine.cache.has_tiers = True
    engine.arrive("second", range(60))
    assert set(engine.cache.far) == {None}


@pytest.mark.parametrize(("policy", "told"), [("faster", 70_000), ("always", 0)])
def test_the_server_is_told_what_computing_would_take(policy: str, told: int) -> None:
    """Where hits are always loaded it is not to be compared with anything."""
    engine = tiered_engine(extra={"load_policy": policy})
    engine.arrive("second", range(60))
    for _ in range(4):
        engine.parts.judge.note_prefill(1000, 0.07)
    engine.arrive("third", range(60))
    assert [far.token_ns for far in engine.cache.far if far is not None] == [0, told]


def test_tokens_that_memory_alone_did_not_have_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = measured_engine()
    engine.cache.has_tiers = True
    start = engine.cache.start_acquire

    def start_below(*arguments: Any, **options: Any) -> PendingAcquire:
        pending = start(*arguments, **options)
        pending.in_memory = 8
        return pending

    monkeypatch.setattr(engine.cache, "start_acquire", start_below)
    assert engine.admit(engine.arrive("second", range(30))) == Admission(0, 28)
    assert take(engine)["kvoffload_hits_total"] == {"memory": 8, "lower": 20}
