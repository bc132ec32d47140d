"""Engines that draft: what they compute is saved and restored bit-equal to their own hit, and hits end where theirs do.

An engine whose drafts come from the model's hidden states (EAGLE, MTP) computes the last block of a hit once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.test_equality import answer
from tests.vllm.tiny_drafters import build_eagle3
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


@pytest.mark.campaign
@pytest.mark.parametrize("drafting", OTHERS, ids=lambda drafting: drafting.name)
def test_an_engine_that_drafts_restores_what_its_own_hit_would_be(
    engines: EnginePool, tmp_path: Path, drafting: Drafting
) -> None:
    check(drafting.acquire(engines, tmp_path), drafting)
