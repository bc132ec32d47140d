"""Hints of requests: what the server is asked for, when, and what is counted of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.client import HintSettings
from kvoffload.connector.common.request_settings import RequestSettings
from kvoffload.connector.common.step_plan import StepPlan, WeightDigests, WorkerReport
from kvoffload.connector.hints import request_hints
from kvoffload.protocol import HintAction, Hinted, HintOutcome
from tests.kit.connector.measured import take
from tests.kit.connector.saving import DENSE, TWO_SIZES, make_engine
from tests.kit.connector.scripted import ScriptedEngine

PROMPT = range(30)


def hints_of(*actions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    told = [
        {"action_id": str(at), "action_type": kind, "action_version": "1", "payload": payload}
        for at, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": told}


def end(engine: ScriptedEngine, request_id: str, tokens: range = PROMPT, **wishes: Any) -> StepPlan:
    """A request that has ended, and its saves, which are on their way."""
    engine.admit(engine.arrive(request_id, tokens, **wishes))
    plan = engine.step()
    engine.finish(engine.requests[request_id])
    return plan


def sent(engine: ScriptedEngine) -> list[HintSettings]:
    hints, engine.cache.hints = engine.cache.hints, []
    return hints


def counted(engine: ScriptedEngine) -> dict[str, float]:
    engine.side.note_gauges()
    found: dict[str, float] = take(engine).get("kvoffload_hint_actions_total", {})
    return found


@pytest.mark.parametrize("groups", [DENSE, TWO_SIZES])
def test_a_prefix_is_retained_when_it_is_saved_and_keeps_the_engine_stepping_until_then(groups: object) -> None:
    engine = make_engine(groups)
    plan = end(engine, "a", pin_s=10.0)
    for _ in range(4):
        engine.step()
        assert (sent(engine), engine.parts.hints.pending) == ([], 1)
    engine.report(plan)
    assert engine.connector.has_pending_push_work(), "the server was not told yet"
    engine.step()
    (hint,) = sent(engine)
    limit = engine.parts.groups.align(30)
    assert (hint.action, hint.limit, hint.session, hint.ttl_s) == (HintAction.RETAIN, limit, "", 10.0)
    assert len(hint.chain) == limit // 4 * 32
    engine.assert_at_rest()
    assert counted(engine) == {"retain,done": 1}


def test_saves_of_others_are_not_waited_for() -> None:
    engine = make_engine()
    plan = end(engine, "a", session="agent", session_ttl_s=60)
    engine.report(plan)
    engine.step()
    engine.admit(engine.arrive("b", range(100, 130)))
    later = engine.step()
    engine.step()
    assert [hint.session for hint in sent(engine)] == ["agent"]
    assert engine.parts.saves.pending
    engine.report(later)


def test_a_sessions_next_turn_takes_the_place_of_the_one_before() -> None:
    engine = make_engine()
    plans = [end(engine, "a", range(20), session="agent", session_ttl_s=60)]
    plans.append(end(engine, "b", range(28), session="agent", session_ttl_s=60))
    assert engine.parts.hints.pending == 1
    engine.report(*plans)
    engine.step()
    engine.step()
    assert [hint.limit for hint in sent(engine)] == [28]


def test_sessions_of_two_tenants_are_two() -> None:
    engine = make_engine()
    plans = [
        end(engine, tenant, range(start, start + 20), session="agent", session_ttl_s=60, tenant=tenant)
        for start, tenant in ((0, "a"), (100, "b"))
    ]
    release = hints_of(("release", {"session": "agent"}))
    plans.append(end(engine, "c", range(200, 204), tenant="c", kv_hints=release))
    assert engine.parts.hints.pending == 2
    engine.report(*plans)
    engine.step()
    engine.step()
    assert [(one.action, one.tenant) for one in sent(engine)] == [
        (HintAction.RELEASE, "c"),
        (HintAction.RETAIN, "a"),
        (HintAction.RETAIN, "b"),
    ]


def test_of_a_long_prompt_the_piece_before_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_hints, "PIECE_TOKENS", 4)
    engine = make_engine()
    request = engine.arrive("a", range(60), session="agent", session_ttl_s=60)
    engine.admit(request, chunk=8)
    plans = [engine.step()]
    for _ in range(4):
        assert engine.run(request, 8)
        plans.append(engine.step())
        engine.report(plans.pop(0))
    assert [hint.limit for hint in sent(engine)][:1] == [8], "although its prompt goes on"
    engine.finish(request)


def test_a_session_is_retained_as_its_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small pool would evict the prefix before the turn ends."""
    monkeypatch.setattr(request_hints, "PIECE_TOKENS", 16)
    engine = make_engine()
    request = engine.arrive("a", range(40), session="agent", session_ttl_s=60)
    engine.admit(request, chunk=20)
    engine.report(engine.step())
    for _ in range(3):
        engine.report(engine.step())
    assert [hint.limit for hint in sent(engine)] == [20]
    while request.num_computed_tokens < 40:
        assert engine.run(request, 20)
        engine.report(engine.step())
    for _ in range(12):
        engine.decode(request)
        assert engine.run(request, 1)
        engine.report(engine.step())
    assert [hint.limit for hint in sent(engine)] == [40]
    engine.finish(request)
    for _ in range(3):
        engine.report(engine.step())
    assert [(hint.session, hint.limit) for hint in sent(engine)] == [("agent", 52)]
    engine.assert_at_rest()


def test_at_arrival_is_asked_what_helps_before_it_runs_and_the_rest_at_its_end() -> None:
    engine = make_engine()
    wishes = hints_of(
        ("retain", {"session": "a", "ttl_s": 5, "tokens": 17, "priority": 2}),
        ("prefetch", {}),
        ("priority", {"session": "b", "priority": 7}),
        ("hand_over", {"session": "c"}),
        ("release", {"session": "d"}),
    )
    request = engine.arrive("first", PROMPT, kv_hints=wishes, tenant="acme")
    arrived = sent(engine)
    assert [(one.action, one.session, one.limit) for one in arrived] == [
        (HintAction.PREFETCH, "", 28),
        (HintAction.PRIORITISE, "b", 0),
        (HintAction.HAND_OVER, "c", 28),
    ]
    assert {one.tenant for one in arrived} == {"acme"}
    assert [len(one.chain) // 32 for one in arrived] == [7, 0, 7]
    engine.admit(request)
    plan = engine.step()
    engine.finish(request)
    assert [(one.action, one.session, one.chain) for one in sent(engine)] == [(HintAction.RELEASE, "d", b"")]
    engine.report(plan)
    engine.step()
    engine.step()
    assert [(one.session, one.limit, one.priority) for one in sent(engine)] == [("a", 16, 2)]
    assert counted(engine) == dict.fromkeys(
        ("prefetch,done", "priority,done", "hand_over,done", "release,done", "retain,done"), 1
    )


def test_the_last_turn_lets_its_own_session_go() -> None:
    engine = make_engine()
    end(engine, "a", session="agent", session_ttl_s=60, kv_hints=hints_of(("release", {"session": "agent"})))
    assert engine.parts.hints.pending == 0
    assert [one.action for one in sent(engine)] == [HintAction.RELEASE]


def test_vllms_own_envelope_and_session_count_where_it_has_them() -> None:
    engine = make_engine()
    request = engine.arrive("a", PROMPT, session_ttl_s=60)
    assert engine.side.requests["a"].settings.session == "", "it has no name"
    engine.finish(request)
    for name in ("kv_hints", "session_id"):
        if not hasattr(request, name):
            pytest.skip(f"this vLLM's requests have no {name}")
    request.session_id = "own"
    request.kv_hints = hints_of(("prefetch", {}))
    engine.requests["a"] = request
    engine.connector.on_new_request(request)
    assert engine.side.requests["a"].settings.session == "own"
    assert [one.action for one in sent(engine)] == [HintAction.PREFETCH]


def never_runs(engine: ScriptedEngine) -> None:
    engine.arrive("b", PROMPT, pin_s=10.0)


def is_of_old_weights(engine: ScriptedEngine) -> None:
    engine.admit(engine.arrive("b", PROMPT, pin_s=10.0))
    engine.report(engine.step())
    engine.connector.reset_cache()


def is_short(engine: ScriptedEngine) -> None:
    engine.admit(engine.arrive("b", range(3), pin_s=10.0))
    engine.step()


@pytest.mark.parametrize("begin", [never_runs, is_of_old_weights, is_short])
def test_who_has_nothing_to_keep_waits_for_nothing(begin: Any) -> None:
    engine = make_engine(DENSE)
    begin(engine)
    engine.finish(engine.requests["b"])
    assert (engine.parts.hints.pending, sent(engine)) == (0, [])
    assert counted(engine) == {"retain,skipped": 1}


def test_a_reset_lets_go_of_what_waits() -> None:
    engine = make_engine()
    plan = end(engine, "a", pin_s=10.0)
    engine.connector.reset_cache()
    engine.report(plan)
    engine.step()
    assert sent(engine) == []
    assert counted(engine) == {"retain,skipped": 1}
    engine.assert_at_rest()


def retain(engine: ScriptedEngine, name: str, tokens: range = PROMPT, **wishes: Any) -> HintSettings:
    """A request that has ended and whose prefix the server was told to retain."""
    engine.report(end(engine, name, tokens, **wishes))
    for _ in range(2):
        engine.step()
    engine.forget()
    (hint,) = sent(engine)
    return hint


OLD, NEW = b"o" * 16, b"n" * 16


def judge(engine: ScriptedEngine, proof: bytes, *, has_slept: bool) -> None:
    """The first request since a reset, and what the rank says of its weights then."""
    if has_slept:
        facts = {name: replace(one, places=engine.places) for name, one in engine.side.facts.items()}
        engine.connector.set_xfer_handshake_metadata_pp_aware(facts)  # type: ignore[arg-type]
    request = engine.arrive("judge", range(900, 903))
    if engine.match(request) is not None:
        engine.admit(request)
    plan = engine.step()
    assert plan.sample
    engine.hear(WorkerReport(weights={0: (plan.sample, proof)}))
    engine.finish(request)


def test_a_reset_lets_go_of_what_is_retained_and_of_nothing_that_comes_after_it() -> None:
    engine = make_engine()
    kept = [retain(engine, "a", pin_s=10.0), retain(engine, "b", range(100, 120), session="s", session_ttl_s=60)]
    acme = retain(engine, "c", range(200, 230), pin_s=10.0, tenant="acme")
    engine.connector.reset_cache()
    assert engine.connector.has_pending_push_work()
    for _ in range(2):
        engine.step()
    told = sent(engine)
    assert [(one.action, one.session, one.tenant, bytes(one.chain)) for one in told] == [
        (HintAction.RELEASE, "", "", b"".join(bytes(one.chain) for one in kept)),
        (HintAction.RELEASE, "", "acme", bytes(acme.chain)),
    ]
    assert not engine.connector.has_pending_push_work()
    new = retain(engine, "e", range(100, 124), session="s", session_ttl_s=60)
    assert not any(bytes(new.chain)[-32:] in bytes(one.chain) for one in told)


@pytest.mark.parametrize(("proof", "has_slept"), [(OLD, True), (NEW, True), (b"", True), (OLD, False), (NEW, False)])
def test_after_a_sleep_what_is_found_again_stays_retained(proof: bytes, has_slept: bool) -> None:
    engine = make_engine(weights=WeightDigests(name=OLD, proof=OLD))
    kept = retain(engine, "a", pin_s=10.0)
    engine.connector.reset_cache()
    engine.step()
    assert sent(engine) == [], "nobody knows yet whether it is a sleep"
    judge(engine, proof, has_slept=has_slept)
    engine.step()
    is_found = has_slept and proof == OLD
    assert [bytes(one.chain) for one in sent(engine)] == ([] if is_found else [bytes(kept.chain)])
    engine.connector.reset_cache()
    judge(engine, NEW, has_slept=True)
    engine.step()
    assert [bytes(one.chain) for one in sent(engine)] == ([bytes(kept.chain)] if is_found else [])


def test_hints_that_wait_for_saves_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_hints, "MAX_WAITING", 2)
    engine = make_engine()
    for number in range(4):
        end(engine, str(number), range(100 * number, 100 * number + 9), pin_s=5)
    assert engine.parts.hints.pending == 2
    assert counted(engine) == {"retain,too_many": 2}


def test_it_does_not_wait_for_ever_for_saves_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_hints, "MAX_STEPS", 3)
    engine = make_engine()
    plan = end(engine, "a", pin_s=5)
    for expected in (1, 1, 0):
        engine.step()
        assert engine.parts.hints.pending == expected
    engine.report(plan)
    engine.assert_at_rest()


@pytest.mark.parametrize(
    ("answer", "outcome"), [(None, "no_answer"), (Hinted(outcome=HintOutcome.OVER_LIMIT), "over_limit")]
)
def test_what_the_server_says_is_counted(answer: Hinted | None, outcome: str) -> None:
    engine = make_engine()
    engine.cache.hinted = answer
    engine.arrive("a", PROMPT, kv_hints=hints_of(("prefetch", {})))
    assert counted(engine) == {f"prefetch,{outcome}": 1}


def test_what_is_not_known_is_counted_by_so_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_hints, "MAX_NAMES", 1)
    engine = make_engine()
    for number, kind in enumerate(("move_it", "copy", "move_it", "a,b", "")):
        engine.arrive(str(number), PROMPT, kv_hints=hints_of((kind, {})))
    assert counted(engine) == {"move_it,unknown_action": 2, "other,unknown_action": 3}
    assert engine.connector.faults == {}


def test_a_wrong_envelope_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    for number in range(3):
        engine.arrive(str(number), PROMPT, kv_hints="wrong")
    assert caplog.text.count("kv_hints is ignored") == 1
    engine.now_s += request_hints.SAY_EVERY_S
    engine.arrive("later", PROMPT, kv_hints="wrong")
    assert caplog.text.count("kv_hints is ignored") == 2
    assert counted(engine) == {"other,wrong": 4}


def test_settings_are_wishes_too() -> None:
    hints = make_engine().parts.hints
    assert hints.read(None, RequestSettings(session="a")) == ()
    assert [one.ttl_s for one in hints.read(None, RequestSettings(pin_s=3, session="a", session_ttl_s=4))] == [3, 4]
