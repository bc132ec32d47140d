"""Loads and saves that fail, are aborted or meet a reset: at most one request is computed again, and nothing is
left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvoffload.transfer import CopyDirection
from tests.kit.transfer.stand_ins import FailingEngine
from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.tiny_models import SLIDING
from tests.vllm.workload import (
    Run,
    all_blocks,
    assert_nothing_is_held,
    connector_side,
    decided_tokens,
    free_blocks,
    held_copies,
    held_engine,
    serve,
    watch_blocks,
)

if TYPE_CHECKING:
    from vllm import RequestOutput

    from kvoffload.connector.common.step_plan import StepPlan

pytestmark = pytest.mark.vllm

PROMPT = make_prompt(1, 700)
RESTORABLE = 640  # whole blocks of 128 before the last token
LOADED_BLOCKS = 5 + 1 + 1  # all of the full group, the last one of each window group
OTHER_PROMPT = make_prompt(2, 700)

Damage = Callable[[Engine, pytest.MonkeyPatch], None]


def change_bytes_on_the_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the server has checked and leased them, before they are copied."""
    side = probe.worker_side()
    submit = side.submit

    def damaging_submit(plan: StepPlan) -> None:
        for job in plan.loads:
            for group, address in zip(job.moves.groups.tolist(), job.moves.addresses.tolist(), strict=True):
                probe.flip_bit(None, group, address, 1000)
        submit(plan)

    monkeypatch.setattr(side, "submit", damaging_submit)


def lose_the_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker may not copy from where the scheduler's lease is; what is saved afterwards is elsewhere."""
    from kvoffload.connector.common.step_plan import StepPlan

    side = probe.worker_side()
    submit = side.submit

    def submit_without_memory(plan: StepPlan) -> None:
        submit(replace(plan, loads=()))
        with monkeypatch.context() as patches:
            patches.setattr(side.cache, "may_copy", lambda held: False)
            submit(StepPlan(loads=plan.loads))

    monkeypatch.setattr(side, "submit", submit_without_memory)


def break_copies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a load is done when the device fails."""
    side = probe.worker_side()
    assert side.engine is not None
    monkeypatch.setattr(side, "engine", FailingEngine(side.engine, CopyDirection.LOAD))


def break_saves(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a save is done when the device fails."""
    side = probe.worker_side()
    assert side.engine is not None
    monkeypatch.setattr(side, "engine", FailingEngine(side.engine, CopyDirection.SAVE))


def never_begin(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.worker_side().records, "plan_save", _raise)


def invalidate_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes invalidated blocks missing in the same step: otherwise they count as saved, and are missed later."""
    client = connector_side(engine).parts.cache
    invalidate = client.invalidate

    def settled_invalidate(group: int, hashes: bytes) -> None:
        invalidate(group, hashes)
        engine.settle()

    monkeypatch.setattr(client, "invalidate", settled_invalidate)


DAMAGES = pytest.mark.parametrize("damage", [change_bytes_on_the_way, lose_the_memory, break_copies])


def acquire(engines: EnginePool, *, policy: str | None = "recompute") -> Engine:
    return engines.acquire(SLIDING, kv_transfer_config=probe.transfer(verify="always", policy=policy))


@pytest.mark.parametrize("which", ["all", "one_window"])
def test_records_that_were_damaged_are_missed_and_no_request_fails(engines: EnginePool, which: str) -> None:
    """The engine's default policy ends requests whose load failed: so what is damaged must not be reported as a hit."""
    engine = acquire(engines, policy=None)
    cold = _save(engine, PROMPT)
    prompts = {f"tail{i}": PROMPT[:RESTORABLE] + make_prompt(10 + i, 50) for i in range(5)}
    undisturbed = {name: _save(engine, prompt) for name, prompt in prompts.items()}
    entries = probe.entries(engine)
    bad = entries if which == "all" else [entry for entry in entries if entry.group == 0][:1]
    before = probe.pool_stats(engine)["mismatches"]
    for entry in bad:
        probe.flip_bit(None, entry.group, entry.address, 1000)
    with probe.watch_loads(engine) as loads:
        run = Run(engine)
        run.add("hit", PROMPT, max_tokens=8, logprobs=2)
        run.add_all(prompts)
        run.finish()
        engine.drain()
    assert loads == []
    assert probe.pool_stats(engine)["mismatches"] > before
    assert {output.outputs[0].finish_reason for output in run.outputs.values()} == {"length"}
    expected = decided_tokens(cold)
    assert run.tokens("hit")[: len(expected)] == expected
    for name, output in undisturbed.items():
        expected = decided_tokens(output)[:4]
        assert run.tokens(name)[: len(expected)] == expected
    assert_nothing_is_held(engine)

    assert engine.generate(PROMPT).num_cached_tokens == RESTORABLE, "what was recomputed is not saved again"
    engine.drain()
    assert_nothing_is_held(engine)


@DAMAGES
def test_after_a_failed_load_the_request_is_recomputed_once_and_equals_a_cold_run(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    engine = acquire(engines)
    cold = _save(engine, PROMPT)
    with monkeypatch.context() as patches, probe.watch_loads(engine) as loads:
        damage(engine, patches)
        invalidate_at_once(engine, patches)
        run = Run(engine)
        run.add("hit", PROMPT, max_tokens=8, logprobs=2)
        run.finish(max_steps=1000)
        engine.drain()
    assert loads == [RESTORABLE], "a failed load must be claimed once, or the engine tries it for ever"
    assert _result(run.outputs["hit"]) == _result(cold)
    assert_nothing_is_held(engine)

    assert engine.generate(PROMPT).num_cached_tokens == RESTORABLE, "what was recomputed is not saved again"
    engine.drain()
    assert_nothing_is_held(engine)


@DAMAGES
def test_requests_that_share_bad_records_fail_once_each(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    engine = acquire(engines)
    _save(engine, PROMPT)
    prompts = {f"tail{i}": PROMPT[:RESTORABLE] + make_prompt(10 + i, 50) for i in range(5)}
    cold = {name: _save(engine, prompt) for name, prompt in prompts.items()}
    with monkeypatch.context() as patches, probe.watch_loads(engine) as loads:
        damage(engine, patches)
        run = serve(engine, prompts)
    assert 1 <= len(loads) <= len(prompts)
    for name, output in cold.items():
        expected = decided_tokens(output)[:4]
        assert run.tokens(name)[: len(expected)] == expected
    assert_nothing_is_held(engine)


@DAMAGES
def test_with_the_policy_fail_only_the_request_whose_load_failed_ends_and_later_ones_are_served(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    engine = acquire(engines, policy=None)
    cold = _save(engine, PROMPT)
    other_cold = engine.generate(OTHER_PROMPT, logprobs=2)
    engine.forget()
    _save(engine, PROMPT)
    with monkeypatch.context() as patches:
        damage(engine, patches)
        run = Run(engine)
        run.add("hit", PROMPT, max_tokens=8, logprobs=2)
        run.add("miss", OTHER_PROMPT, max_tokens=8, logprobs=2)
        run.finish()
        engine.drain()
    assert run.outputs["hit"].outputs[0].finish_reason == "error"
    assert _result(run.outputs["miss"]) == _result(other_cold)
    assert_nothing_is_held(engine)

    with probe.watch_loads(engine) as loads:
        assert _result(engine.generate(PROMPT, logprobs=2)) == _result(cold)
        engine.drain()
        assert loads == [], "bad records survived the request that found them"
        engine.reset_local()
        assert engine.generate(PROMPT).num_cached_tokens == RESTORABLE
        engine.drain()
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("will_fail", [False, True], ids=["load_succeeds", "load_fails"])
def test_a_request_aborted_during_its_load_keeps_its_blocks_until_the_load_has_ended(
    engines: EnginePool, will_fail: bool
) -> None:
    engine = acquire(engines)
    with watch_blocks(engine) as ledger:
        _save(engine, PROMPT)
        with held_copies(engine) as release:
            run = _begin_load(engine)
            run.abort("loading")
            if will_fail:
                held_engine().fail_held()
            for _ in range(10):
                engine.llm.llm_engine.step()
            assert all_blocks(engine) - free_blocks(engine) == LOADED_BLOCKS
            assert (probe.pool_stats(engine)["leases"], probe.leased_blocks(engine)) == (1, LOADED_BLOCKS)
            release()
            engine.drain()
        assert not run.outputs
        assert ledger.restored == ([] if will_fail else [True] * LOADED_BLOCKS)
        assert_nothing_is_held(engine)
        assert engine.generate(PROMPT).num_cached_tokens == (0 if will_fail else RESTORABLE)
    assert_nothing_is_held(engine)


def test_a_request_aborted_during_its_save_leaves_the_blocks_pinned_until_they_are_saved(engines: EnginePool) -> None:
    engine = acquire(engines)
    with watch_blocks(engine) as ledger:
        with held_copies(engine) as release:
            run = Run(engine)
            run.add("saving", PROMPT, max_tokens=100)
            run.step_until(lambda: probe.pins(engine) > 0)
            run.abort("saving")
            for _ in range(10):
                engine.llm.llm_engine.step()
            assert all_blocks(engine) - free_blocks(engine) == probe.pins(engine) > 0
            release()
            engine.drain()
        assert_nothing_is_held(engine)
        assert engine.generate(PROMPT).num_cached_tokens == RESTORABLE
    assert ledger.restored
    assert all(ledger.restored)
    assert_nothing_is_held(engine)


def test_the_prefix_cache_cannot_be_reset_while_pins_are_held_and_can_afterwards(engines: EnginePool) -> None:
    engine = acquire(engines)
    with held_copies(engine) as release:
        engine.generate(PROMPT)
        assert probe.pins(engine) > 0
        assert not engine.llm.reset_prefix_cache()
        release()
        engine.drain()
    assert engine.llm.reset_prefix_cache()
    assert_nothing_is_held(engine)


def test_without_the_hook_that_keeps_an_idle_engine_stepping_pins_are_never_released(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = acquire(engines)
    with monkeypatch.context() as patches:
        patches.setattr(probe.scheduler_connector(engine), "has_pending_push_work", lambda: False)
        with held_copies(engine):
            engine.generate(PROMPT)
            engine.drain()  # there is one more step, which tells the workers what has finished
        for _ in range(1000):
            engine.llm.llm_engine.step()
        assert probe.pins(engine) > 0
        assert not engine.llm.reset_prefix_cache()
    engine.drain()
    assert_nothing_is_held(engine)


def test_a_reset_of_the_connector_during_a_load_lets_the_load_end_and_forgets_every_record(engines: EnginePool) -> None:
    engine = acquire(engines)
    with watch_blocks(engine) as ledger:
        cold = _save(engine, PROMPT)
        before = probe.names(engine)
        with held_copies(engine) as release:
            run = _begin_load(engine)
            assert not engine.llm.reset_prefix_cache(reset_connector=True), "the request's blocks are held"
            assert probe.names(engine) == set()
            release()
            run.finish()
            engine.drain()
        assert ledger.restored == [True] * LOADED_BLOCKS
        expected = decided_tokens(cold)
        assert run.tokens("loading")[: len(expected)] == expected
        assert_nothing_is_held(engine)

        # The request's blocks are of before the reset, so none was saved since; the engine's answer was no: ask again.
        assert probe.names(engine) == set()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.generate(PROMPT).num_cached_tokens == 0
        engine.drain()
        after = probe.names(engine)
    assert len(before) == len(after) == LOADED_BLOCKS
    assert before.isdisjoint(after), "what was saved before the reset could be found"
    assert_nothing_is_held(engine)


def test_a_reset_of_the_connector_during_a_save_drops_what_is_being_saved(engines: EnginePool) -> None:
    engine = acquire(engines)
    before = probe.pool_stats(engine)["readable"]
    with held_copies(engine) as release:
        engine.generate(PROMPT)
        assert probe.pool_stats(engine)["reserved"] == LOADED_BLOCKS
        assert not engine.llm.reset_prefix_cache(reset_connector=True)
        release()
        engine.drain()
    assert probe.pool_stats(engine)["readable"] == before
    engine.generate(PROMPT)
    engine.drain()
    assert probe.names(engine) == set(), "the engine's own blocks may be of before the reset, whose answer was no"
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert_nothing_is_held(engine)
    assert engine.generate(PROMPT).num_cached_tokens == 0
    engine.drain()
    assert len(probe.names(engine)) == LOADED_BLOCKS
    assert probe.pool_stats(engine)["readable"] == before + LOADED_BLOCKS


@pytest.mark.parametrize("damage", [break_saves, never_begin])
def test_a_save_that_fails_is_a_later_miss_and_nothing_else(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    engine = acquire(engines)
    cold = _save(engine, PROMPT)
    engine.forget()
    with monkeypatch.context() as patches:
        damage(engine, patches)
        assert _result(_save(engine, PROMPT)) == _result(cold)
    assert probe.names(engine) == set()
    assert_nothing_is_held(engine)

    assert _save(engine, PROMPT).num_cached_tokens == 0
    assert engine.generate(PROMPT).num_cached_tokens == RESTORABLE
    engine.drain()
    assert_nothing_is_held(engine)


def _save(engine: Engine, prompt: list[int]) -> RequestOutput:
    """Afterwards the prompt is in the connector's cache, and not in the engine's own."""
    output = engine.generate(prompt, logprobs=2)
    engine.reset_local()
    return output


def _begin_load(engine: Engine) -> Run:
    """A request whose load is queued behind held copies."""
    run = Run(engine)
    run.add("loading", PROMPT, max_tokens=8)
    run.step_until(lambda: probe.held(engine)["loads"] == 1)
    return run


def _result(output: RequestOutput) -> list[dict[int, float]]:
    """Per generated token, the logprobs of the best ones and of itself."""
    assert output.outputs[0].logprobs
    return [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs]


def _raise(*_args: object) -> None:
    raise MemoryError("no memory for a record")
