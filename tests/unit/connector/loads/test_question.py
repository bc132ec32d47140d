"""How long an answer of the cache holds, and which request waits first for room."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.cache import NO_LIMIT, AcquiredBlocks, AcquireOutcome
from kvoffload.client import PendingAcquire
from kvoffload.connector.common.receipt import MEMORY, UNKNOWN
from kvoffload.connector.loads.question import READY_WAIT_S, Question, WaitingLine
from kvoffload.protocol import Miss

HIT = AcquiredBlocks(AcquireOutcome.HIT, 16)
NO_HIT = AcquiredBlocks(AcquireOutcome.MISS, 4)


def ask(name: str = "a", *, found: AcquiredBlocks | None = None, miss: Miss | None = None) -> Question:
    tracked: Any = SimpleNamespace(request=SimpleNamespace(request_id=name, num_tokens=20), reaches=())
    return Question(tracked, 4, 20, 1, PendingAcquire(local=4, found=found), miss=miss)


@dataclass
class Waiting:
    """A line, and the questions that are open."""

    now_s: float = 100.0
    questions: dict[str, Question] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.line = WaitingLine(lambda: self.now_s)

    def add(self, name: str) -> Question:
        self.questions[name] = question = ask(name)
        return question

    def is_behind(self, question: Question) -> bool:
        return self.line.is_behind(question.tracked, self.questions)


def test_a_question_without_an_answer_holds_while_the_request_is_the_same() -> None:
    question = ask()
    assert question.holds(4, 1)
    assert question.holds(8, 2)
    assert not question.holds(0, 1), "the engine has lost blocks"
    question.tracked.request.num_tokens = 21
    assert not question.holds(4, 1)


def test_a_hit_holds_until_the_engine_has_as_much_itself() -> None:
    question = ask(found=HIT)
    assert question.holds(12, 2)
    assert not question.holds(16, 1)


@pytest.mark.parametrize(("found", "miss"), [(NO_HIT, None), (NO_HIT, Miss.NEVER_SEEN), (HIT, Miss.TOO_SHORT)])
def test_a_miss_holds_until_something_is_saved_or_computed(found: AcquiredBlocks, miss: Miss | None) -> None:
    question = ask(found=found, miss=miss)
    assert question.holds(4, 1)
    assert not question.holds(4, 2)
    assert not question.holds(8, 1)


def test_the_wait_for_memory_counts_from_the_first_look() -> None:
    question = ask(found=HIT)
    assert question.may_wait(100.0)
    assert question.may_wait(100.0 + READY_WAIT_S / 2)
    assert not question.may_wait(100.0 + READY_WAIT_S)


def test_what_slower_tiers_had_brought_for_an_earlier_question_is_told_again() -> None:
    question = ask(found=HIT)
    assert question.find_reaches() == ((MEMORY, NO_LIMIT), (UNKNOWN, NO_LIMIT))
    question.tracked.reaches = ((MEMORY, 8), ("disk", 16))
    assert question.find_reaches() == question.tracked.reaches


def test_others_wait_behind_the_first_that_lacked_room() -> None:
    waiting = Waiting()
    first, second = waiting.add("first"), waiting.add("second")
    assert waiting.line.lets_wait(first, 2.0)
    assert waiting.line.lets_wait(second, 9.0)
    assert not waiting.is_behind(first)
    assert waiting.is_behind(second)


def test_a_request_waits_no_longer_than_it_was_given_at_first() -> None:
    waiting = Waiting()
    first, second = waiting.add("first"), waiting.add("second")
    assert waiting.line.lets_wait(first, 2.0)
    waiting.now_s += 2.0
    assert not waiting.line.lets_wait(first, 2.0)
    assert not waiting.is_behind(second)
    assert not waiting.line.lets_wait(second, 0.0)


@pytest.mark.parametrize("is_gone", [True, False])
def test_the_line_goes_on_once_the_first_is_reported_or_gone(is_gone: bool) -> None:
    waiting = Waiting()
    first, second = waiting.add("first"), waiting.add("second")
    assert waiting.line.lets_wait(first, 2.0)
    if is_gone:
        del waiting.questions["first"]
    else:
        first.reported = 12
    assert not waiting.is_behind(second)
    assert waiting.line.lets_wait(second, 2.0)
    assert waiting.is_behind(first)
