"""A KV cache too small for its requests: they are preempted, wait, and come back, and no byte or block goes astray."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.tiny_models import DENSE, GDN, SLIDING, TinyModel
from tests.vllm.workload import (
    Run,
    all_blocks,
    assert_nothing_is_held,
    connector_side,
    decided_tokens,
    describe_scheduler,
    free_blocks,
    held_copies,
    serve,
    serve_alone,
    watch_blocks,
    watch_scheduler,
)

pytestmark = pytest.mark.vllm

IDLE_STEPS = 50
"""A step that schedules nothing, while no copy is under way, leaves all as it was; so many prove it."""


@dataclass(frozen=True)
class SmallCache:
    """An engine whose requests fit one by one, and together until they decode into another block."""

    model: TinyModel
    prompt_tokens: int
    num_blocks: int
    max_model_len: int
    max_batched_tokens: int

    def acquire(self, engines: EnginePool, **settings: str) -> Engine:
        return engines.acquire(
            self.model,
            num_gpu_blocks_override=self.num_blocks,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_batched_tokens,
            kv_transfer_config=probe.transfer(verify="always", **settings),
        )

    def prompts(self, number: int = 6) -> dict[str, list[int]]:
        return {f"prompt{i}": make_prompt(i, self.prompt_tokens) for i in range(number)}


SMALL_DENSE = SmallCache(DENSE, 374, num_blocks=18, max_model_len=1024, max_batched_tokens=2048)
SMALL_SLIDING = SmallCache(SLIDING, 374, num_blocks=40, max_model_len=1024, max_batched_tokens=256)
SMALL_GDN = SmallCache(GDN, 1270, num_blocks=26, max_model_len=1920, max_batched_tokens=2048)
# Two loaded requests hold 6 of 13 blocks each, and each needs 3 more to take its first step.
TIGHT_SLIDING = SmallCache(SLIDING, 612, num_blocks=14, max_model_len=768, max_batched_tokens=128)
DECODING = SmallCache(DENSE, 120, num_blocks=14, max_model_len=1024, max_batched_tokens=2048)
DECODED_TOKENS = 600


@pytest.mark.parametrize("small", [SMALL_DENSE, SMALL_SLIDING, SMALL_GDN], ids=lambda small: small.model.name)
def test_preempted_requests_end_with_the_tokens_of_undisturbed_ones_and_restored_blocks_hold_what_was_saved(
    engines: EnginePool, small: SmallCache
) -> None:
    engine, prompts = small.acquire(engines), small.prompts()
    alone = serve_alone(engine, prompts)
    with watch_blocks(engine) as ledger, watch_scheduler(engine) as log, probe.watch_loads(engine) as loads:
        for prompt in prompts.values():
            engine.generate(prompt, max_tokens=8)
            engine.drain()
        for _ in range(2):
            engine.reset_local()
            run = serve(engine, prompts, max_tokens=24)
            for name, output in alone.items():
                expected = decided_tokens(output)
                assert run.tokens(name)[: len(expected)] == expected
                assert len(run.tokens(name)) == 24

    assert len(log.preempted) >= 2, "the cache is not small enough"
    assert len(loads) >= 4
    assert len(ledger.restored) >= len(loads)
    assert all(ledger.restored)
    assert all(ledger.saved.values())
    assert sum(len(decided_tokens(output)) for output in alone.values()) >= len(prompts)
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("policy", "is_saved"), [("auto", True), ("on_evict", True), ("auto", False)], ids=["auto", "on_evict", "control"]
)
def test_a_preempted_request_loads_what_it_had_decoded(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch, policy: str, is_saved: bool
) -> None:
    """Three requests decode four blocks each, and the cache has room for all blocks of two. Of a request that comes
    back no more is computed again than its last block, which was not full."""
    engine, prompts = DECODING.acquire(engines, save_policy=policy), DECODING.prompts(3)
    alone = serve_alone(engine, prompts, max_tokens=DECODED_TOKENS) if is_saved else {}
    if not is_saved:
        monkeypatch.setattr(connector_side(engine), "save_before_preemption", lambda: False)
    with watch_blocks(engine) as ledger, watch_scheduler(engine) as log:
        run = serve(engine, prompts, max_tokens=DECODED_TOKENS)
    tokens = sum(map(len, prompts.values())) + len(prompts) * DECODED_TOKENS
    again = sum(log.scheduled_tokens) - tokens
    assert log.preempted, "the cache is not small enough"
    assert (again <= len(log.preempted) * 128) is is_saved
    assert all(ledger.restored)
    for name, output in alone.items():
        expected = decided_tokens(output)
        assert run.tokens(name)[: len(expected)] == expected
    assert_nothing_is_held(engine)


def test_recurrent_states_are_pinned_before_full_blocks_which_can_be_saved_later(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step fills two full blocks and hands off three states, and only four blocks may be pinned."""
    engine, prompt = SMALL_GDN.acquire(engines), make_prompt(1, 2 * 640 + 10)
    monkeypatch.setattr(connector_side(engine).parts.pins, "limit", 4)
    engine.generate(prompt)
    engine.reset_local()
    assert engine.generate(prompt).num_cached_tokens == 2 * 640
    engine.drain()
    assert_nothing_is_held(engine)


def test_loaded_requests_would_hold_all_blocks_for_ever_without_the_admission_guard(engines: EnginePool) -> None:
    engine, prompts = _saved_pair(engines)
    with watch_scheduler(engine) as log, probe.watch_loads(engine) as loads:
        connector_side(engine).parts.restores.admission.admits = lambda **_: True
        run = Run(engine)
        with held_copies(engine):  # neither has been loaded before the other one begins
            run.add_all(prompts)
            run.step_until(lambda: len(loads) == 2)
        run.step_until(lambda: not _copies(engine))
        for _ in range(IDLE_STEPS):
            run.step()
        assert not any(log.scheduled_tokens), "the engine got out of it by itself: is vLLM's reservation mended?"
        assert not run.is_done
        assert free_blocks(engine) < 3, describe_scheduler(engine)

        run.abort(*prompts)
        engine.drain()
    assert_nothing_is_held(engine)


def test_with_the_admission_guard_both_are_restored_one_after_the_other(engines: EnginePool) -> None:
    engine, prompts = _saved_pair(engines)
    with watch_scheduler(engine) as log, probe.watch_loads(engine) as loads:
        run = serve(engine, prompts)
    assert log.refused
    assert loads == [512, 512]
    assert {name: output.num_cached_tokens for name, output in run.outputs.items()} == dict.fromkeys(prompts, 512)
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("may_wait", [True, False], ids=["waits", "control_without_the_hook"])
def test_a_request_waits_for_pinned_blocks_instead_of_being_preempted(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch, may_wait: bool
) -> None:
    engine = SMALL_DENSE.acquire(engines)
    if not may_wait:
        monkeypatch.setattr(probe.scheduler_connector(engine), "has_pending_block_frees", lambda: False)
    with watch_scheduler(engine) as log, held_copies(engine) as release:
        engine.generate(make_prompt(1, 374), max_tokens=2)
        assert all_blocks(engine) - free_blocks(engine) == probe.pins(engine) == 2
        run = Run(engine)
        run.add("takes the last block", make_prompt(2, 7 * 128 - 4), max_tokens=100)
        run.add("needs one more", make_prompt(3, 7 * 128 - 4), max_tokens=12)
        for _ in range(IDLE_STEPS):
            run.step()
        assert not run.outputs
        assert bool(log.preempted) is not may_wait
        release()
        run.finish()
        assert bool(log.preempted) is not may_wait
    engine.drain()
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "control_without_pins"])
def test_a_pinned_block_is_not_overwritten_before_it_is_saved(engines: EnginePool, is_pinned: bool) -> None:
    engine = SMALL_DENSE.acquire(engines)
    pins = connector_side(engine).parts.pins
    with watch_blocks(engine) as ledger, held_copies(engine) as release:
        if not is_pinned:
            pins.pin = pins.unpin = lambda *_, **__: None
        try:
            engine.generate(make_prompt(1, 374), max_tokens=2)
            assert len(ledger.planned) == 2
            for seed in range(2, 10):  # 3 blocks each: more than there are
                engine.generate(make_prompt(seed, 374), max_tokens=2)
            release()
            engine.drain()
        finally:
            if not is_pinned:
                del pins.pin, pins.unpin
    saved = [ledger.saved[address] for address in list(ledger.planned)[:2]]
    assert saved == [True, True] if is_pinned else not all(saved)
    assert_nothing_is_held(engine)


def _saved_pair(engines: EnginePool) -> tuple[Engine, dict[str, list[int]]]:
    """Both prompts can be restored up to token 512, and nothing of them is in the engine's own cache."""
    engine, prompts = TIGHT_SLIDING.acquire(engines), TIGHT_SLIDING.prompts(2)
    for prompt in prompts.values():
        engine.generate(prompt, max_tokens=12)
        engine.drain()
    engine.reset_local()
    return engine, prompts


def _copies(engine: Engine) -> int:
    held = probe.held(engine)
    return held["loads"] + held["saves"]
