"""The mini engine by itself: blocks, boundaries, and requests that share them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mini_engine.engine import BlockPool, Engine
from mini_engine.kv_cache import CacheConfig
from mini_engine.model import ModelConfig
from mini_engine.offload import BlockStore

from kvoffload.cache import EntryKey, longest_boundary
from kvoffload.keys.block_hash import BlockHasher
from kvoffload.types import BlockHash
from tests.examples.serve import NEW_TOKENS, assert_equal, make_prompt, serve_cold, serve_fresh


@pytest.mark.parametrize("is_overlaid", [False, True], ids=["beside", "overlaid"])
def test_requests_that_share_prefixes_and_wait_for_blocks_answer_as_alone(is_overlaid: bool) -> None:
    store = BlockStore()
    config = CacheConfig(blocks=8, is_overlaid=is_overlaid)
    engine = Engine(ModelConfig(), config, torch.device("cpu"), store)
    prompts = [[*make_prompt(shared), *range(tail)] for shared, tail in ((20, 0), (20, 9), (0, 30), (17, 3), (33, 5))]
    requests = [engine.submit(prompt, NEW_TOKENS) for prompt in prompts]
    while not all(request.is_done for request in requests):
        engine.step()
    for prompt, request in zip(prompts, requests, strict=True):
        assert_equal(request, serve_fresh(prompt, CacheConfig()))
    assert any(request.reused for request in requests)


def test_chunks_do_not_change_what_is_computed() -> None:
    """Not bit for bit: sums are rounded elsewhere. But close, or pages, states or the window were wrong."""
    prompt = make_prompt(45)
    small = serve_fresh(prompt, CacheConfig(block_tokens=4, state_block_tokens=4))
    large = serve_fresh(prompt, CacheConfig(block_tokens=64, state_block_tokens=64))
    assert torch.allclose(small.logprobs[0], large.logprobs[0], atol=1e-4)


def test_the_last_prompt_token_is_computed_even_if_all_blocks_are_there() -> None:
    engine = Engine(ModelConfig(), CacheConfig(), torch.device("cpu"), BlockStore())
    cold, again = (engine.run(make_prompt(16), NEW_TOKENS) for _ in range(2))
    assert again.reused == 8
    assert_equal(cold, again)


def test_what_can_never_fit_is_refused_and_what_just_fits_is_served() -> None:
    engine = Engine(ModelConfig(), CacheConfig(blocks=2), torch.device("cpu"), BlockStore())
    assert engine.run(make_prompt(13), 4).is_done
    with pytest.raises(ValueError, match="17 tokens need 3 blocks, the cache has 2"):
        engine.submit(make_prompt(14), 4)


def test_a_boundary_needs_what_the_group_rules_say() -> None:
    engine = serve_cold(ModelConfig(window=12), CacheConfig()).engine
    groups = enumerate(engine.cache.groups)
    needed = {group.name: [list(engine.needed_blocks(at)[g]) for at in (0, 8, 24)] for g, group in groups}
    assert needed == {
        "recurrent": [[], [0], [2]],
        "full_attention": [[], [0], [0, 1, 2]],
        "sliding_window": [[], [0], [1, 2]],
    }

    def find_boundary(limit: int, is_present: Callable[[int, int], bool]) -> int:
        return longest_boundary(engine.cache.rules, local=0, limit=limit, is_present=is_present, alignment=8)

    assert find_boundary(31, lambda group, i: True) == 24
    assert find_boundary(31, lambda group, i: (group, i) != (0, 2)) == 16
    assert find_boundary(31, lambda group, i: (group, i) != (1, 0)) == 0
    assert find_boundary(31, lambda group, i: (group, i) != (2, 0)) == 24


def test_a_hash_names_its_block_and_everything_before_it() -> None:
    hasher = BlockHasher(2)

    def hash_blocks(tokens: list[int]) -> list[BlockHash]:
        return hasher.hash_blocks(tokens, parent=hasher.root())

    chain = hash_blocks([1, 2, 3, 4, 5])
    assert len(chain) == 2
    assert hash_blocks([1, 2, 3, 4]) == chain
    assert hash_blocks([9, 2, 3, 4])[1] != chain[1]


def test_free_blocks_keep_their_names_until_they_are_handed_out_again() -> None:
    pool, key = BlockPool(2), EntryKey(0, BlockHash(b"a"))
    first = pool.allocate()
    pool.publish(first, key)
    pool.release(first)
    assert pool.block_of == {key: first}
    assert pool.allocate() != first
    assert pool.block_of == {key: first}
    assert pool.allocate() == first
    assert pool.block_of == {}
