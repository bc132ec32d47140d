"""Figures that are measured on the scheduler side, and when vLLM gets them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.connector.measured import measured_engine, take

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.cache import AcquireOutcome
from kvoffload.connector.common.step_plan import WorkerReport
from kvoffload.connector.engine.measures import HAND_OVER_S, Measures
from kvoffload.connector.loads.question import READY_WAIT_S
from kvoffload.protocol import Miss
from tests.kit.connector.saving import DENSE, make_engine
from tests.kit.connector.scripted import STEP_S, Admission, ScriptedEngine
from tests.kit.connector.warm import warm_engine

RECORD_BYTES = 256


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def count(histogram: dict[str, Any]) -> tuple[int, float]:
    counts, sums = histogram[""]
    return sum(counts), sum(sums)


# ---- the collection ----


def test_what_is_recorded_is_handed_over_once() -> None:
    measures = Measures(Clock())
    measures.count("kvoffload_hits_total", 3, tier="memory")
    measures.count("kvoffload_hits_total", 4, tier="memory")
    measures.count("kvoffload_misses_total", 2, reason="no_room")
    measures.count("kvoffload_queries_total", 0)
    measures.observe("kvoffload_load_seconds", 0.5)
    measures.observe("kvoffload_load_seconds", 0.25)
    measures.set("kvoffload_server_up", 1)
    stats = measures.take()
    assert stats is not None
    assert stats.data["kvoffload_hits_total"] == {"memory": 7}
    assert stats.data["kvoffload_misses_total"] == {"no_room": 2}
    assert stats.data["kvoffload_server_up"] == {"": 1}
    assert count(stats.data["kvoffload_load_seconds"]) == (2, 0.75)
    assert "kvoffload_queries_total" not in stats.data
    assert measures.take() is None


def test_a_gauge_is_told_when_it_has_changed_and_with_everything_else() -> None:
    measures = Measures(Clock())
    measures.set("kvoffload_server_up", 1)
    assert measures.take() is not None
    measures.set("kvoffload_server_up", 1)
    assert measures.take() is None
    measures.count("kvoffload_queries_total", 5)
    stats = measures.take()
    assert stats is not None
    assert stats.data == {"kvoffload_queries_total": {"": 5}, "kvoffload_server_up": {"": 1}}
    measures.set("kvoffload_server_up", 0)
    stats = measures.take()
    assert stats is not None
    assert stats.data == {"kvoffload_server_up": {"": 0}}


def test_names_that_the_catalogue_does_not_have_are_refused_when_taken() -> None:
    measures = Measures(Clock())
    measures.count("kvoffload_nonsense_total")
    with pytest.raises(KeyError):
        measures.take()


def test_it_is_due_again_a_while_after_it_was_taken() -> None:
    clock = Clock()
    measures = Measures(clock)
    assert measures.is_due
    measures.take()
    for passed_s, expected in ((0.0, False), (HAND_OVER_S * 0.9, False), (HAND_OVER_S, True)):
        clock.now_s = passed_s
        assert measures.is_due is expected


# ---- when ----


def test_a_busy_engine_hears_it_after_a_while() -> None:
    engine = measured_engine()
    engine.connector.measures.take()
    engine.arrive("second", range(100, 130))
    engine.connector.measures.count("kvoffload_queries_total", 1)
    assert engine.connector.get_kv_connector_stats() is None
    engine.now_s += HAND_OVER_S
    assert engine.connector.get_kv_connector_stats() is not None


def test_an_idle_engine_hears_it_at_once() -> None:
    engine = measured_engine()
    engine.connector.measures.take()
    engine.connector.measures.count("kvoffload_queries_total", 1)
    assert engine.connector.get_kv_connector_stats() is not None
    assert engine.connector.get_kv_connector_stats() is None


def test_an_engine_that_steps_for_its_saves_alone_is_busy() -> None:
    engine = measured_engine()
    engine.admit(engine.arrive("second", range(100, 130)))
    plan = engine.step()
    engine.finish(engine.requests["second"])
    engine.connector.measures.take()
    engine.connector.measures.count("kvoffload_queries_total", 1)
    assert engine.connector.get_kv_connector_stats() is None
    engine.report(plan)
    stats = engine.connector.get_kv_connector_stats()
    assert stats is not None
    assert count(stats.data["kvoffload_save_seconds"]) == (1, STEP_S)


# ---- what ----


@pytest.mark.parametrize(
    ("prompt", "hits", "reason"),
    [
        (range(30), 28, "too_short"),
        ([*range(16), *range(100, 120)], 16, "never_seen"),
        (range(29), 28, "too_short"),
    ],
    ids=["all of it", "its beginning", "all but the last token"],
)
def test_a_hit_counts_what_it_brings_and_the_rest_as_misses(prompt: Any, hits: int, reason: str) -> None:
    engine = measured_engine()
    request = engine.arrive("second", prompt)
    assert engine.admit(request) == Admission(0, hits)
    data = take(engine)
    assert data["kvoffload_queries_total"] == {"": len(prompt)}
    assert data["kvoffload_hits_total"] == {"memory": hits}
    assert data["kvoffload_misses_total"] == {reason: len(prompt) - hits}


def test_what_the_engine_has_itself_is_not_counted() -> None:
    engine = measured_engine()
    engine.serve("short", range(10))
    take(engine)
    engine.admit(engine.arrive("second", range(30)))
    data = take(engine)
    assert data["kvoffload_queries_total"] == {"": 22}
    assert data["kvoffload_hits_total"] == {"memory": 20}


def refuses(engine: ScriptedEngine) -> None:
    engine.cache.refusal = AcquireOutcome.OVER_LIMIT


def is_not_served(engine: ScriptedEngine) -> None:
    engine.cache.is_served = False


def is_slower(engine: ScriptedEngine) -> None:
    engine.parts.judge.favours_load = lambda tokens, size_bytes, rest: False


def has_no_place(engine: ScriptedEngine) -> None:
    engine.hear(WorkerReport(places={0: ()}))


def is_empty(engine: ScriptedEngine) -> None:
    engine.cache.local_cache.clear(0)


@pytest.mark.parametrize(
    ("change", "tokens", "reason"),
    [
        (is_empty, 30, Miss.NEVER_SEEN),
        (is_empty, 4, Miss.TOO_SHORT),
        (is_not_served, 30, Miss.NOT_SERVED),
        (has_no_place, 30, Miss.NOT_SERVED),
        (refuses, 30, Miss.REFUSED),
        (is_slower, 30, Miss.SLOWER_THAN_COMPUTING),
    ],
)
def test_a_miss_counts_once_by_its_reason_and_adds_up_to_what_was_asked(change: Any, tokens: int, reason: Miss) -> None:
    engine = measured_engine()
    change(engine)
    request = engine.arrive("second", range(tokens))
    engine.match(request)
    engine.now_s += 2 * READY_WAIT_S
    assert [engine.match(request) for _ in range(3)] == [0, 0, 0]
    data = take(engine)
    assert data["kvoffload_queries_total"] == {"": tokens}
    assert data["kvoffload_misses_total"] == {reason.label: tokens}
    assert "kvoffload_hits_total" not in data


def test_a_load_is_timed_from_its_plan_to_its_end() -> None:
    engine = measured_engine(ranks=2)
    engine.admit(engine.arrive("second", range(30)))
    plan = engine.step()
    engine.now_s += 1.0
    take(engine)
    assert engine.parts.restores.blocks == 7
    engine.report(plan)
    data = take(engine)
    assert count(data["kvoffload_load_seconds"]) == (1, 1.0 + STEP_S)
    assert data["kvoffload_loaded_bytes_total"] == {"": 7 * 2 * RECORD_BYTES}
    assert "kvoffload_failed_loads_total" not in data


def test_a_load_that_failed_brings_no_bytes() -> None:
    engine = measured_engine()
    engine.admit(engine.arrive("second", range(30)))
    engine.report(engine.step(), failed=["second"])
    data = take(engine)
    assert data["kvoffload_failed_loads_total"] == {"": 1}
    assert "kvoffload_loaded_bytes_total" not in data


def test_a_save_is_timed_from_its_plan_to_its_end() -> None:
    engine = make_engine(ranks=2)
    engine.admit(engine.arrive("a", range(30)))
    plan = engine.step()
    engine.report(plan, ranks=1)
    engine.now_s += 1.0
    engine.report(plan, ranks=1)
    data = take(engine)
    assert count(data["kvoffload_save_seconds"]) == (1, 1.0 + STEP_S)
    assert data["kvoffload_saved_bytes_total"] == {"": 7 * 2 * RECORD_BYTES}
    assert "kvoffload_failed_saves_total" not in data


def test_a_save_that_failed_is_counted_once() -> None:
    engine = make_engine(ranks=2)
    engine.admit(engine.arrive("a", range(30)))
    engine.report(engine.step(), bad_saves=True)
    data = take(engine)
    assert data["kvoffload_failed_saves_total"] == {"": 1}
    assert "kvoffload_saved_bytes_total" not in data


@pytest.mark.parametrize(
    ("pins", "slots", "expected"),
    [
        (16, None, None),
        (3, None, {"no_pin": 4}),
        (16, 3, {"no_slot": 4}),
        (5, 3, {"no_pin": 2, "no_slot": 2}),
        (0, None, {"no_pin": 7}),
    ],
)
def test_blocks_that_were_not_saved_when_their_request_ends_are_counted_once_by_what_was_lacking(
    pins: int, slots: int | None, expected: dict[str, int] | None
) -> None:
    engine = make_engine(extra={"save_policy": "eager"})
    engine.parts.pins.limit, engine.cache.slots_left = pins, slots
    request = engine.arrive("a", range(26))
    engine.admit(request)
    for _ in range(3):
        engine.step()
        engine.decode(request)
        assert engine.run(request, 1)
    assert "kvoffload_dropped_saves_total" not in take(engine)
    engine.finish(request)
    engine.step()
    assert take(engine).get("kvoffload_dropped_saves_total") == expected


def test_what_was_copied_to_a_server_that_has_ended_is_not_counted_as_saved() -> None:
    engine = make_engine()
    engine.admit(engine.arrive("a", range(30)))
    plan = engine.step()
    engine.cache.serve_anew()
    engine.report(plan)
    data = take(engine)
    assert data["kvoffload_dropped_saves_total"] == {"no_server": 7}
    assert "kvoffload_saved_bytes_total" not in data


def test_gauges_say_what_is_held_now() -> None:
    engine = measured_engine()
    engine.admit(engine.arrive("second", range(30)))
    engine.admit(engine.arrive("third", range(100, 110)))
    plan = engine.step()
    data = take(engine)
    assert data["kvoffload_leased_blocks"] == {"": 7}
    assert data["kvoffload_pinned_blocks"] == {"": 2}
    assert data["kvoffload_server_up"] == {"": 1}
    engine.report(plan)
    engine.cache.is_served = False
    data = take(engine)
    assert data["kvoffload_leased_blocks"] == data["kvoffload_pinned_blocks"] == data["kvoffload_server_up"] == {"": 0}


def test_faults_are_counted_by_their_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = measured_engine()
    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.restores, "expect", lambda tracked: {}[tracked])
        engine.arrive("second", range(30))
    data = take(engine)
    assert data["kvoffload_faults_total"] == {"on_new_request": 1}
    assert data["kvoffload_errors_total"] == {"internal": 1}


def test_what_the_completeness_proof_found_is_told_of_all_ranks() -> None:
    engine = warm_engine(DENSE)
    found = take(engine)["kvoffload_registered_bytes"]
    ranks = found["page"] // 1000
    assert found == {"page": 1000 * ranks, "padding": 10 * ranks, "exclusion": 0}
