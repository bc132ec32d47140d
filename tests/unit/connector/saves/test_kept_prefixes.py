"""`pin_s`: prefixes that stay in the cache for a while."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.saves import kept_prefixes
from kvoffload.connector.step_plan import StepPlan, WorkerReport
from tests.kit.connector.engine_configs import full
from tests.kit.connector.local_client import MEMORY
from tests.kit.connector.saving import DENSE, TWO_SIZES, make_engine
from tests.kit.connector.scripted import Admission, ScriptedEngine

RECORD_BYTES = 256
SIXTEEN = replace(
    MEMORY, memory_bytes=16 * RECORD_BYTES, segment_bytes=16 * RECORD_BYTES, extent_bytes=16 * RECORD_BYTES
)
"""Records. Two of them may be kept."""


def end(engine: ScriptedEngine, request_id: str, tokens: range, pin_s: float = 10.0) -> StepPlan:
    """A request that has ended, and its saves, which are on their way."""
    engine.admit(engine.arrive(request_id, tokens, pin_s=pin_s))
    plan = engine.step()
    engine.finish(engine.requests[request_id])
    return plan


def keep(engine: ScriptedEngine, request_id: str, tokens: range, pin_s: float = 10.0) -> None:
    engine.report(end(engine, request_id, tokens, pin_s))
    engine.step()


def leases(engine: ScriptedEngine) -> int:
    return engine.cache.stats().leases


def test_it_is_leased_when_it_is_saved_and_keeps_the_engine_stepping_until_then() -> None:
    engine = make_engine()
    plan = end(engine, "a", range(30))
    for _ in range(3):
        engine.step()
        assert (engine.parts.kept.pending, engine.parts.kept.kept, leases(engine)) == (1, 0, 0)
        assert engine.cache.asked == []
    engine.report(plan)
    assert engine.connector.has_pending_push_work(), "it is not leased yet"
    engine.step()
    assert (engine.parts.kept.pending, engine.parts.kept.kept, leases(engine)) == (0, 1, 1)
    assert engine.cache.asked == [(0, 28)]
    assert not engine.connector.has_pending_push_work()


@pytest.mark.parametrize("groups", [DENSE, TWO_SIZES])
def test_it_is_released_by_the_first_step_after_its_time(groups: object) -> None:
    engine = make_engine(groups)
    engine.report(end(engine, "a", range(30), pin_s=10.0))
    begun_s = engine.now_s
    engine.step()
    for passed_s, expected in ((0.2, 1), (9.9, 1), (10.0, 0), (11.0, 0)):
        engine.now_s = begun_s + passed_s
        assert leases(engine) == engine.parts.kept.kept
        engine.step()
        assert leases(engine) == expected
    engine.assert_at_rest()


@pytest.mark.parametrize(("pin_s", "expected"), [(0.0, 0), (1000.0, 8)])
def test_eviction_does_not_take_it_meanwhile(pin_s: float, expected: int) -> None:
    engine = make_engine(memory=SIXTEEN, extra={"save_policy": "eager"})
    keep(engine, "a", range(9), pin_s)
    for number in range(1, 6):
        engine.serve(str(number), range(100 * number, 100 * number + 30))
    assert engine.cache.stats().evicted > 0
    engine.forget()
    assert engine.match(engine.arrive("b", range(9))) == expected


@pytest.mark.parametrize(("tokens", "kept"), [(9, 1), (13, 0)])
def test_at_most_an_eighth_of_the_pool_is_kept(tokens: int, kept: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(memory=SIXTEEN, extra={"save_policy": "eager"})
    keep(engine, "a", range(tokens))
    assert engine.parts.kept.kept == leases(engine) == kept
    keep(engine, "b", range(100, 105))
    assert engine.parts.kept.kept == leases(engine) == 1, "one record more than there is room for, or the only one"
    assert caplog.text.count("a prefix is not kept for its pin_s: they would be more than 512 bytes") == 1


@pytest.mark.parametrize(("records", "kept"), [(16, 0), (32, 1)])
def test_the_pool_is_that_of_the_server_that_leases(records: int, kept: int) -> None:
    """It may have come after the engine had started, with more memory or less."""
    engine = make_engine(memory=SIXTEEN, extra={"save_policy": "eager"})
    size_bytes = records * RECORD_BYTES
    engine.cache.serve_anew(
        replace(SIXTEEN, memory_bytes=size_bytes, segment_bytes=size_bytes, extent_bytes=size_bytes)
    )
    engine.hear(WorkerReport(places={0: engine.places}))
    keep(engine, "a", range(13))
    assert engine.parts.kept.kept == leases(engine) == kept


def test_shards_count() -> None:
    engine = make_engine(memory=SIXTEEN, ranks=2, extra={"save_policy": "eager"})
    keep(engine, "a", range(9))
    assert engine.parts.kept.kept == 0
    keep(engine, "b", range(100, 105))
    assert engine.parts.kept.kept == 1


def test_so_many_are_kept_at_most(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kept_prefixes, "MAX_KEPT", 2)
    engine = make_engine()
    for number in range(4):
        keep(engine, str(number), range(100 * number, 100 * number + 9))
    assert engine.parts.kept.kept == leases(engine) == 2
    assert caplog.text.count("there are 2 already") == 1
    engine.now_s += 20.0
    engine.step()
    keep(engine, "later", range(9))
    assert leases(engine) == 1


def test_those_that_wait_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_prefixes, "MAX_KEPT", 2)
    engine = make_engine()
    plans = [end(engine, str(number), range(100 * number, 100 * number + 9)) for number in range(4)]
    assert engine.parts.kept.pending == 2
    engine.report(*plans)
    engine.step()
    assert leases(engine) == 2


@pytest.mark.parametrize("state", ["waits for its saves", "was asked for", "is leased"])
def test_a_reset_lets_go_of_it(state: str) -> None:
    engine = make_engine()
    plan = end(engine, "a", range(30))
    engine.cache.holds_answers = state == "was asked for"
    if state != "waits for its saves":
        engine.report(plan)
        engine.step()
        assert engine.cache.asked == [(0, 28)]
    engine.connector.reset_cache()
    engine.cache.answer()
    assert leases(engine) == 0
    if state == "waits for its saves":
        engine.report(plan)
    engine.step()
    engine.assert_at_rest()


def test_it_does_not_wait_for_ever_for_saves_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_prefixes, "MAX_STEPS", 3)
    engine = make_engine()
    plan = end(engine, "a", range(30))
    for expected in (1, 1, 0):
        engine.step()
        assert engine.parts.kept.pending == expected
    engine.report(plan)
    engine.assert_at_rest()


def test_what_was_not_saved_is_not_kept() -> None:
    engine = make_engine()
    engine.report(end(engine, "a", range(30)), bad_saves=True)
    engine.step()
    engine.assert_at_rest()


def never_runs(engine: ScriptedEngine) -> None:
    assert engine.admit(engine.arrive("b", range(30), pin_s=10.0)) == Admission(28, 0)


def is_of_old_weights(engine: ScriptedEngine) -> None:
    engine.admit(engine.arrive("b", range(30), pin_s=10.0))
    engine.step()
    engine.connector.reset_cache()


def is_short(engine: ScriptedEngine) -> None:
    engine.admit(engine.arrive("b", range(3), pin_s=10.0))
    engine.step()


def has_no_wish(engine: ScriptedEngine) -> None:
    engine.admit(engine.arrive("b", range(30)))
    engine.step()


@pytest.mark.parametrize("begin", [never_runs, is_of_old_weights, is_short, has_no_wish])
def test_who_has_nothing_to_keep_waits_for_nothing(begin: Any) -> None:
    engine = make_engine(((["a"], full(4)),))
    engine.serve("a", range(30))
    begin(engine)
    engine.finish(engine.requests["b"])
    assert engine.parts.kept.pending == 0
    engine.step()
    engine.assert_at_rest()


def test_memory_of_a_server_that_is_gone_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    keep(engine, "a", range(30))
    assert (engine.parts.kept.kept, leases(engine)) == (1, 1)
    monkeypatch.setattr(type(engine.cache), "memory_id", engine.cache.memory_id + 1)
    engine.step()
    assert engine.parts.kept.kept == 0
