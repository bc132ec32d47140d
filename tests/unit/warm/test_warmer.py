"""Prompts go to an engine, some at a time, and the cache is asked before and after."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvoffload.warm.json_client import AnswerError
from kvoffload.warm.prompt_file import BadLine, WarmPrompt
from kvoffload.warm.warmer import MAX_LOOKS, THREADS_PER_REQUEST, WAITS_S, CacheQuestion, Outcome, Warmer


class Engine:
    """Answers by what a test says."""

    def __init__(self, answer: Any = None, tokens: Any = None) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._tokens = tokens or {"tokens": [7, 8, 9]}
        self._answer = answer or {"usage": {"prompt_tokens": 3}}

    def post(self, path: str, what: Any) -> Any:
        self.asked.append((path, what))
        if path == "/tokenize":
            if isinstance(self._tokens, Exception):
                raise self._tokens
            return self._tokens
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer() if callable(self._answer) else self._answer


class Cache:
    """Answers these hits, one after the other, and the last one from then on."""

    def __init__(self, *hits: Any, block: int = 0) -> None:
        self.asked: list[Any] = []
        self._known = {"block_tokens": block} if block else {}
        self._hits = list(hits)

    def post(self, path: str, what: Any) -> Any:
        assert path == "/v1/prefix"
        self.asked.append(what)
        hits = self._hits.pop(0) if len(self._hits) > 1 else self._hits[0]
        if isinstance(hits, Exception):
            raise hits
        hits = hits if isinstance(hits, list) else [hits]
        return {"identities": [{"hit_tokens": hit, "why": "another seed", **self._known} for hit in hits]}


def prompt(line: int = 1, **given: Any) -> WarmPrompt:
    given = {"prompt": [1, 2, 3]} | given
    return WarmPrompt(line=line, kind="messages" if "messages" in given else "prompt", body=given)


def warm(engine: Any, cache: Any, *prompts: WarmPrompt | BadLine, **changes: Any) -> list[Outcome]:
    settings = {"at_once": 1, "model": "m", "wait": lambda seconds: None} | changes
    return sorted(Warmer(engine, cache, **settings).run(prompts), key=lambda outcome: outcome.line)


def test_what_is_new_is_what_the_cache_says_after_less_before() -> None:
    engine, cache = Engine(), Cache(1, 1, 2, 3)
    [outcome] = warm(engine, cache, prompt())
    assert outcome == Outcome(line=1, tokens=3, before=1, after=3)
    assert engine.asked == [("/v1/completions", {"model": "m", "prompt": [1, 2, 3]})]
    assert cache.asked[0] == {"tokens": [1, 2, 3]}


def test_it_waits_for_saves_until_no_more_come() -> None:
    cache, waits = Cache(0), list[float]()
    assert warm(Engine(), cache, prompt(), wait=waits.append) == [Outcome(line=1, tokens=3)]
    assert (len(cache.asked), tuple(waits)) == (1 + 1 + len(WAITS_S), WAITS_S)
    cache = Cache(*range(10_000))
    [outcome] = warm(Engine(), cache, prompt())
    assert (outcome.after, len(cache.asked)) == (MAX_LOOKS, 1 + MAX_LOOKS)


@pytest.mark.parametrize(("tokens", "most"), [(9, 8), (8, 4), (4, 0), (13, 12)])
def test_who_has_all_that_can_be_hit_is_not_asked_again(tokens: int, most: int) -> None:
    """A prompt's last token is computed, and of a block that is not whole nothing is there."""
    waits: list[float] = []
    cache = Cache(most, block=4)
    [outcome] = warm(Engine(), cache, prompt(prompt=[1] * tokens), wait=waits.append)
    assert (outcome.before, outcome.after, len(cache.asked), waits) == (most, most, 1, [])
    if most:
        cache = Cache(most - 4, most - 4, most, block=4)
        [outcome] = warm(Engine(), cache, prompt(prompt=[1] * tokens), wait=waits.append)
        assert (outcome.before, outcome.after, len(cache.asked), waits) == (most - 4, most, 3, [WAITS_S[0]])


def test_words_become_tokens_as_the_engine_makes_them() -> None:
    engine, cache = Engine(), Cache(0)
    warm(engine, cache, prompt(messages=[{"role": "user"}], tools=["t"], temperature=0, cache_salt="s"))
    assert engine.asked[0] == ("/tokenize", {"messages": [{"role": "user"}], "tools": ["t"], "model": "m"})
    assert cache.asked[0] == {"tokens": [7, 8, 9], "salt": "s"}


def test_the_cache_is_asked_about_the_engines_identity() -> None:
    cache = Cache([0, 3, None])
    [outcome] = warm(Engine(), cache, prompt(), question=CacheQuestion(model="made-up/model", seed="7"))
    assert cache.asked[0] == {"tokens": [1, 2, 3], "model": "made-up/model", "seed": "7"}
    assert outcome.before == 3


def test_of_an_adapter_nobody_is_asked() -> None:
    engine, cache = Engine(), Cache(9)
    [outcome] = warm(engine, cache, prompt(model="adapter"))
    assert (outcome.tokens, outcome.after, cache.asked) == (3, 0, [])
    assert engine.asked[0][1]["model"] == "adapter"


@pytest.mark.parametrize(
    ("engine", "cache", "fault"),
    [
        (Engine(AnswerError("it is away")), None, "it is away"),
        (Engine({"usage": {}}), None, "another form"),
        (Engine([1]), None, "another form"),
    ],
)
def test_a_fault_is_of_one_prompt(engine: Any, cache: Any, fault: str) -> None:
    outcomes = warm(engine, cache, prompt(1), BadLine(line=2, why="is no JSON"), prompt(3))
    assert [outcome.line for outcome in outcomes] == [1, 2, 3]
    assert outcomes[1].fault == "is no JSON"
    assert all(fault in outcome.fault for outcome in (outcomes[0], outcomes[2]))


@pytest.mark.parametrize(
    ("engine", "cache", "why"),
    [
        (Engine(), Cache([None]), "the cache cannot say how much is there: another seed"),
        (Engine(), Cache(AnswerError("it refuses")), "it refuses"),
        (Engine(), Cache(1, AnswerError("it has gone")), "it has gone"),
        (Engine(), Cache("many"), "another form"),
        (Engine(tokens=AnswerError("no such path")), Cache(3), "no such path"),
        (Engine(tokens=[1]), Cache(3), "another form"),
    ],
)
def test_a_prompt_that_cannot_be_counted_is_computed(engine: Any, cache: Any, why: str) -> None:
    [outcome] = warm(engine, cache, prompt(prompt="abc"))
    assert (outcome.tokens, outcome.before, outcome.after, outcome.fault) == (3, 0, 0, "")
    assert why in outcome.uncounted
    assert engine.asked[-1][0] == "/v1/completions"


def test_a_bug_of_ours_is_no_prompts_fault() -> None:
    with pytest.raises(AssertionError, match="ours"):
        warm(Engine(AssertionError("ours")), None, prompt())


def test_no_more_are_at_the_engine_than_said_and_no_more_are_read_than_worked_on() -> None:
    both = threading.Barrier(2, timeout=30)
    now, most, read = [], [], []

    def answer() -> Any:
        now.append(1)
        most.append(len(now))
        # Alone it would wait for ever.
        both.wait()
        now.pop()
        return {"usage": {"prompt_tokens": 3}}

    def prompts() -> Iterator[WarmPrompt]:
        for line in range(20):
            read.append(line)
            yield prompt(line)

    told = 0
    for _ in Warmer(Engine(answer), Cache(0), at_once=2, model="m", wait=lambda seconds: None).run(prompts()):  # type: ignore[arg-type]
        told += 1
        assert len(read) <= told + 2 * THREADS_PER_REQUEST
    assert (told, max(most)) == (20, 2)
