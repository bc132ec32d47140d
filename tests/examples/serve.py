"""Steps of the mini engine's tests: serve a prompt cold, restored, and by a fresh engine, and compare bits."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from mini_engine.engine import Engine, Request
from mini_engine.kv_cache import CacheConfig
from mini_engine.model import ModelConfig
from mini_engine.offload import BlockStore

EXAMPLES = Path(__file__).parents[2] / "examples"
QUANTS = ("none", "int8_per_token_head")
NEW_TOKENS = 3


class Served(NamedTuple):
    engine: Engine
    store: BlockStore
    prompt: list[int]
    cold: Request


def make_prompt(tokens: int) -> list[int]:
    return [(17 * i + 5) % ModelConfig.vocabulary for i in range(tokens)]


def serve_cold(model: ModelConfig, config: CacheConfig, device: str = "cpu") -> Served:
    """A prompt of some full blocks and a half, served by a fresh engine."""
    store = BlockStore()
    engine = Engine(model, config, torch.device(device), store)
    prompt = make_prompt(config.block_tokens * min(config.blocks - 1, 4) + config.block_tokens // 2)
    return Served(engine, store, prompt, engine.run(prompt, NEW_TOKENS))


def serve_restored(served: Served) -> Request:
    served.engine.scrub()
    return served.engine.run(served.prompt, NEW_TOKENS)


def assert_equal(one: Request, other: Request) -> None:
    assert one.generated == other.generated
    assert torch.equal(torch.stack(one.logprobs).cpu(), torch.stack(other.logprobs).cpu())


def is_equal(one: Request, other: Request) -> bool:
    return one.generated == other.generated and torch.equal(torch.stack(one.logprobs), torch.stack(other.logprobs))


def assert_restores(model: ModelConfig, config: CacheConfig, device: str = "cpu") -> Request:
    """Restored equals cold, and all full blocks before the last token were restored. Returns the cold request."""
    served = serve_cold(model, config, device)
    assert served.cold.reused == 0
    restored = serve_restored(served)
    assert_equal(served.cold, restored)
    chunk = max(group.block_size for group in served.engine.cache.groups)
    assert restored.reused == (len(served.prompt) - 1) // chunk * chunk > 0
    needed = served.engine.needed_blocks(restored.reused)
    assert restored.restored_blocks == sum(map(len, needed))
    return served.cold


def serve_fresh(prompt: list[int], config: CacheConfig) -> Request:
    return Engine(ModelConfig(), config, torch.device("cpu"), BlockStore()).run(prompt, NEW_TOKENS)
