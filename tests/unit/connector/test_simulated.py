"""Random traffic through both sides of the connector over vLLM's own block manager, with real bytes.

Whatever the order of events: every block that a request reads holds what its tokens say, every request ends, and
nothing is left pinned, leased or reserved.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.cache import CacheSettings
from kvoffload.connector.common.step_plan import StepPlan
from kvoffload.connector.loads import restores
from kvoffload.connector.loads.admission import LoadAdmission
from kvoffload.connector.saves.look_out import LookOut
from tests.kit.campaign import is_campaign
from tests.kit.connector.engine_configs import chunked, full, recurrent, window
from tests.kit.connector.local_client import MEMORY
from tests.kit.connector.scripted import Group
from tests.kit.connector.simulated import NothingMovesError, SimulatedEngine

TINY = replace(MEMORY, memory_bytes=12 << 10, segment_bytes=12 << 10, extent_bytes=2 << 10)
ALWAYS = {"verify": "always"}
MODELS: dict[str, tuple[Group, ...]] = {
    "dense": ((["a", "b"], full(4)),),
    "window": ((["a"], full(4)), (["c"], window(4, tokens=6))),
    "chunk": ((["a"], full(4)), (["c"], chunked(4, tokens=16))),
    "recurrent": ((["r"], recurrent(4)), (["a"], full(4))),
    "blocks of two sizes": ((["a", "b"], full(8)), (["c"], window(4, tokens=6, head_size=16))),
}


def make_prompt(random: Random) -> list[int]:
    """One of few beginnings, then something of its own."""
    kind = random.randrange(3)
    shared = [token * (kind + 1) for token in range(random.choice([16, 32, 40]))]
    return [*shared, *(random.randrange(1000) for _ in range(random.randint(1, 20)))]


def empty(engine: SimulatedEngine) -> None:
    """Everybody ends, and the engine's own cache is reset, as it should be before the connector is."""
    holds_answers, engine.cache.holds_answers = engine.cache.holds_answers, False
    engine.cache.answer()
    engine.drain()
    engine.forget()
    engine.cache.holds_answers = holds_answers


def play(
    engine: SimulatedEngine,
    random: Random,
    *,
    turns: int = 60,
    damage: float = 0.0,
    reset: float = 0.0,
    answers: float = 0.0,
) -> None:
    """Plays turns of the engine. `damage`, `reset` and `answers` are the shares of turns in which these happen."""
    for _ in range(turns):
        if random.random() < answers:
            engine.cache.answer(is_lost=random.random() < 0.2)
        if random.random() < 0.5 and len(engine.requests) < 9:
            engine.come(make_prompt(random), decode=random.randrange(12))
        if random.random() < 0.06:
            engine.abort()
        if random.random() < damage:
            engine.damage_record()
        if random.random() < reset:
            engine.connector.reset_cache()
        if engine.side.serving.is_mixed and random.random() < 0.6:
            empty(engine)
            engine.connector.reset_cache()
        if random.random() < 0.3:
            engine.lose_cache()
        engine.turn()
    engine.cache.holds_answers = False
    engine.cache.answer()
    engine.drain()
    engine.assert_at_rest()


def make_any(model: str, random: Random, **options: Any) -> SimulatedEngine:
    """Of any size, with any retention of the engine's own, which must have windows or states."""
    return SimulatedEngine(
        *MODELS[model],
        num_blocks=random.choice([40, 48, 96]),
        random=random,
        retention_interval=random.choice([None, 0, 16])
        if model in ("window", "recurrent", "blocks of two sizes")
        else None,
        **options,
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("model", MODELS)
def test_every_block_that_is_read_is_right_and_every_request_ends(model: str, seed: int) -> None:
    random = Random(seed)
    engine = make_any(model, random)
    play(engine, random)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_a_cache_that_must_evict_never_gives_wrong_bytes(model: str, seed: int) -> None:
    random = Random(seed)
    engine = SimulatedEngine(*MODELS[model], num_blocks=48, random=random, memory=TINY)
    play(engine, random, turns=90, reset=0.05)
    assert engine.cache.stats().evicted > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_a_cache_whose_answers_are_late_never_gives_wrong_bytes(model: str, seed: int) -> None:
    random = Random(seed)
    engine = SimulatedEngine(*MODELS[model], num_blocks=48, random=random)
    engine.cache.holds_answers = True
    play(engine, random, turns=90, answers=0.3, reset=0.05)
    assert engine.cache.asked


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_damaged_records_are_found_by_the_cache_and_recomputed(model: str, seed: int) -> None:
    random = Random(seed)
    engine = SimulatedEngine(
        *MODELS[model], num_blocks=48, random=random, memory=replace(MEMORY, verify="always"), extra=ALWAYS
    )
    play(engine, random, damage=0.5)
    assert engine.cache.stats().mismatches > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_damaged_records_are_found_by_the_worker_and_recomputed(model: str, seed: int) -> None:
    """A cache that does not look, and bits that flip after it has."""
    random = Random(seed)
    engine = SimulatedEngine(*MODELS[model], num_blocks=48, random=random, extra=ALWAYS)
    play(engine, random, damage=0.5)
    assert engine.cache.stats().mismatches == 0


@pytest.mark.parametrize("memory", [MEMORY, TINY], ids=["with room", "full"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_ranks_on_two_machines_never_give_wrong_bytes(model: str, seed: int, memory: CacheSettings) -> None:
    """The second machine's server answers late, not at all for a while, or has lost what it had."""
    random = Random(seed)
    engine = SimulatedEngine(
        *MODELS[model], num_blocks=48, random=random, memory=memory, ranks=2, nodes=2, extra=ALWAYS
    )
    other = engine.caches[1]
    for _ in range(4):
        other.holds_answers = random.random() < 0.5
        play(engine, random, turns=20, damage=0.05, reset=0.02)
        other.holds_answers = False
        other.answer()
        engine.drain()
        engine.assert_at_rest()
        other.is_served = not other.is_served


def test_ranks_on_two_machines_restore_much_and_nothing_while_one_is_not_served() -> None:
    restored = {True: 0, False: 0}
    for groups in MODELS.values():
        for seed in range(3):
            random = Random(seed)
            engine = SimulatedEngine(*groups, num_blocks=48, random=random, ranks=2, nodes=2)
            for is_served in (True, False, True):
                before = engine.restored_tokens
                engine.caches[1].is_served = is_served
                engine.drain()
                engine.turn()
                play(engine, random, turns=30)
                restored[is_served] += engine.restored_tokens - before
    assert restored[True] > 500
    assert restored[False] == 0


def crowd(model: str, seed: int) -> None:
    """Everybody is loaded into a cache that holds two or three of them, by an engine that reserves nothing."""
    random = Random(seed)
    engine = SimulatedEngine(*MODELS[model], num_blocks=32, random=random)
    engine.reserves_whole_prompts = False
    engine.parts.pins.limit = 12
    for _ in range(40):
        if len(engine.requests) < 9:
            engine.come(make_prompt(random), decode=random.randrange(12))
        engine.lose_cache()
        engine.turn()
    engine.drain()
    engine.assert_at_rest()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("model", ["window", "recurrent"])
def test_loaded_requests_never_wait_for_each_others_blocks(model: str, seed: int) -> None:
    crowd(model, seed)


@pytest.mark.parametrize("model", ["window", "recurrent"])
def test_without_the_guard_they_do(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadAdmission, "admits", lambda self, **given: True)
    monkeypatch.setattr(restores, "PARKED_SHARE", 1)
    with pytest.raises(NothingMovesError):
        [crowd(model, seed) for seed in range(5)]


def test_the_traffic_is_of_the_kind_that_it_claims_to_be() -> None:
    """Loads, failing loads, records that the cache finds damaged, and preemptions do happen in it."""
    restored, late, failed, mismatches, preemptions = 0, 0, 0, 0, 0
    for seed in range(4):
        for memory in (MEMORY, replace(MEMORY, verify="always")):
            random = Random(seed)
            engine = SimulatedEngine(*MODELS["window"], num_blocks=48, random=random, memory=memory, extra=ALWAYS)
            play(engine, random, damage=0.5)
            restored += engine.restored_tokens
            failed += engine.failed_loads
            mismatches += engine.cache.stats().mismatches
            preemptions += engine.preemptions
        random = Random(seed)
        engine = SimulatedEngine(*MODELS["window"], num_blocks=48, random=random)
        engine.cache.holds_answers = True
        play(engine, random, answers=0.3)
        late += engine.restored_tokens
    assert restored > 100
    assert late > 0
    assert failed > 0
    assert mismatches > 0
    assert preemptions > 0


class NotedEngine(SimulatedEngine):
    """Notes what it is told to do, and how many steps were rests."""

    def __init__(self, *groups: Group, **options: Any) -> None:
        self.plans: list[Any] = []
        self.rests = 0
        super().__init__(*groups, **options)

    def step(self) -> StepPlan:
        plan = super().step()
        self.rests += self.side.rested > 0
        loads = [(load.request_id, load.moves.blocks.tolist()) for load in plan.loads]
        self.plans.append((loads, [save.moves.blocks.tolist() for save in plan.saves], plan.doomed))
        return plan


@pytest.mark.parametrize("model", MODELS)
def test_a_scheduler_that_rests_plans_what_one_plans_that_does_not(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []
    for seed in range(6 if is_campaign() else 3):
        for rests in (True, False):
            with monkeypatch.context() as patched:
                if not rests:
                    patched.setattr(LookOut, "rest_steps", 0)
                random = Random(seed)
                engine = NotedEngine(*MODELS[model], num_blocks=96, random=random, round_steps=8, gathered_tokens=8)
                play(engine, random, reset=0.03)
                for _ in range(4):
                    engine.come(make_prompt(random), decode=60)
                    play(engine, random, turns=0)
                played.append(engine)
        assert played[-1].plans == played[-2].plans
    assert any(saves for engine in played for _, saves, _ in engine.plans)
    rests = [engine.rests for engine in played]
    assert not any(rests[1::2])
    # A model with states is asked in every step: they are handed off when they are.
    assert all(rests[::2]) == (model != "recurrent")


@pytest.mark.parametrize("looked_at", [2, 8, 256])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", MODELS)
def test_what_is_saved_when_the_engine_loses_it_is_right(model: str, seed: int, looked_at: int) -> None:
    random = Random(seed)
    engine = make_any(model, random, extra={"save_policy": "on_evict"})
    engine.parts.policy.look_ahead = looked_at
    play(engine, random, reset=0.02)


@pytest.mark.parametrize("memory", [MEMORY, TINY], ids=["with room", "full"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", MODELS)
def test_what_is_saved_as_the_pools_room_asks_for_is_right(model: str, seed: int, memory: CacheSettings) -> None:
    random = Random(seed)
    engine = make_any(model, random, memory=memory, extra={"save_policy": "auto"})
    play(engine, random, reset=0.02)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", MODELS)
def test_what_is_saved_at_its_second_use_is_right(model: str, seed: int) -> None:
    random = Random(seed)
    engine = make_any(model, random, extra={"save_policy": "second_use"})
    play(engine, random, reset=0.02)


@pytest.mark.parametrize("policy", ["on_evict", "second_use"])
def test_every_policy_saves_what_is_restored_later(policy: str) -> None:
    restored = 0
    for seed in range(4):
        random = Random(seed)
        engine = SimulatedEngine(*MODELS["window"], num_blocks=48, random=random, extra={"save_policy": policy})
        play(engine, random)
        restored += engine.restored_tokens
    assert restored > 100
