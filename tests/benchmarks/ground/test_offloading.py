"""vLLM's own connector on the proving ground stores and loads there, and refuses what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.ground.engine import Run, VirtualEngine
from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.models import DEEPSEEK_V32, GPT_OSS_120B, LLAMA_8B, QWEN3_NEXT_80B, Model
from benchmarks.ground.others import OTHERS, OURS, compare_others, find_refusal
from benchmarks.ground.scenarios import Ground
from benchmarks.ground.server import count_left
from benchmarks.ground.trial import open_offloading
from benchmarks.ground.work import make_fresh, repeat

pytestmark = pytest.mark.vllm

TOKENS = 9000


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def ask_again(engine: VirtualEngine, wishes: Mapping[str, Any] | None = None) -> Run:
    """Asks for prompts again when the engine has forgotten them."""
    asks = [dataclasses.replace(ask, wishes=wishes) for ask in make_fresh(4, tokens=TOKENS, new_tokens=20, per_s=0)]
    engine.serve(asks)
    assert engine.forget()
    again = engine.serve(repeat(asks, from_s=0, new_tokens=2))
    assert not any(count_left(engine).values())
    return again


@pytest.mark.parametrize("model", [LLAMA_8B, GPT_OSS_120B, DEEPSEEK_V32], ids=lambda model: model.name)
@pytest.mark.parametrize("name", OTHERS)
def test_what_it_stored_is_hit_when_the_engine_has_forgotten_it(model: Model, name: str) -> None:
    with OTHERS[name](model, EngineSettings()) as engine:
        run = ask_again(engine)
        stored = [copies.all_saved_bytes for copies in engine.machine.engines.values()]
    assert all(one.external_tokens > TOKENS - 1024 for one in run.served)
    # All ranks of DeepSeek have the same latents.
    assert [size > 0 for size in stored] == [model is not DEEPSEEK_V32 or rank == 0 for rank in range(model.ranks)]


@pytest.mark.parametrize(("blocks", "is_hit"), [(1, True), (16, False)])
def test_states_are_stored_only_where_a_prompt_ends_with_a_block_of_the_tiers(blocks: int, is_hit: bool) -> None:
    with open_offloading(QWEN3_NEXT_80B, EngineSettings(), settings={"blocks_per_chunk": blocks}) as engine:
        run = ask_again(engine)
    assert [one.external_tokens > 0 for one in run.served] == [is_hit] * 4


def test_nothing_is_hit_that_it_was_told_not_to_store() -> None:
    with open_offloading(LLAMA_8B, EngineSettings()) as engine:
        run = ask_again(engine, {"max_offload_tokens": 0})
    assert not any(one.external_tokens for one in run.served)


def test_a_block_of_the_tiers_is_whole_blocks_of_the_engines() -> None:
    """An engine with states has larger blocks, as large as a state."""
    by_tokens = partial(open_offloading, settings={"block_size": 256})
    assert find_refusal(by_tokens, LLAMA_8B) is None
    fault = find_refusal(by_tokens, QWEN3_NEXT_80B)
    assert fault is not None
    assert fault.startswith("ValueError: 'block_size'=256 in kv_connector_extra_config must be a multiple of")


def test_each_connector_serves_the_same_requests_in_a_pool_of_the_same_bytes(tmp_path: Path) -> None:
    rows = list(compare_others(LLAMA_8B, Ground(tmp_path, is_short=True, seed=5, pools=(20,))))
    assert [row.params["connector"] for row in rows] == [OURS, *OTHERS]
    for name in ("requests", "prompt_tokens", "pool_mib"):
        assert len({row.params[name] for row in rows}) == 1
    for row in rows:
        found: dict[str, Any] = dict(row.params)
        assert 0 < found["only_pool"] < row.value
        assert 0.5 < found["stored_per_byte"] < 2
