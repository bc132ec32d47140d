"""When a block that is worth saving is saved: what `auto` means, and the second use."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.save_policy import SavePolicy, choose_policy
from tests.unit.connector.scripted import Admission, ScriptedEngine
from tests.unit.connector.test_saves import DENSE, TWO_SIZES, make_engine, saved_blocks
from tests.unit.connector.test_saves_ended import hashes_of, names_of, save_prompt

WISHES: tuple[SavePolicy, ...] = ("eager", "on_evict", "second_use")


@pytest.mark.parametrize(
    ("pool_bytes", "engine_bytes", "expected"),
    [(99, 100, "on_evict"), (100, 100, "eager"), (101, 100, "eager"), (0, 100, "eager"), (1, 100, "on_evict")],
)
def test_a_pool_that_is_smaller_than_the_engines_own_cache_takes_what_that_loses(
    pool_bytes: int, engine_bytes: int, expected: str
) -> None:
    chosen = choose_policy("auto", pool_bytes=pool_bytes, engine_bytes=engine_bytes, has_prefix_cache=True)
    assert chosen == expected


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("pool_bytes", [0, 1, 1000])
def test_a_wish_is_granted_whatever_the_pool(wish: SavePolicy, pool_bytes: int) -> None:
    assert choose_policy(wish, pool_bytes=pool_bytes, engine_bytes=100, has_prefix_cache=True) == wish


@pytest.mark.parametrize(
    ("wish", "expected"),
    [("auto", "eager"), ("eager", "eager"), ("on_evict", "eager"), ("second_use", "second_use")],
)
def test_an_engine_that_caches_nothing_itself_has_nothing_to_lose(wish: SavePolicy, expected: str) -> None:
    assert choose_policy(wish, pool_bytes=1, engine_bytes=100, has_prefix_cache=False) == expected


# ---- second_use ----


def second_use(groups: object = DENSE, **changes: Any) -> ScriptedEngine:
    return make_engine(groups, extra={"save_policy": "second_use"}, **changes)


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["a hit of the engine's own", "computed again"])
@pytest.mark.parametrize("groups", [DENSE, TWO_SIZES])
def test_what_is_seen_once_is_not_saved_and_what_is_seen_twice_is(groups: object, is_forgotten: bool) -> None:
    engine = second_use(groups)
    assert [plan.saves for plan in engine.serve("first", range(30))] == [()]
    if is_forgotten:
        engine.forget()
    request = engine.arrive("second", range(30))
    admission = engine.admit(request)
    assert admission is not None
    assert bool(admission.local) is not is_forgotten
    assert admission.external == 0
    plan = engine.step()
    wanted = [block for block in engine.manager.get_block_ids("second")[0][: 30 // engine.block_size] if block]
    assert saved_blocks(plan) == wanted
    engine.report(plan)
    engine.finish(request)
    engine.forget()
    assert engine.admit(engine.arrive("third", range(30))) == Admission(0, 28 // engine.block_size * engine.block_size)


def test_of_a_prompt_with_a_known_beginning_the_beginning_is_saved() -> None:
    engine = second_use()
    engine.serve("first", range(30))
    plan = save_prompt(engine, "second", [*range(16), *range(100, 130)])  # type: ignore[arg-type]
    engine.report(plan)
    assert names_of(engine) == hashes_of(engine, "second")[:4]


def test_what_is_there_is_not_saved_a_third_time() -> None:
    engine = second_use()
    engine.serve("first", range(30))
    engine.serve("second", range(30))
    assert len(names_of(engine)) == 7
    assert [plan.saves for plan in engine.serve("third", range(30))] == [()]


def test_blocks_that_one_request_is_asked_about_again_and_again_are_seen_once() -> None:
    engine = second_use()
    request = engine.arrive("first", range(14))
    assert [engine.match(request) for _ in range(3)] == [0, 0, 0]
    engine.admit(request)
    plans = [engine.step()]
    for _ in range(20):
        engine.decode(request)
        engine.run(request, 1)
        plans.append(engine.step())
    engine.finish(request)
    assert [plan.saves for plan in [*plans, engine.step()]] == [()] * 22
    engine.assert_at_rest()
