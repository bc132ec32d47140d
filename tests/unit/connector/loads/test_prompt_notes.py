"""Each prompt is told to the server once, with what it had, what it lacked and what that saved."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.client import PromptNote
from kvoffload.engines.computed_prompts import LINE_PAUSE_S
from kvoffload.protocol import Explanation, Miss
from tests.kit.connector.measured import measured_engine, take
from tests.kit.connector.scripted import ScriptedEngine
from tests.kit.connector.warm import DENSE, warm_engine


def noted(engine: ScriptedEngine) -> PromptNote:
    (note,) = engine.cache.notes
    engine.cache.notes.clear()
    return note


def test_a_hit_is_told_with_what_it_lacked() -> None:
    engine = warm_engine(DENSE)
    engine.cache.notes.clear()
    engine.admit(engine.arrive("second", [*range(16), *range(100, 120)]))
    note = noted(engine)
    assert (note.local, note.boundary, note.tokens, note.miss) == (0, 16, 36, Miss.NEVER_SEEN)
    assert note.boundary < note.limit


def test_a_prompt_that_was_there_to_its_end_lacks_nothing_that_could_be() -> None:
    engine = warm_engine(DENSE)
    engine.cache.notes.clear()
    engine.admit(engine.arrive("second", range(30)))
    note = noted(engine)
    assert (note.boundary, note.limit, note.miss) == (28, 28, Miss.TOO_SHORT)


def test_a_miss_is_told_once_however_often_it_is_asked() -> None:
    engine = warm_engine(DENSE)
    engine.cache.notes.clear()
    request = engine.arrive("second", range(500, 560))
    for _ in range(3):
        assert engine.match(request) == 0
    note = noted(engine)
    assert (note.boundary, note.miss, note.saved_us) == (0, Miss.NEVER_SEEN, 0)


def test_a_turn_is_told_with_its_session_once() -> None:
    engine = warm_engine(DENSE)
    engine.cache.notes.clear()
    request = engine.arrive("second", range(500, 560), session="agent")
    assert engine.match(request) == 0
    assert noted(engine).session == "agent"
    engine.parts.restores.forget("second")
    assert engine.match(request) == 0
    assert noted(engine).session == "", "it was preempted, and asks again"


def test_what_computing_would_have_taken_is_saved() -> None:
    engine = measured_engine()
    for _ in range(4):
        engine.parts.judge.note_prefill(1000, 0.07)
    engine.cache.notes.clear()
    engine.admit(engine.arrive("second", range(30)))
    assert noted(engine).saved_us == 28 * 70
    assert take(engine)["kvoffload_saved_seconds_total"] == {"": pytest.approx(28 * 70e-6)}


@pytest.mark.parametrize(
    ("explanation", "line"),
    [
        (Explanation(miss=Miss.NEVER_SEEN), "never_seen"),
        (
            Explanation(miss=Miss.EVICTED, seconds_ago=12, missing_bytes=3 << 30),
            "evicted 12 s ago; 3GiB more memory would have kept it",
        ),
        (Explanation(miss=Miss.CLEARED, seconds_ago=1), "cleared 1 s ago"),
        (
            Explanation(miss=Miss.OTHER_IDENTITY, differs="layers, salt"),
            "other_identity; differs: layers, salt",
        ),
    ],
)
def test_the_log_says_what_the_server_knows(
    caplog: pytest.LogCaptureFixture, explanation: Explanation, line: str
) -> None:
    engine = warm_engine(DENSE)
    engine.cache.notes.clear()
    with caplog.at_level(logging.DEBUG, "kvoffload.connector.loads.prompt_notes"):
        engine.match(engine.arrive("second", range(500, 560)))
        note = noted(engine)
        assert note.on_explained is not None
        note.on_explained(explanation)
    assert caplog.messages[-1] == f"request second: the server says of its first missing block: {line}"


def test_without_debug_logging_explanations_are_not_asked_for() -> None:
    engine = warm_engine(DENSE)
    engine.cache.notes.clear()
    engine.match(engine.arrive("second", range(500, 560)))
    assert noted(engine).on_explained is None


# ---- reasons ----


def test_labels_are_what_they_were() -> None:
    assert [miss.label for miss in Miss if miss < Miss.EVICTED] == [
        "never_seen",
        "too_short",
        "not_served",
        "refused",
        "slow_to_answer",
        "no_room",
        "slower_than_computing",
        "tier_too_slow",
        "skipped",
    ]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [row.getMessage() for row in caplog.records if "computed although they are stored" in row.getMessage()]


def compute_unserved(engine: ScriptedEngine, name: str) -> None:
    """A prompt comes while the server does not serve, and is computed."""
    engine.cache.is_served = False
    assert engine.match(engine.arrive(name, range(30))) == 0
    engine.cache.is_served = True


def test_the_log_tells_why_a_stored_prompt_was_computed(caplog: pytest.LogCaptureFixture) -> None:
    engine = warm_engine(DENSE)
    engine.cache.fault = "the server has not answered in time"
    compute_unserved(engine, "second")
    [line] = lines_of(caplog)
    assert line == (
        "kvoffload: prompts were computed although they are stored, or may be (not_served 1), "
        "the last one by request second: the cache server does not serve this engine at the moment "
        "(the server has not answered in time); settings: server"
    )


def test_the_log_has_one_such_line_in_ten_minutes_with_counts_of_all_since_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = warm_engine(DENSE)
    for number in range(5):
        compute_unserved(engine, f"early {number}")
    assert len(lines_of(caplog)) == 1
    engine.now_s += LINE_PAUSE_S
    compute_unserved(engine, "late")
    [_, line] = lines_of(caplog)
    assert "(not_served 5), the last one by request late" in line


def test_what_was_not_told_yet_is_told_when_another_prompt_comes_or_the_engine_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = warm_engine(DENSE)
    compute_unserved(engine, "first")
    compute_unserved(engine, "second")
    engine.now_s += LINE_PAUSE_S
    assert engine.match(engine.arrive("new", range(500, 530))) == 0
    assert "(not_served 1), the last one by request second" in lines_of(caplog)[1]
    compute_unserved(engine, "third")
    engine.parts.close()
    assert "(not_served 1), the last one by request third" in lines_of(caplog)[2]


def test_a_prompt_that_is_not_stored_makes_no_such_line(caplog: pytest.LogCaptureFixture) -> None:
    engine = warm_engine(DENSE)
    assert engine.match(engine.arrive("new", range(500, 560))) == 0
    engine.admit(engine.arrive("second", range(30)))
    engine.parts.close()
    assert lines_of(caplog) == []
