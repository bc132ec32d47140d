"""Ranks that turn out to hold different bytes: nothing of it is published, and from then on each stores its own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np

from kvoffload.connector.common.step_plan import StepPlan, WorkerReport
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.identity.agreement import refuse_changes
from kvoffload.errors import ServerError
from tests.kit.connector.engine_configs import full, window
from tests.kit.connector.measured import take
from tests.kit.connector.scripted import ScriptedEngine

LINE = "group 0: ranks 0, 1 should hold the same bytes of its blocks and do not"


def make_engine() -> ScriptedEngine:
    return ScriptedEngine((["a"], full(4)), (["b"], window(4)), ranks=2, replicas=2)


def start_request(engine: ScriptedEngine, name: str, tokens: Iterable[int]) -> StepPlan:
    assert engine.admit(engine.arrive(name, tokens)) is not None
    return engine.step()


def report(engine: ScriptedEngine, plan: StepPlan, *, unequal: int | None = None) -> WorkerReport:
    """Digests of both ranks; of this group rank 1 holds other bytes."""
    (save,) = plan.saves
    told = WorkerReport()
    for rank in range(2):
        groups = save.moves.groups[engine.part_of(rank).find_digested(save)]
        rows = np.zeros((len(groups), 2), np.uint64)
        rows[groups == unequal] = rank
        told = told.aggregate(WorkerReport({save.job: 1}, digests={save.job: {rank: rows.tobytes()}}))
    return told


def part(engine: ScriptedEngine) -> StepPlan:
    """The first request's blocks are not the same on both ranks; the plan in which these hear of it."""
    engine.hear(report(engine, start_request(engine, "a", range(30)), unequal=0))
    return engine.step()


def test_equal_ranks_are_published_and_stay_together() -> None:
    engine = make_engine()
    plan = start_request(engine, "a", range(30))
    (save,) = plan.saves
    assert save.compared is not None
    assert set(save.moves.groups[save.compared].tolist()) == {0, 1}
    engine.hear(report(engine, plan))
    assert engine.cache.stats().readable == len(save.moves)
    assert engine.step().apart == ()
    assert engine.former == []


def test_nothing_of_unequal_ranks_is_published_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    plans = [start_request(engine, name, range(first, first + 30)) for name, first in (("a", 0), ("b", 100))]
    engine.hear(report(engine, plans[0], unequal=0))
    engine.hear(report(engine, plans[1], unequal=0))
    assert engine.cache.published == []
    assert engine.pinned == 0
    assert sum(LINE in record.getMessage() for record in caplog.records) == 1


def test_they_store_apart_when_nothing_is_on_its_way_any_more() -> None:
    engine = make_engine()
    plans = [start_request(engine, name, range(first, first + 30)) for name, first in (("a", 0), ("b", 100))]
    engine.hear(report(engine, plans[0], unequal=0))
    assert engine.connector.has_pending_push_work()
    # The second save has not ended; and no further one is begun.
    waiting = start_request(engine, "c", range(200, 230))
    assert (waiting.apart, waiting.saves) == ((), ())
    engine.hear(report(engine, plans[1]))
    assert engine.step().apart == ((0, 0),)
    (former,) = engine.former
    assert former.is_closed
    assert former.published == []
    assert [group.shards for group in engine.cache.register.groups] == [2, 1]
    assert engine.cache.register.fingerprint != former.register.fingerprint
    assert engine.step().apart == ()


def test_an_idle_engine_steps_until_its_ranks_have_joined_or_do_not() -> None:
    engine = make_engine()
    assert part(engine).apart == ((0, 0),)
    assert engine.connector.has_pending_push_work()
    engine.hear(WorkerReport(places=dict.fromkeys(range(2), engine.places)))
    assert not engine.connector.has_pending_push_work()
    engine = make_engine()
    part(engine)
    engine.now_s += 10
    assert not engine.connector.has_pending_push_work()


def test_warnings_are_counted_from_the_new_session_on() -> None:
    """The former one's count would have to go down, and a counter cannot."""
    engine = make_engine()
    engine.cache.warnings = 3
    told = [take(engine)]
    part(engine)
    engine.cache.warnings = 1
    told.append(take(engine))
    assert [one["kvoffload_server_warnings_total"] for one in told] == [{"": 3}, {"": 1}]


def test_later_requests_are_saved_and_restored_apart() -> None:
    engine = make_engine()
    part(engine)
    assert start_request(engine, "early", range(300, 330)).saves == ()  # no rank has joined
    engine.hear(WorkerReport(places=dict.fromkeys(range(2), engine.places)))
    plan = start_request(engine, "b", range(100, 130))
    (save,) = plan.saves
    # The other group still has one writer for each block.
    assert all(engine.part_of(rank).find_written(save)[save.moves.groups == 0].all() for rank in range(2))
    assert save.compared is not None
    assert set(save.moves.groups[save.compared].tolist()) == {1}
    engine.hear(report(engine, plan, unequal=0))  # they are not compared any more
    assert {(one.group, one.shard) for one in engine.cache.published} == {(0, 0), (0, 1), (1, 0)}
    for name in ("a", "b", "early"):
        engine.finish(engine.requests[name])
    engine.report(engine.step())  # what the early one has left
    engine.forget()
    admission = engine.admit(engine.arrive("again", range(100, 130)))
    assert admission is not None
    assert admission.external == 28
    assert len(engine.step().loads) == 1


def test_jobs_of_the_former_session_are_not_taken_for_later_ones() -> None:
    engine = make_engine()
    late = start_request(engine, "a", range(30))
    engine.now_s += 100
    other = start_request(engine, "b", range(100, 130))  # the first save is given up
    engine.hear(report(engine, other, unequal=0))
    assert engine.step().apart == ((0, 0),)
    engine.hear(WorkerReport(places=dict.fromkeys(range(2), engine.places)))
    (save,) = start_request(engine, "c", range(200, 230)).saves
    assert save.job not in {job.job for plan in (late, other) for job in plan.saves}
    engine.hear(report(engine, late))
    assert engine.cache.published == []


def test_an_engine_that_wakes_goes_on_storing_apart() -> None:
    engine = make_engine()
    part(engine)
    refuse_changes(engine.side.facts, engine.side.facts)
    engine.connector.set_xfer_handshake_metadata_pp_aware(engine.side.facts)
    assert engine.connector.faults == {}
    assert [group.replicas for group in engine.side.facts[0, 1].groups] == [1, 2]


def test_where_the_other_session_cannot_be_opened_nothing_is_saved_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def refuse(register: object) -> object:
        raise ServerError("it is full", remedy="")

    monkeypatch.setattr(engine, "open_cache", refuse)
    assert part(engine).apart == ()
    assert engine.connector.faults == {"build_connector_meta": 1}
    assert start_request(engine, "b", range(100, 130)).saves == ()
    assert not engine.connector.has_pending_push_work()
    assert engine.connector.faults == {"build_connector_meta": 1}


def test_events_are_made_by_the_session_that_the_engine_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are left over fail every test here."""
    monkeypatch.setattr(vllm_compat, "wants_events", lambda config: True)
    engine = make_engine()
    former = engine.parts.events
    part(engine)
    assert engine.parts.events not in (former, None)
    engine.side.close()
