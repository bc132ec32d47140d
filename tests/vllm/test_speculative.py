"""Engines that draft: what they compute is saved and restored bit-equal to their own hit, and hits end where theirs do.

An engine whose drafts come from the model's hidden states (EAGLE, MTP) computes the last block of a hit once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, Json, cache_shapes, make_prompt
from tests.vllm.equality import FLOAT32_ROUNDING, MIN_MARGIN, Answer, answer
from tests.vllm.tiny_drafters import LAYERS, MTP, MTP_LATENTS, MTP_WINDOWS, build_eagle3
from tests.vllm.tiny_models import DENSE, SLIDING, TinyModel
from tests.vllm.workload import assert_nothing_is_held

pytestmark = pytest.mark.vllm

LENGTHS = (640, 641, 700, 1281)
TOKENS = 24


@dataclass(frozen=True)
class Drafting:
    """`settings` for an engine of `model`; what drafts is built in a folder of its own, if it is not the model."""

    name: str
    settings: Mapping[str, object]
    model: TinyModel = DENSE
    build: Callable[[Path], None] | None = None
    drops_a_block: bool = False
    has_own_processes: bool = False

    def acquire(self, engines: EnginePool, folder: Path) -> Engine:
        settings = {"num_speculative_tokens": 3, **self.settings}
        if self.build is not None:
            self.build(folder / self.name)
            settings["model"] = str(folder / self.name)
        elif self.settings["method"] == "draft_model":
            settings["model"] = str(engines.model_folder(self.model))
        return engines.acquire(
            self.model,
            has_own_processes=self.has_own_processes,
            kv_transfer_config=probe.transfer(),
            max_num_batched_tokens=320,
            speculative_config=settings,
            **(probe.INSPECTED_SYNC if self.has_own_processes else {}),
        )


EAGLE3 = Drafting("eagle3", {"method": "eagle3"}, build=build_eagle3, drops_a_block=True)
# Drafts from the prompt are compiled by numba, after which vLLM starts no other engine in the process.
NGRAM = {"method": "ngram", "prompt_lookup_max": 3}
OTHERS = (
    Drafting("ngram", NGRAM, has_own_processes=True),
    Drafting("ngram-sliding", NGRAM, SLIDING, has_own_processes=True),
    Drafting("draft-model", {"method": "draft_model"}),
)


def check(engine: Engine, drafting: Drafting, lengths: tuple[int, ...] = LENGTHS) -> None:
    for seed, length in enumerate(lengths, start=500):
        prompt = make_prompt(seed, length)
        assert answer(engine, prompt, max_tokens=TOKENS).cached == 0
        local = answer(engine, prompt, max_tokens=TOKENS)
        block = drafting.model.block_size
        assert local.cached == (length - 1) // block * block - drafting.drops_a_block * block
        engine.reset_local()
        restored = answer(engine, prompt, max_tokens=TOKENS)
        assert (restored.cached, restored) == (local.cached, local)
    engine.drain()
    assert probe.faults(engine) == {}
    if not drafting.has_own_processes:
        assert_nothing_is_held(engine)


def test_an_engine_that_drafts_from_hidden_states_restores_what_its_own_hit_would_be(
    engines: EnginePool, tmp_path: Path
) -> None:
    check(EAGLE3.acquire(engines, tmp_path), EAGLE3, (640, 641))


def test_an_engine_that_drafts_with_a_layer_of_the_model_finds_that_layers_blocks_too(engines: EnginePool) -> None:
    """Uses float32, in which a run without hits gives the same answer. Drafts only decide how fast it comes."""
    engine = engines.acquire(MTP, kv_transfer_config=probe.transfer(), dtype="float32", max_num_batched_tokens=320)
    (shape,) = cache_shapes(engine)
    assert [group.layers for group in shape.groups] == [tuple(range(LAYERS + 1))]
    steps = 0
    for seed, length, expected in ((1, 640, 384), (11, 641, 512), (12, 1281, 1152)):
        prompt = make_prompt(seed, length)
        cold = answer(engine, prompt, max_tokens=TOKENS)
        assert cold.margin > MIN_MARGIN, f"the prompt of {length} tokens has two answers, choose another seed"
        local, own_drafts = drafted_answer(engine, prompt)
        engine.ask_workers(forget_drafting_layer)
        without, other_drafts = drafted_answer(engine, prompt)
        engine.reset_local()
        engine.ask_workers(forget_drafting_layer)
        with probe.watch_loads(engine) as loads:
            restored, drafts = drafted_answer(engine, prompt)
        assert (cold.cached, local.cached, restored.cached, loads) == (0, expected, expected, [expected])
        assert (restored, drafts) == (local, own_drafts)
        assert restored.tokens == cold.tokens == without.tokens
        assert restored.distance(cold) < FLOAT32_ROUNDING
        assert other_drafts != own_drafts, "what drafts does not read what it has cached, choose another seed"
        steps += len(drafts)
    # Several tokens a step: some drafts were right.
    assert steps < 3 * (TOKENS - 1)
    engine.drain()
    assert probe.faults(engine) == {}
    assert_nothing_is_held(engine)


@pytest.mark.campaign
def test_latents_of_a_layer_that_drafts_are_restored(engines: EnginePool) -> None:
    """vLLM turns its own prefix caching off for them on a CPU: the cold run is the measure."""
    engine = engines.acquire(MTP_LATENTS, kv_transfer_config=probe.transfer(), dtype="float32")
    (shape,) = cache_shapes(engine)
    assert [group.layers for group in shape.groups] == [MTP_LATENTS.groups[0].layers]
    for seed, length, expected in ((1, 640, 608), (11, 641, 624), (12, 1281, 1264)):
        prompt = make_prompt(seed, length)
        cold, cold_drafts = drafted_answer(engine, prompt)
        assert cold.margin > MIN_MARGIN, f"the prompt of {length} tokens has two answers, choose another seed"
        engine.reset_local()
        restored, drafts = drafted_answer(engine, prompt)
        assert (cold.cached, restored.cached) == (0, expected)
        assert (restored.tokens, drafts) == (cold.tokens, cold_drafts)
        assert restored.distance(cold) < FLOAT32_ROUNDING
    engine.drain()
    assert probe.faults(engine) == {}
    assert_nothing_is_held(engine)


@pytest.mark.campaign
def test_windows_of_a_layer_that_drafts_are_restored(engines: EnginePool) -> None:
    engine = engines.acquire(MTP_WINDOWS, kv_transfer_config=probe.transfer(), max_num_batched_tokens=320)
    (shape,) = cache_shapes(engine)
    assert sorted(group.layers for group in shape.groups) == sorted(group.layers for group in MTP_WINDOWS.groups)
    for seed, length, expected in ((500, 640, 512), (501, 641, 512), (502, 700, 512), (503, 1281, 1152)):
        prompt = make_prompt(seed, length)
        assert answer(engine, prompt, max_tokens=TOKENS).cached == 0
        local, own_drafts = drafted_answer(engine, prompt)
        engine.reset_local()
        with probe.watch_loads(engine) as loads:
            restored, drafts = drafted_answer(engine, prompt)
        assert (local.cached, restored.cached, loads) == (expected, expected, [expected])
        assert (restored, drafts) == (local, own_drafts)
    engine.drain()
    assert probe.faults(engine) == {}
    assert_nothing_is_held(engine)


def drafted_answer(engine: Engine, prompt: list[int]) -> tuple[Answer, list[list[int]]]:
    """Returns an answer with what was drafted for each step."""
    with watch_drafts(engine) as drafts:
        return answer(engine, prompt, max_tokens=TOKENS), drafts


@contextmanager
def watch_drafts(engine: Engine) -> Iterator[list[list[int]]]:
    scheduler = engine.core.scheduler
    schedule, seen = scheduler.schedule, list[list[int]]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        seen.extend(list(drafts) for drafts in output.scheduled_spec_decode_tokens.values())
        return output

    scheduler.schedule = watched
    try:
        yield seen
    finally:
        del scheduler.schedule


def forget_drafting_layer(worker: Any) -> Json:
    """Zeros in all of its blocks."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    layers[f"model.layers.{LAYERS}.self_attn.attn"].kv_cache.zero_()
    return True


@pytest.mark.campaign
@pytest.mark.parametrize("drafting", OTHERS, ids=lambda drafting: drafting.name)
def test_an_engine_that_drafts_restores_what_its_own_hit_would_be(
    engines: EnginePool, tmp_path: Path, drafting: Drafting
) -> None:
    check(drafting.acquire(engines, tmp_path), drafting)
