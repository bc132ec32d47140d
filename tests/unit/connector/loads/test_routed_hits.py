"""The tokens that a router expected of a request are compared with those that it had before its first step."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.kit.connector.measured import measured_engine, take
from tests.kit.connector.scripted import ScriptedEngine

NAMES = ("expected_tokens", "hit_tokens")


def routed(engine: ScriptedEngine) -> dict[str, Any]:
    """Tokens as numbers, and requests by their outcome."""
    taken = take(engine)
    found: dict[str, Any] = {name: taken.get(f"kvoffload_routed_{name}_total", {}).get("", 0) for name in NAMES}
    return found | {"requests": taken.get("kvoffload_routed_requests_total", {})}


def test_what_was_promised_and_came_is_counted_once() -> None:
    engine = measured_engine()
    engine.serve("second", range(30), expected_hit_tokens=28)
    found = routed(engine)
    assert (found["expected_tokens"], found["hit_tokens"]) == (28, 28)
    [(labels, count)] = found["requests"].items()
    assert ("as_expected" in labels, count) == (True, 1)
    assert routed(engine)["expected_tokens"] == 0


def test_what_the_engine_has_itself_counts_too() -> None:
    engine = measured_engine()
    engine.serve("second", range(30), expected_hit_tokens=28)
    take(engine)
    engine.serve("third", range(30), expected_hit_tokens=28)
    assert routed(engine)["hit_tokens"] == 28


@pytest.mark.parametrize(
    ("tokens", "promised", "hit"), [([*range(16), *range(100, 120)], 28, 16), (range(500, 530), 28, 0)]
)
def test_less_than_was_promised_is_a_request_that_got_less(tokens: Any, promised: int, hit: int) -> None:
    engine = measured_engine()
    engine.serve("second", tokens, expected_hit_tokens=promised)
    found = routed(engine)
    assert (found["expected_tokens"], found["hit_tokens"]) == (promised, hit)
    [(labels, count)] = found["requests"].items()
    assert ("less" in labels, count) == (True, 1)


def test_more_than_was_promised_is_not_more_and_no_more_is_promised_than_a_prompt_has() -> None:
    engine = measured_engine()
    engine.serve("second", range(30), expected_hit_tokens=8)
    assert routed(engine)["hit_tokens"] == 8
    engine.serve("third", range(600, 630), expected_hit_tokens=10**9)
    assert routed(engine)["expected_tokens"] == 30


def test_requests_without_a_promise_and_those_that_never_ran_are_not_counted() -> None:
    engine = measured_engine()
    engine.serve("second", range(30))
    request = engine.arrive("third", range(700, 730), expected_hit_tokens=5)
    engine.finish(request)
    assert routed(engine) == {"expected_tokens": 0, "hit_tokens": 0, "requests": {}}
