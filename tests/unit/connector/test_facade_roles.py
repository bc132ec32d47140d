"""vLLM's `kv_role`: who saves, who restores, and what a producer tells of what it has saved."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.kit.connector.saving import DENSE, HYBRID, TWO_SIZES, names_of
from tests.kit.connector.scripted import Admission, ScriptedEngine

PROMPT = range(30)
ROLES = ("kv_producer", "kv_consumer", "kv_both")


def served(role: str, groups: Any = DENSE, **options: Any) -> ScriptedEngine:
    """It has computed a prompt, and its own cache has forgotten it."""
    engine = ScriptedEngine(*groups, role=role, **options)
    engine.serve("first", PROMPT)
    engine.forget()
    return engine


@pytest.mark.parametrize(("role", "saved"), [("kv_producer", 7), ("kv_consumer", 0), ("kv_both", 7)])
def test_a_consumer_saves_nothing(role: str, saved: int) -> None:
    engine = served(role)
    assert len(names_of(engine)) == saved
    engine.assert_at_rest()


@pytest.mark.parametrize("role", ROLES)
def test_every_role_restores(role: str) -> None:
    engine = served("kv_both")
    other = ScriptedEngine(*DENSE, role=role)
    # The same server: its workers have joined the memory that the first engine's have.
    other.cache.sessions, other.cache.current = engine.cache.sessions, engine.cache.current
    other.parts.places.note({0: other.places})
    assert other.admit(other.arrive("second", PROMPT)) == Admission(0, 28)


@pytest.mark.parametrize(
    ("role", "told"), [("kv_producer", {"expect_tokens": 28}), ("kv_consumer", None), ("kv_both", None)]
)
def test_a_producer_tells_what_to_expect(role: str, told: dict[str, int] | None) -> None:
    assert served(role).told == {"first": told}


def test_of_a_model_with_states_a_producer_tells_the_last_of_them() -> None:
    """Also where it had that one itself, and hands off nothing."""
    engine = ScriptedEngine(*HYBRID, role="kv_producer")
    engine.serve("first", range(31))
    engine.serve("second", range(31))
    assert engine.told == {"first": {"expect_tokens": 28}, "second": {"expect_tokens": 28}}
    engine.forget()
    assert engine.match(engine.arrive("third", range(31), expect_tokens=28)) == 28


def test_a_prompt_shorter_than_a_block_is_nothing_to_expect() -> None:
    engine = ScriptedEngine(*DENSE, role="kv_producer")
    engine.serve("first", range(3))
    assert engine.told == {"first": None}


@pytest.mark.parametrize(
    ("wishes", "told"), [({"max_save_tokens": 17}, 16), ({"max_save_tokens": 100}, 28), ({"prompt_only": True}, 28)]
)
@pytest.mark.parametrize("groups", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_no_more_is_to_be_expected_than_the_request_lets_be_saved(
    groups: Any, wishes: dict[str, Any], told: int
) -> None:
    engine = ScriptedEngine(*groups, role="kv_producer")
    request = engine.arrive("first", PROMPT, **wishes)
    engine.admit(request)
    engine.report(engine.step())
    engine.finish(request)
    expected = (engine.told["first"] or {}).get("expect_tokens", 0)
    assert expected == (0 if groups is HYBRID and told < 28 else told)
    engine.forget()
    assert engine.match(engine.arrive("second", PROMPT, expect_tokens=expected)) == expected


def test_what_is_not_saved_is_not_to_be_expected() -> None:
    engine = ScriptedEngine(*DENSE, role="kv_producer")
    request = engine.arrive("first", PROMPT, skip_save=True)
    engine.admit(request)
    engine.step()
    engine.finish(request)
    waiting = engine.arrive("second", PROMPT)
    engine.finish(waiting)
    engine.side.clear()
    tainted = engine.arrive("third", PROMPT)
    engine.admit(tainted)
    engine.step()
    engine.side.clear()
    engine.finish(tainted)
    assert engine.told == {"first": None, "second": None, "third": None}


@pytest.mark.parametrize("policy", ["auto", "eager", "on_evict", "second_use"])
def test_a_producer_saves_at_once_whatever_the_policy(policy: str) -> None:
    """Also into a pool that is full, where `auto` would wait for a second use."""
    engine = ScriptedEngine(*DENSE, role="kv_producer", extra={"save_policy": policy})
    engine.cache.is_full = True
    engine.admit(engine.arrive("first", PROMPT))
    (save,) = engine.step().saves
    assert len(save.moves) == 7


def test_a_producer_saves_later_what_it_could_not_pin_at_once() -> None:
    engine = ScriptedEngine(*DENSE, role="kv_producer", num_blocks=8)
    request = engine.arrive("first", range(24))
    engine.admit(request)
    plan = engine.step()
    engine.finish(request)
    assert engine.told == {"first": {"expect_tokens": 24}}
    while engine.connector.has_pending_push_work():
        engine.report(plan)
        plan = engine.step()
    assert len(names_of(engine)) == 6
    engine.assert_at_rest()


def test_a_producer_tells_of_no_more_than_it_could_pin() -> None:
    """Blocks that must be kept for a while have to be pinned at once."""
    engine = ScriptedEngine(*DENSE, role="kv_producer", num_blocks=8)
    request = engine.arrive("first", range(24), pin_s=5)
    engine.admit(request)
    engine.step()
    engine.finish(request)
    assert engine.parts.pins.limit == 2
    assert engine.told == {"first": {"expect_tokens": 8}}


def test_a_consumer_can_load_all_that_a_producer_tells() -> None:
    """Where windows are saved, and where a hit of the same prompt ends, has to fit."""
    for groups in (DENSE, TWO_SIZES):
        for length in (8, 9, 16, 17, 29, 30, 31, 32, 33):
            engine = ScriptedEngine(*groups, role="kv_producer", retention_interval=0)
            engine.serve("first", range(length))
            told = engine.told["first"]
            engine.forget()
            hit = engine.parts.groups.longest_hit(length)
            request = engine.arrive("second", range(length), **(told or {}))
            assert engine.match(request) == hit, (length, told)


def test_a_consumer_pins_what_it_is_asked_to_keep() -> None:
    engine = ScriptedEngine(*DENSE, role="kv_consumer")
    request = engine.arrive("first", PROMPT, pin_s=5)
    engine.admit(request)
    engine.step()
    engine.finish(request)
    assert engine.connector.faults == {}
