"""Loads that wait for no step rely on this: vLLM frees a block when no step that it launched touches it any more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from benchmarks.ground.engine import Flight, VirtualEngine
from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.models import GEMMA_3_27B, GPT_OSS_120B, LLAMA_8B, QWEN3_NEXT_80B, Model
from benchmarks.ground.trial import open_bare, open_ideal
from benchmarks.ground.work import make_fresh
from kvoffload.connector.engine.vllm_compat import frees_after_steps

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@dataclass
class StepTables:
    """The blocks of each step that was launched, and those of them that came free before it had ended."""

    by_step: dict[int, set[int]] = field(default_factory=dict)
    checked: int = 0
    freed: set[int] = field(default_factory=set)


def list_blocks(engine: VirtualEngine, output: SchedulerOutput) -> set[int]:
    """Lists the blocks that the step writes, and those that its tokens see: of a window, those not before the first
    token's."""
    scheduler, found = engine.scheduler, set()
    for name, tokens in output.num_scheduled_tokens.items():
        first = scheduler.requests[name].num_computed_tokens - tokens
        for group, table in zip(
            engine.config.scheduler.kv_cache_groups, scheduler.kv_cache_manager.get_block_ids(name), strict=True
        ):
            spec: Any = group.kv_cache_spec
            window = getattr(spec, "sliding_window", None)
            found |= set(table[max(first - window + 1, 0) // spec.block_size if window else 0 :])
    return found - {0}


def find_free(engine: VirtualEngine, blocks: set[int]) -> set[int]:
    pool = engine.scheduler.kv_cache_manager.block_pool
    return {block for block in blocks if pool.blocks[block].ref_cnt == 0}


def watch_tables(engine: VirtualEngine) -> StepTables:
    log, launch = StepTables(), engine.launch

    def watched(output: SchedulerOutput) -> Flight:
        for flight in engine.queue:
            blocks = log.by_step[id(flight.output)]
            log.checked += len(blocks)
            log.freed |= find_free(engine, blocks)
        log.by_step[id(output)] = list_blocks(engine, output)
        return launch(output)

    engine.launch = watched  # type: ignore[method-assign]
    return log


@pytest.mark.parametrize("model", [LLAMA_8B, GPT_OSS_120B, GEMMA_3_27B], ids=lambda model: model.name)
def test_windows_that_a_step_under_way_reads_are_not_free(model: Model) -> None:
    with open_ideal(model, EngineSettings(step_tokens=2048)) as engine:
        assert frees_after_steps(engine.config.vllm, engine.config.worker)
        log = watch_tables(engine)
        engine.serve(make_fresh(3, tokens=7000, new_tokens=8, per_s=20.0))
    assert log.checked > 1000
    assert log.freed == set()


def abort_under_way(engine: VirtualEngine) -> set[int]:
    """The blocks of a step that has not ended, whose request is gone."""
    (ask,) = make_fresh(1, tokens=300, new_tokens=50, per_s=0)
    engine.arrive(ask, 0.0)
    for _ in range(4):
        engine.step()
    assert engine.queue
    blocks = list_blocks(engine, engine.queue[-1].output)
    assert len(blocks) > 10
    engine.scheduler.finish_requests(ask.name, RequestStatus.FINISHED_ABORTED)
    return blocks


@pytest.mark.parametrize("model", [LLAMA_8B, GPT_OSS_120B], ids=lambda model: model.name)
def test_what_an_aborted_request_had_is_free_when_its_last_step_has_ended(model: Model) -> None:
    with open_ideal(model, EngineSettings()) as engine:
        blocks = abort_under_way(engine)
        assert find_free(engine, blocks) == set()
        while engine.queue:
            engine.step()
        assert find_free(engine, blocks) == blocks


def test_an_engine_that_loads_nothing_frees_at_once() -> None:
    """The test before says something."""
    with open_bare(LLAMA_8B, EngineSettings()) as engine:
        blocks = abort_under_way(engine)
        assert find_free(engine, blocks) == blocks
        while engine.queue:
            engine.step()


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (QWEN3_NEXT_80B, EngineSettings()),
        (LLAMA_8B, EngineSettings(drafts=3)),
        (LLAMA_8B, EngineSettings(is_async=False)),
    ],
    ids=["new blocks are zeroed", "drafts", "one step at a time"],
)
def test_loads_wait_where_that_is_not_all(model: Model, settings: EngineSettings) -> None:
    with open_ideal(model, settings) as engine:
        config: Any = engine.config
        assert not frees_after_steps(config.vllm, config.worker)
