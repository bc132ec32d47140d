"""An engine's answer to a prompt, token by token with logprobs, and how far two answers are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvoffload.warm.json_client import AnswerError

MAX_TOP = 64
"""Likeliest tokens of a position that an answer may tell."""
MAX_CACHED = 1 << 31


@dataclass(frozen=True)
class Step:
    """One generated token, with its logprob and those of the likeliest tokens at its position."""

    token: str
    logprob: float
    top: Mapping[str, float]

    @property
    def logprobs(self) -> Mapping[str, float]:
        return {**self.top, self.token: self.logprob}


@dataclass(frozen=True)
class Answer:
    """The generated tokens. Two answers are equal if all of their tokens and logprobs are."""

    steps: tuple[Step, ...]
    cached: int | None = field(compare=False)
    """Tokens of the prompt that were not computed, or None if the server does not say."""


@dataclass(frozen=True)
class Distance:
    """How far two answers are apart. What comes after the first position with different tokens is not compared."""

    largest: float
    """Largest difference of a logprob. Where one answer does not tell a token's logprob, it is not more than the least
    that this answer tells of its likeliest tokens, and the difference is counted from there."""
    largest_at: int
    """Position of that difference."""
    position: int | None
    """First position with different tokens, or None if there is no such position."""
    is_unknown: bool
    """At `position` one answer has ended, or too few logprobs are told to compare the tokens."""


def measure(one: Answer, other: Answer) -> Distance:
    """Measures how far two answers are apart."""
    largest, largest_at = 0.0, 0
    for position, (mine, theirs) in enumerate(zip(one.steps, other.steps, strict=False)):
        here = max(_measure_step(mine, theirs), _measure_step(theirs, mine))
        if here > largest:
            largest, largest_at = here, position
        if mine.token != theirs.token:
            is_told = mine.token in theirs.logprobs and theirs.token in mine.logprobs
            return Distance(largest, largest_at, position, not (is_told or (mine.top and theirs.top)))
    if len(one.steps) != len(other.steps):
        return Distance(largest, largest_at, min(len(one.steps), len(other.steps)), is_unknown=True)
    return Distance(largest, largest_at, None, is_unknown=False)


def _measure_step(one: Step, other: Step) -> float:
    """Returns the largest difference of the tokens that one answer tells at a position."""
    told, least = other.logprobs, min(other.top.values(), default=math.inf)
    pairs = ((logprob, told.get(token)) for token, logprob in one.logprobs.items())
    return max(max(mine - least, 0.0) if theirs is None else abs(mine - theirs) for mine, theirs in pairs)


def find_difference(one: Answer, other: Answer) -> int:
    """Returns the first position at which anything differs. The answers must not be equal."""
    pairs = zip(one.steps, other.steps, strict=False)
    shorter = min(len(one.steps), len(other.steps))
    return next((position for position, (mine, theirs) in enumerate(pairs) if mine != theirs), shorter)


def read_completion(given: Any, *, max_tokens: int) -> Answer:
    """Reads the answer of /v1/completions. AnswerError: it has another form, which includes numbers that no engine
    means."""
    try:
        (choice,) = given["choices"]
        told = choice["logprobs"]
        if told is None:
            raise AnswerError("the answer has no logprobs")
        tokens, logprobs, tops = told["tokens"], told["token_logprobs"], told["top_logprobs"]
        if not all(isinstance(one, list) for one in (tokens, logprobs, tops)):
            raise AnswerError("the answer's logprobs are no lists")
        if not 0 < len(tokens) <= max_tokens or not len(tokens) == len(logprobs) == len(tops):
            raise AnswerError(
                f"the answer has {len(tokens)} tokens, {len(logprobs)} logprobs and {len(tops)} rows of the likeliest"
                f" tokens; allowed are 1 to {max_tokens}, of each the same number"
            )
        steps = tuple(map(_read_step, tokens, logprobs, tops))
        return Answer(steps, _read_cached(given.get("usage")))
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as fault:
        raise AnswerError(f"an answer of another form: {fault!r}"[:200]) from None


def _read_step(token: Any, logprob: Any, top: Any) -> Step:
    if not isinstance(token, str):
        raise TypeError("a token that is no text")
    if not isinstance(top, dict) or len(top) > MAX_TOP:
        raise TypeError("likeliest tokens that are no object, or too many")
    return Step(token, _read_logprob(logprob), {name: _read_logprob(value) for name, value in top.items()})


def _read_logprob(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError("a logprob that is no number")
    value = float(given)
    if not math.isfinite(value):
        raise ValueError("a logprob that is not finite")
    return value


def _read_cached(usage: Any) -> int | None:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    given = details.get("cached_tokens") if isinstance(details, dict) else None
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < MAX_CACHED:
        raise ValueError("cached_tokens that is no number of tokens")
    return given


def find_nearest(answer: Answer, others: Sequence[Answer]) -> tuple[Answer, Distance]:
    """Finds the answer that this one is nearest to, with the distance: the one that it follows longest, and among
    those the one with the least difference of logprobs. There must be one."""

    def rank(found: tuple[Answer, Distance]) -> tuple[bool, float, float]:
        distance = found[1]
        follows = math.inf if distance.position is None else distance.position
        return distance.is_unknown, -follows, distance.largest

    return min(((other, measure(answer, other)) for other in others), key=rank)
