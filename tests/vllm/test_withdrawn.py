"""Promises and transfers that end early: hits that the engine cuts or never takes, reports that never arrive,
requests that give way. Answers stay what they are, and nothing stays held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvoffload.connector.saves.settings import REPORT_WAIT_S
from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.equality import answer, restored_answer
from tests.vllm.tiny_models import DENSE, SLIDING, TinyModel
from tests.vllm.workload import (
    Run,
    assert_nothing_is_held,
    connector_side,
    decided_tokens,
    held_copies,
    noting_misses,
    serve_alone,
    watch_scheduler,
)

pytestmark = pytest.mark.vllm

LENGTH, BLOCK = 641, 128
HIT = 640


def acquire(engines: EnginePool, model: TinyModel = DENSE, **arguments: object) -> Engine:
    return engines.acquire(model, kv_transfer_config=probe.transfer(policy="recompute"), **arguments)


@contextmanager
def cutting(engine: Engine, tokens: int) -> Iterator[list[int]]:
    """The engine takes so many tokens of a hit at most, after it was reported: as vLLM's `cap_external_hit` does.
    Collects what had been reported."""
    connector: Any = engine.core.scheduler.connector
    ask = connector.get_num_new_matched_tokens
    seen: list[int] = []

    def cut(request: Any, computed: int) -> tuple[int | None, bool]:
        external, is_asynchronous = ask(request, computed)
        if not external:
            return external, is_asynchronous
        seen.append(external)
        return min(external, tokens), tokens > 0

    connector.get_num_new_matched_tokens = cut
    try:
        yield seen
    finally:
        del connector.get_num_new_matched_tokens


def test_a_hit_that_is_not_taken_after_all_is_computed_and_its_lease_ends(engines: EnginePool) -> None:
    check_not_taken(acquire(engines))


def check_not_taken(engine: Engine) -> None:
    prompt = make_prompt(seed=1, length=LENGTH)
    cold = answer(engine, prompt)
    engine.reset_local()
    with cutting(engine, 0) as reported, probe.watch_loads(engine) as loads, noting_misses(engine) as misses:
        assert answer(engine, prompt) == cold
    assert (reported, loads, misses) == ([HIT], [], {"skipped": LENGTH})
    engine.drain()
    assert_nothing_is_held(engine)
    assert restored_answer(engine, prompt).cached == HIT


def test_of_a_hit_that_is_cut_the_beginning_is_loaded(engines: EnginePool) -> None:
    engine, prompt = acquire(engines), make_prompt(seed=2, length=LENGTH)
    answer(engine, prompt)
    engine.reset_local()
    with cutting(engine, 2 * BLOCK) as reported, noting_misses(engine) as misses:
        cut = answer(engine, prompt)
    assert (reported, misses) == ([HIT], {"skipped": LENGTH - 2 * BLOCK})
    engine.reset_local()
    asked = engine.generate(prompt, max_load_tokens=2 * BLOCK)
    assert (cut.cached, asked.num_cached_tokens) == (2 * BLOCK, 2 * BLOCK)
    assert cut.tokens == tuple(asked.outputs[0].token_ids)
    engine.drain()
    assert_nothing_is_held(engine)


def test_a_request_for_which_the_engine_reads_no_cache_is_not_looked_up_and_is_saved(engines: EnginePool) -> None:
    from vllm import SamplingParams

    engine, prompt = acquire(engines), make_prompt(seed=3, length=LENGTH)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    sampling.detokenize = False
    with noting_misses(engine) as misses:
        [cold] = engine.llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    assert misses == {"skipped": LENGTH}
    engine.drain()
    engine.reset_local()
    with probe.watch_loads(engine) as loads:
        [again] = engine.llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    assert (loads, again.num_cached_tokens) == ([], 0)
    assert again.outputs[0].token_ids == cold.outputs[0].token_ids
    assert restored_answer(engine, prompt).cached == HIT
    engine.drain()
    assert_nothing_is_held(engine)


@contextmanager
def losing_reports(engine: Engine) -> Iterator[list[Any]]:
    """Within it, what workers say of saves is lost on its way, and collected."""
    side = connector_side(engine)
    end_transfers = side.end_transfers
    lost: list[Any] = []

    def lose(finished: Any, failed: Any, report: Any) -> None:
        if report is not None and report.saved:
            lost.append(report)
            report = replace(report, saved={}, failed=frozenset(), digests={})
        end_transfers(finished, failed, report)

    side.end_transfers = lose
    try:
        yield lost
    finally:
        del side.end_transfers


def test_a_save_that_some_rank_never_reports_gives_its_blocks_back_within_a_bound(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = acquire(engines), make_prompt(seed=4, length=LENGTH)
    parts = connector_side(engine).parts
    now_s = [parts.saves.clock()]
    monkeypatch.setattr(parts.saves, "clock", lambda: now_s[0])
    with losing_reports(engine) as lost:
        run = Run(engine)
        run.add("lost", prompt)
        run.finish()
        run.step_until(lambda: len(lost) == probe.held(engine)["saves"] > 0)
        assert probe.pins(engine) == HIT // BLOCK
        now_s[0] += REPORT_WAIT_S - 1
        run.step()
        assert probe.pins(engine) == HIT // BLOCK
        now_s[0] += 1
        engine.drain()
    assert (probe.pins(engine), probe.held(engine)["saves"]) == (0, 0)
    # The slots stay with the copy that may still write to them, until it is reported after all.
    assert probe.pool_stats(engine)["reserved"] == HIT // BLOCK
    for report in lost:
        connector_side(engine).end_transfers(set(), set(), report)
    assert_nothing_is_held(engine)
    assert restored_answer(engine, prompt).cached == 0
    assert restored_answer(engine, prompt).cached == HIT
    engine.drain()


def test_windows_of_a_shorter_hit_were_not_acquired_so_the_engine_computes_it_all(engines: EnginePool) -> None:
    engine, prompt = acquire(engines, SLIDING), make_prompt(seed=2, length=LENGTH)
    check_not_taken(engine)
    cold = answer(engine, prompt)
    engine.reset_local()
    with cutting(engine, 2 * BLOCK) as reported:
        assert answer(engine, prompt) == cold
    assert reported == [HIT]
    engine.drain()
    assert_nothing_is_held(engine)


def test_requests_that_give_way_to_urgent_ones_end_as_if_they_had_not(engines: EnginePool) -> None:
    """Loads and saves are under way when the urgent ones come, and blocks run out."""
    arguments = {"num_gpu_blocks_override": 14, "max_model_len": 1024, "scheduling_policy": "priority"}
    engine = acquire(engines, **arguments)
    prompts = {f"prompt{seed}": make_prompt(seed, 374) for seed in range(10, 16)}
    alone = serve_alone(engine, prompts, max_tokens=24)
    saved = list(prompts)[:3]
    for name in saved:
        engine.generate(prompts[name])
        engine.drain()
    engine.reset_local()
    with watch_scheduler(engine) as log, probe.watch_loads(engine) as loads:
        run = Run(engine)
        with held_copies(engine):
            for name in list(prompts)[1:-1]:
                add(engine, run, name, prompts[name], priority=1)
            run.step_until(lambda: bool(loads) and probe.pins(engine) > 0)
            add(engine, run, "prompt10", prompts["prompt10"], priority=0)
            add(engine, run, "prompt15", prompts["prompt15"], priority=0)
            for _ in range(10):
                run.step()
        run.finish()
    engine.drain()
    assert log.preempted, "the cache is not small enough"
    assert {name.rsplit("-", 1)[0] for name in log.preempted}.isdisjoint({"prompt10", "prompt15"})
    for name, output in alone.items():
        expected = decided_tokens(output)
        assert run.tokens(name)[: len(expected)] == expected
    assert_nothing_is_held(engine)


def add(engine: Engine, run: Run, name: str, prompt: list[int], *, priority: int) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    llm = engine.llm.llm_engine
    run.ids[name] = llm.add_request(name, {"prompt_token_ids": prompt}, sampling, priority=priority)
