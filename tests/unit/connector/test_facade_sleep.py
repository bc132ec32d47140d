"""An engine that sleeps and wakes, hook by hook as vLLM 0.33 calls them: nothing is lost, doubled or asked again."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.config import KVTransferConfig

from kvoffload.connector import facade
from kvoffload.connector.common.step_plan import UNASKED, StepPlan, WeightDigests, WorkerFacts, WorkerReport
from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.connector.identity.weight_proof import PROOF_WAIT_S
from kvoffload.connector.identity.weight_watch import PAUSE_S, WeightWatch
from kvoffload.connector.identity.weights import ModelWeights
from kvoffload.errors import RegistrationError
from tests.kit.connector.engine_configs import full, make_config, make_vllm_config
from tests.kit.connector.scripted import ScriptedEngine
from tests.kit.connector.workers import Move
from tests.kit.connector.workers_of_facades import (
    load_plan,
    make_worker,
    open_worker,
    run_step,
    run_until_loaded,
    run_until_saved,
    save_job,
    warm_engine,
)


def facts_of(connector: KVOffloadConnector) -> WorkerFacts:
    facts = connector.get_handshake_metadata()
    assert isinstance(facts, WorkerFacts)
    return facts


def wake(engine: ScriptedEngine, **changes: object) -> None:
    """The handshake that follows a wake-up, with what the ranks said before and these changes of it."""
    facts = {name: replace(one, places=engine.places) for name, one in engine.side.facts.items()}
    last = max(facts)
    facts[last] = replace(facts[last], **changes)  # type: ignore[arg-type]
    engine.connector.set_xfer_handshake_metadata_pp_aware(facts)  # type: ignore[arg-type]


# ---- the worker ----


def test_the_class_is_asked_whether_it_can_sleep() -> None:
    assert (
        KVOffloadConnector.supports_sleep_mode(KVTransferConfig(kv_connector="KVOffloadConnector", kv_role="kv_both"))
        is True
    )


def test_what_was_saved_before_a_sleep_is_loaded_after_it() -> None:
    connector, tensors, shared = make_worker()
    tensors["a"][1].fill_(5)
    run_until_saved(connector, StepPlan(saves=(save_job(shared, Move(0, 1, 0)),)))
    connector.unregister_kv_caches()
    tensors["a"].fill_(0)  # what was in the memory that the engine gave back
    connector.restore_kv_caches()
    run_until_loaded(connector, load_plan(shared, Move(0, 2, 0)))
    assert (tensors["a"][2] == 5).all()
    assert (tensors["a"][1] == 0).all()
    assert connector.faults == {}
    assert len(shared.opened) == 1
    connector.shutdown()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_both_hooks_may_be_called_any_number_of_times(times: int) -> None:
    """Discarding the cache, then sleeping, tells twice."""
    connector, _, shared = make_worker()
    before = facts_of(connector)
    for _ in range(times):
        connector.restore_kv_caches()  # it was not let go of
    assert facts_of(connector) == before
    for _ in range(2):
        for _ in range(times):
            connector.unregister_kv_caches()
        assert facts_of(connector) == replace(before, places=())
        for _ in range(times):
            connector.restore_kv_caches()
        assert facts_of(connector) == before
    assert run_step(connector, StepPlan()).kv_connector_worker_meta == WorkerReport(places={0: (shared.place,)})
    assert run_until_saved(connector, StepPlan(saves=(save_job(shared, Move(0, 1, 0)),))).saved == {1: 1}
    assert connector.faults == {}
    connector.shutdown()


def test_an_engine_whose_cache_was_never_registered_sleeps_too() -> None:
    fresh, _ = open_worker(make_vllm_config(), make_config((["a"], full(4)), num_blocks=8))
    fresh.unregister_kv_caches()
    fresh.restore_kv_caches()
    assert fresh.get_handshake_metadata() is None
    assert fresh.faults == {}


def test_who_the_engine_is_is_not_found_out_again_while_it_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sleep of level 2 its scales come back later than its cache."""
    connector, _, _ = make_worker()
    before = facts_of(connector)
    connector.unregister_kv_caches()
    for name in ("describe_engine", "refuse_ruined_scales"):
        monkeypatch.setattr(facade, name, lambda *given: pytest.fail("looked at a model that is not whole"))
    connector.restore_kv_caches()
    assert facts_of(connector) == before
    assert connector.faults == {}
    connector.shutdown()


def test_a_rank_that_sleeps_has_nowhere_to_copy_and_says_so_in_the_next_step() -> None:
    connector, _, shared = make_worker()
    connector.unregister_kv_caches()
    assert run_step(connector, StepPlan()).kv_connector_worker_meta == WorkerReport(places={0: ()})
    connector.restore_kv_caches()
    assert run_step(connector, StepPlan()).kv_connector_worker_meta == WorkerReport(places={0: (shared.place,)})
    connector.shutdown()


def test_a_wake_up_that_fails_is_a_fault_and_the_rank_has_nowhere_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, _, shared = make_worker()
    before = facts_of(connector)
    connector.unregister_kv_caches()

    def refuse(*given: object, **named: object) -> None:
        raise RegistrationError("no", remedy="none")

    side = connector.worker_side
    assert side is not None
    with monkeypatch.context() as patch:
        patch.setattr(side, "settings", replace(side.settings, open_engine=refuse))
        connector.restore_kv_caches()
    assert connector.faults == {"restore_kv_caches": 1}
    assert facts_of(connector) == replace(before, places=())
    assert run_until_loaded(connector, load_plan(shared, Move(0, 1, 0))).failed_recving == {"a"}
    connector.restore_kv_caches()
    assert facts_of(connector) == before
    connector.shutdown()


# ---- the scheduler ----


def test_the_handshake_of_a_wake_up_changes_nothing() -> None:
    engine = warm_engine()
    parts, before = engine.parts, vars(engine.cache.stats())
    for _ in range(3):
        wake(engine)
    assert engine.parts is parts
    assert vars(engine.cache.stats()) == before
    engine.serve("b", range(30))
    assert engine.connector.faults == {}
    engine.assert_at_rest()


def test_what_was_saved_is_found_after_a_wake_up() -> None:
    engine = warm_engine()
    wake(engine)
    assert engine.connector.get_num_new_matched_tokens(engine.arrive("b", range(30)), 0) == (28, True)


def test_nothing_is_found_or_saved_while_a_rank_has_nowhere_to_copy() -> None:
    engine = ScriptedEngine((["a"], full(4)), ranks=2)
    engine.serve("first", range(30))
    engine.forget()
    wake(engine, places=())
    assert engine.match(engine.arrive("b", range(30))) == 0
    assert not any(plan.saves for plan in engine.serve("c", range(100, 130)))
    engine.hear(WorkerReport(places={1: engine.places}))
    engine.forget()
    assert engine.match(engine.arrive("d", range(30))) == 28
    assert engine.connector.faults == {}


@pytest.mark.parametrize("change", ["fingerprint", "num_blocks", "a rank is missing"])
def test_a_rank_that_wakes_as_another_one_costs_the_engine_our_cache_and_nothing_else(change: str) -> None:
    engine = ScriptedEngine((["a"], full(4)), ranks=2)
    engine.serve("first", range(30))
    engine.forget()
    if change == "a rank is missing":
        engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): engine.side.facts[0, 0]})
    else:
        wake(engine, **{"fingerprint": {"fingerprint": b"g" * 32}, "num_blocks": {"num_blocks": 7}}[change])
    assert engine.connector.faults == {"set_xfer_handshake_metadata_pp_aware": 1}
    for rank in range(2):
        engine.hear(WorkerReport(places={rank: engine.places}))  # and a later word does not undo it
    assert engine.match(engine.arrive("b", range(30))) == 0
    assert not any(plan.saves for plan in engine.serve("c", range(100, 130)))
    assert engine.connector.faults == {"set_xfer_handshake_metadata_pp_aware": 1}


# ---- weights ----

OLD, NEW = b"o" * 32, b"n" * 32


def make_engine(ranks: int = 1) -> ScriptedEngine:
    """That has served a prompt, and whose ranks can prove what they compute with."""
    engine = ScriptedEngine((["a"], full(4)), ranks=ranks, weights=WeightDigests(name=OLD, proof=OLD))
    engine.serve("first", range(30))
    engine.forget()
    return engine


def answer(engine: ScriptedEngine, plan: StepPlan, *proofs: bytes) -> None:
    assert plan.sample
    for rank, proof in enumerate(proofs):
        engine.hear(WorkerReport(weights={rank: (plan.sample, proof)}))


@pytest.mark.parametrize("proofs", [(OLD, OLD), (OLD, NEW), (NEW, OLD), (OLD, b"")])
def test_the_first_request_after_a_sleep_waits_for_what_the_ranks_prove(proofs: tuple[bytes, bytes]) -> None:
    engine = make_engine(ranks=2)
    assert engine.connector.reset_cache() is True
    wake(engine)
    assert engine.step().sample == 0, "nobody wants to know yet"
    request = engine.arrive("b", range(30))
    assert engine.match(request) is None
    plan = engine.step()
    assert engine.match(request) is None
    assert engine.step().sample == 0, "the ranks are asked once"
    answer(engine, plan, *proofs)
    assert engine.match(request) == (28 if proofs == (OLD, OLD) else 0)
    engine.finish(request)
    engine.assert_at_rest()


def test_what_is_saved_with_other_weights_is_found_and_what_was_saved_before_is_not() -> None:
    engine = make_engine()
    engine.connector.reset_cache()
    wake(engine)
    request = engine.arrive("b", range(30))
    assert engine.match(request) is None
    answer(engine, engine.step(), NEW)
    engine.finish(request)
    engine.serve("c", range(100, 130))
    for prompt, expected in ((range(30), 0), (range(100, 130), 28)):
        engine.forget()
        assert engine.match(engine.arrive(str(prompt), prompt)) == expected


def test_engines_that_wake_again_and_again_find_everything_again() -> None:
    engine = make_engine()
    for cycle in range(3):
        engine.connector.reset_cache()
        wake(engine)
        request = engine.arrive(str(cycle), range(30))
        assert engine.match(request) is None
        answer(engine, engine.step(), OLD)
        assert engine.match(request) == 28
        engine.finish(request)
        engine.serve(f"more {cycle}", range(100 * cycle + 100, 100 * cycle + 130))
        engine.forget()
    assert engine.match(engine.arrive("all", range(100, 130))) == 28


def test_a_reset_without_a_sleep_finds_nothing_whatever_the_weights_are() -> None:
    """The user may want a cold cache. The ranks are asked, so that a later sleep is judged by their present answers."""
    engine = make_engine()
    engine.connector.reset_cache()
    request = engine.arrive("b", range(30))
    assert engine.match(request) == 0
    engine.admit(request)
    plan = engine.step()
    answer(engine, plan, NEW)
    engine.report(replace(plan, sample=0))
    engine.finish(request)
    engine.forget()
    engine.connector.reset_cache()
    wake(engine)
    again = engine.arrive("c", range(30))
    assert engine.match(again) is None
    answer(engine, engine.step(), NEW)
    assert engine.match(again) == 28, "what was saved since the reset, and before the sleep"


def test_a_request_waits_for_the_ranks_within_a_bound() -> None:
    engine = make_engine()
    engine.connector.reset_cache()
    wake(engine)
    request = engine.arrive("b", range(30))
    assert engine.match(request) is None
    plan = engine.step()
    engine.now_s += PROOF_WAIT_S
    assert engine.match(request) == 0
    answer(engine, plan, OLD)
    assert engine.match(request) == 0, "what was given up is not taken up again"


def test_an_engine_whose_ranks_can_prove_nothing_asks_nobody() -> None:
    engine = warm_engine()
    engine.connector.reset_cache()
    wake(engine)
    request = engine.arrive("b", range(30))
    assert engine.match(request) == 0
    engine.admit(request)
    assert engine.step().sample == 0


def test_a_rank_that_is_asked_looks_at_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(8)
    monkeypatch.setattr(facade, "find_weights", lambda config: ModelWeights(tensors=(("w", weight),)))
    connector, _, _ = make_worker()
    proof = facts_of(connector).weights.proof
    assert proof
    for number, expected in ((3, True), (4, True), (5, False)):
        if not expected:
            weight[2] = 2
        report = run_step(connector, StepPlan(sample=number)).kv_connector_worker_meta
        assert isinstance(report, WorkerReport)
        (told,) = report.weights.values()
        assert (told[0], told[1] == proof) == (number, expected)
    assert run_step(connector, StepPlan()).kv_connector_worker_meta is None
    assert connector.faults == {}
    connector.shutdown()


def test_with_shared_shapes_weights_prove_a_sleep_and_name_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of other sizes have other tensors of the same model."""
    monkeypatch.setattr(facade, "find_weights", lambda config: ModelWeights(tensors=(("w", torch.ones(8)),)))
    connector, _, _ = make_worker(extra={"shared_shapes": True})
    weights = facts_of(connector).weights
    assert weights.name == b""
    assert weights.proof
    connector.shutdown()


def test_weights_that_change_without_a_reset_are_as_good_as_one(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks of the step that saw the change are not published, nor blocks computed after old blocks of the engine's
    own cache."""
    engine = make_engine(ranks=2)
    published = len(engine.cache.published)
    request = engine.arrive("b", range(100, 130))
    assert engine.match(request) == 0
    engine.admit(request)
    plan = engine.step()
    assert plan.saves
    engine.hear(WorkerReport(weights={1: (UNASKED, b"")}))
    engine.report(plan)
    engine.finish(request)
    assert "the weights have changed without a reset of the caches" in caplog.text
    engine.serve("c", range(200, 230))
    assert len(engine.cache.published) == published
    engine.forget()
    assert engine.match(engine.arrive("d", range(30))) == 0
    engine.connector.reset_cache()
    engine.serve("e", range(300, 330))
    engine.forget()
    assert engine.match(engine.arrive("f", range(300, 330))) == 28


def test_a_rank_that_sees_other_weights_after_a_pause_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, now = torch.nn.Parameter(torch.ones(8)), [0.0]
    monkeypatch.setattr(facade, "find_weights", lambda config: ModelWeights(tensors=(("w", weight),)))
    monkeypatch.setattr(facade, "WeightWatch", lambda find: WeightWatch(find, lambda: now[0]))
    connector, _, _ = make_worker()

    def step() -> object:
        now[0] += PAUSE_S
        return run_step(connector, StepPlan(has_forward=True)).kv_connector_worker_meta

    assert [step(), step()] == [None, None]
    weight.data[2] = 2
    assert run_step(connector, StepPlan()).kv_connector_worker_meta is None, "weights may have no memory now"
    assert [step(), step()] == [WorkerReport(weights={0: (UNASKED, b"")}), None]
    connector.shutdown()
