"""Answers with logprobs: which are read, and how far two are apart."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.audit.answers import MAX_TOP, Answer, Step, find_difference, find_nearest, measure, read_completion
from kvoffload.warm.json_client import AnswerError
from tests.kit.audit.caching_engine import change, make_answer

TOLD = {
    "choices": [{"logprobs": make_answer("a prompt", 4, is_cold=False)}],
    "usage": {"prompt_tokens_details": {"cached_tokens": 48}},
}
LOGPROBS: list[Any] = ["choices", 0, "logprobs"]


def make(*steps: tuple[str, dict[str, float]]) -> Answer:
    return Answer(tuple(Step(token, top[token], top) for token, top in steps), cached=None)


def test_an_answer_has_the_numbers_that_were_told() -> None:
    answer = read_completion(TOLD, max_tokens=4)
    told = TOLD["choices"][0]["logprobs"]  # type: ignore[index]
    assert [step.token for step in answer.steps] == told["tokens"]
    assert [step.logprob for step in answer.steps] == told["token_logprobs"]
    assert [step.top for step in answer.steps] == told["top_logprobs"]
    assert answer.cached == 48
    without: list[Any] = [{}, None, {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}]
    for nothing in without:
        assert read_completion(change(TOLD, ["usage"], nothing), max_tokens=4).cached is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["choices"], []),
        (["choices"], None),
        (["choices", 0], 5),
        (LOGPROBS, None),
        (LOGPROBS, {}),
        ([*LOGPROBS, "tokens"], "abcd"),
        ([*LOGPROBS, "tokens"], []),
        ([*LOGPROBS, "tokens", 0], 7),
        ([*LOGPROBS, "token_logprobs"], [0.0]),
        ([*LOGPROBS, "token_logprobs", 1], None),
        ([*LOGPROBS, "token_logprobs", 1], "-1"),
        ([*LOGPROBS, "token_logprobs", 1], True),
        ([*LOGPROBS, "token_logprobs", 1], float("nan")),
        ([*LOGPROBS, "token_logprobs", 1], float("-inf")),
        ([*LOGPROBS, "token_logprobs", 1], -(10**400)),
        ([*LOGPROBS, "top_logprobs", 1], None),
        ([*LOGPROBS, "top_logprobs", 1], {str(at): 0.0 for at in range(MAX_TOP + 1)}),
        ([*LOGPROBS, "top_logprobs", 1, "token_id:1"], []),
        (["usage", "prompt_tokens_details", "cached_tokens"], -1),
        (["usage", "prompt_tokens_details", "cached_tokens"], True),
        (["usage", "prompt_tokens_details", "cached_tokens"], 1 << 40),
    ],
)
def test_what_no_engine_means_is_refused(path: list[Any], value: Any) -> None:
    with pytest.raises(AnswerError):
        read_completion(change(TOLD, path, value), max_tokens=4)


def test_more_tokens_than_were_asked_for_are_refused() -> None:
    with pytest.raises(AnswerError, match="allowed are 1 to 3"):
        read_completion(TOLD, max_tokens=3)
    others: list[Any] = [None, [], "text", 5]
    for given in others:
        with pytest.raises(AnswerError):
            read_completion(given, max_tokens=4)


def test_a_distance_ends_where_tokens_part() -> None:
    one = make(("a", {"a": -1.0, "b": -2.0}), ("c", {"c": -1.0, "d": -1.1}), ("e", {"e": -1.0}))
    other = make(("a", {"a": -1.25, "b": -2.0}), ("d", {"c": -1.1, "d": -1.0}), ("e", {"e": -9.0}))
    distance = measure(one, other)
    assert (distance.largest, distance.largest_at, distance.position) == (0.25, 0, 1)
    assert not distance.is_unknown
    assert measure(one, one) == measure(other, other)
    assert measure(one, one).position is None
    assert find_difference(one, other) == 0


def test_a_token_that_is_not_told_is_at_most_as_likely_as_the_least_that_is() -> None:
    one, other = make(("a", {"a": -1.0, "b": -2.0})), make(("z", {"z": -0.5, "a": -1.0}))
    for distance in (measure(one, other), measure(other, one)):
        assert (distance.largest, distance.position, distance.is_unknown) == (1.5, 0, False)
    # The least of them is more likely than `c`.
    assert measure(make(("a", {"a": -1.0, "b": -2.0})), make(("a", {"a": -1.0, "c": -2.0}))).largest == 0


def test_without_the_likeliest_tokens_other_tokens_cannot_be_compared() -> None:
    one, other = Answer((Step("a", -1.0, {}),), None), Answer((Step("b", -1.0, {}),), None)
    assert (measure(one, other).position, measure(one, other).is_unknown) == (0, True)
    assert (measure(one, make()).position, measure(one, make()).is_unknown) == (0, True)
    assert find_difference(one, make()) == 0


def test_the_nearest_answer_is_the_one_that_is_followed_longest() -> None:
    answer = make(("a", {"a": -1.0}), ("b", {"b": -1.0}))
    early, late = make(("x", {"x": -1.0, "a": -1.0})), make(("a", {"a": -1.5}), ("b", {"b": -1.0}))
    assert find_nearest(answer, [early, late])[0] is late
    assert find_nearest(answer, [late, answer])[0] is answer
