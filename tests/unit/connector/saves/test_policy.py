"""When a block that is worth saving is saved: what `auto` means, and the second use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.saves.named_blocks import NamedBlocks
from kvoffload.connector.saves.policy import Eager, PolicyName, SeenBlocks, choose_policy
from kvoffload.connector.saves.worth import Candidates
from tests.kit.connector.saving import DENSE, TWO_SIZES, hashes_of, make_engine, names_of, save_prompt, saved_blocks
from tests.kit.connector.scripted import Admission, ScriptedEngine

WISHES: tuple[PolicyName, ...] = ("auto", "eager", "on_evict", "second_use")


@pytest.mark.parametrize("wish", WISHES)
def test_a_wish_is_granted(wish: PolicyName) -> None:
    assert choose_policy(wish, has_prefix_cache=True) == wish


@pytest.mark.parametrize(
    ("wish", "expected"),
    [("auto", "eager"), ("eager", "eager"), ("on_evict", "eager"), ("second_use", "second_use")],
)
def test_an_engine_that_caches_nothing_itself_has_nothing_to_lose(wish: PolicyName, expected: str) -> None:
    assert choose_policy(wish, has_prefix_cache=False) == expected


# ---- any policy ----


class EverySecond(Eager):
    """Chooses every second of the blocks that are worth saving."""

    def choose(self, candidates: Sequence[Candidates]) -> Sequence[Candidates]:
        return [replace(one, blocks=np.where(np.arange(len(one.blocks)) % 2, one.blocks, 0)) for one in candidates]


class Finding(Eager):
    """Finds the same blocks in every step."""

    is_watching = True
    saves_at_once = False

    def __init__(self, found: list[NamedBlocks]) -> None:
        self._found = found

    def find(self, under_way: int) -> Sequence[NamedBlocks]:
        return self._found


def test_a_policy_may_refuse_blocks() -> None:
    engine = make_engine()
    engine.parts.saves.policy = EverySecond()
    plan = save_prompt(engine, "a", range(30))
    assert saved_blocks(plan) == engine.manager.get_block_ids("a")[0][1:7:2]
    engine.report(plan)
    assert names_of(engine) == hashes_of(engine, "a")[1::2]


def test_blocks_that_the_engine_evicts_may_be_saved_beside_the_others() -> None:
    engine = make_engine()
    engine.serve("a", range(30))
    blocks = np.array([1, 2], np.int64)
    engine.parts.saves.policy = Finding([NamedBlocks(0, b"x" * 32 + b"y" * 32, bytes(64), blocks)])
    plan = engine.step()
    assert saved_blocks(plan) == [1, 2]
    engine.report(plan)
    assert names_of(engine)[-2:] == [b"x" * 32, b"y" * 32]
    assert engine.step().saves == ()


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


def save_all(engine: ScriptedEngine, request_id: str, tokens: range) -> list[int]:
    """Its blocks that are saved while it runs, with few pins."""
    request = engine.arrive(request_id, tokens)
    engine.admit(request)
    saved = []
    for _ in range(6):
        plan = engine.step()
        saved += saved_blocks(plan)
        engine.report(plan)
        engine.decode(request)
        engine.run(request, 1)
    return saved


def test_what_a_request_had_no_room_for_is_not_used_again_by_itself() -> None:
    engine = second_use(num_blocks=32)
    engine.parts.pins.limit = 4
    engine.serve("first", range(24))
    assert save_all(engine, "second", range(60)) == engine.manager.get_block_ids("second")[0][:6]


def test_what_is_used_a_second_time_and_finds_no_room_is_saved_later() -> None:
    engine = second_use(num_blocks=64)
    engine.parts.pins.limit = 8
    engine.serve("first", range(60))
    assert save_all(engine, "second", range(60)) == engine.manager.get_block_ids("second")[0][:15]


def test_what_is_to_be_kept_for_a_while_is_saved_at_its_first_use() -> None:
    engine = second_use()
    assert len(saved_blocks(save_prompt(engine, "a", range(30), pin_s=10))) == 7


# ---- what was seen ----


USERS = map(str, count())


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_the_second_time_is_known() -> None:
    seen = SeenBlocks(100)
    assert not seen.see(0, name(1), "first")
    assert seen.see(0, name(1), "second")
    assert seen.see(0, name(1), "third")


def test_who_uses_a_block_again_is_not_a_second_user() -> None:
    seen = SeenBlocks(100)
    assert [seen.see(0, name(1), "first") for _ in range(3)] == [False] * 3
    assert [seen.see(0, name(1), "second") for _ in range(3)] == [True] * 3
    assert not seen.see(0, name(1), "first")


def test_the_first_user_is_known_for_as_long_as_the_block() -> None:
    seen = SeenBlocks(10)
    for number in range(100):
        seen.see(0, name(number), next(USERS))
        assert not seen.see(0, name(1000), "first")
    assert seen.see(0, name(1000), "second")


def test_a_hash_is_another_block_in_another_group() -> None:
    seen = SeenBlocks(100)
    assert [seen.see(group, name(1), next(USERS)) for group in (0, 1, 2)] == [False] * 3
    assert [seen.see(group, name(1), next(USERS)) for group in (0, 1, 2)] == [True] * 3


def test_all_of_a_hash_counts() -> None:
    seen = SeenBlocks(10_000)
    names = [bytes(place) + b"\1" + bytes(31 - place) for place in range(32)]
    assert not any(seen.see(0, one, next(USERS)) for one in names)


@pytest.mark.parametrize(("others", "is_known"), [(0, True), (4, True), (9, True), (10, False), (100, False)])
def test_after_enough_others_it_is_new_again(others: int, is_known: bool) -> None:
    seen = SeenBlocks(10)
    seen.see(0, name(0), next(USERS))
    for number in range(1, others + 1):
        seen.see(0, name(number), next(USERS))
    assert seen.see(0, name(0), next(USERS)) is is_known


def test_what_is_used_goes_on_being_remembered() -> None:
    seen = SeenBlocks(10)
    seen.see(0, name(0), next(USERS))
    for number in range(1, 200):
        seen.see(0, name(number), next(USERS))
        if number % 3 == 0:
            assert seen.see(0, name(0), next(USERS))


def test_forgetting_all_makes_everything_new() -> None:
    seen = SeenBlocks(10)
    for number in range(8):
        seen.see(0, name(number), next(USERS))
    seen.forget_all()
    assert len(seen) == 0
    assert not any(seen.see(0, name(number), next(USERS)) for number in range(5))


@given(st.integers(2, 30), st.lists(st.integers(0, 40), max_size=300))
def test_it_never_holds_more_and_never_knows_less_than_half(limit: int, numbers: list[int]) -> None:
    seen = SeenBlocks(limit)
    last: list[int] = []
    for number in numbers:
        was_seen = seen.see(0, name(number), next(USERS))
        assert len(seen) <= limit
        assert not was_seen or number in last
        assert was_seen or number not in last[-(limit // 2) :]
        last = [other for other in last if other != number] + [number]
