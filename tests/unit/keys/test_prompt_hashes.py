"""Hashes of prompts are those that vLLM's scheduler and our own engines make of the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.hash_rows import as_rows
from kvoffload.keys.block_hash import BlockHasher
from kvoffload.keys.prompt_hashes import (
    MAX_BLOCK_TOKENS,
    MAX_LETTERS,
    MAX_TOKEN,
    VLLM_SEED,
    HashSettings,
    choose_seed,
    digest_seed,
    hash_prompt,
    mask_of_tenant,
)

EDGES = [0, 23, 24, 255, 256, 65_535, 65_536, MAX_TOKEN]
tokens_ = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, MAX_TOKEN)), max_size=70)
texts = st.one_of(st.text(max_size=10), st.sampled_from(["s" * 23, "s" * 24, "s" * 255, "s" * 256, "ß" * MAX_LETTERS]))


def ask(tokens: list[int], **settings: Any) -> bytes:
    return hash_prompt(np.array(tokens, np.int64), HashSettings(**settings))


@settings(max_examples=300, deadline=None)
@given(tokens_, st.sampled_from(["sha256", "sha256_cbor"]), st.integers(1, 40), st.none() | texts, texts)
def test_they_are_vllms(tokens: list[int], algorithm: str, size: int, seed: str | None, salt: str) -> None:
    """By what vLLM itself hashes with, which is asked block by block."""
    hashing = pytest.importorskip("vllm.utils.hashing", reason="vLLM is not installed")
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils", reason="vLLM is not installed")
    function = hashing.get_hash_fn_by_name(algorithm)
    parent, expected = function(VLLM_SEED if seed is None else seed), []
    for at in range(len(tokens) // size):
        # The salt comes from the caller, the name of its key from vLLM.
        extra = (("cache_salt", salt),) if salt and not at else None
        parent = utils.hash_block_tokens(function, parent, tokens[at * size : (at + 1) * size], extra)
        expected.append(parent)
    assert ask(tokens, algorithm=algorithm, block_size=size, seed=seed, salt=salt) == b"".join(expected)


def test_vllms_seed_is_still_what_we_take_it_for() -> None:
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils", reason="vLLM is not installed")
    assert getattr(utils, "DEFAULT_NONE_HASH_SEED", VLLM_SEED) == VLLM_SEED
    assert choose_seed("sha256", None) == VLLM_SEED
    assert choose_seed("sha256", "") == ""


def test_ours_are_the_hashers() -> None:
    hasher = BlockHasher(4, seed="a")
    expected = b"".join(hasher.hash_blocks(range(10), parent=hasher.root(salt="b")))
    given = {"algorithm": hasher.algorithm, "block_size": 4, "salt": "b"}
    assert ask(list(range(10)), seed="a", **given) == expected
    assert ask(list(range(10)), **given) != expected


def test_a_tenants_names_are_masked() -> None:
    given: dict[str, Any] = {"algorithm": "sha256", "block_size": 4}
    plain, masked = ask([1] * 9, **given), ask([1] * 9, tenant="a", **given)
    assert (as_rows(plain) ^ as_rows(masked)).tobytes() == 2 * mask_of_tenant("a")
    assert mask_of_tenant("a") != mask_of_tenant("b")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"algorithm": "xxhash", "block_size": 16}, "xxhash can only be made by their engine"),
        ({"algorithm": "sha256", "block_size": MAX_BLOCK_TOKENS + 1}, "allowed are 1 to 8192"),
        ({"algorithm": "sha256", "block_size": 0}, "allowed are 1 to 8192"),
        ({"algorithm": "sha256", "block_size": 1, "seed": "s" * (MAX_LETTERS + 1)}, "at most 512 letters"),
        ({"algorithm": "sha256", "block_size": 1, "salt": "s" * (MAX_LETTERS + 1)}, "at most 512 letters"),
    ],
)
def test_what_only_an_engine_can_make(settings: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ask([1, 2, 3], **settings)


def test_the_longest_blocks_are_vllms_too() -> None:
    hashing = pytest.importorskip("vllm.utils.hashing", reason="vLLM is not installed")
    tokens = [MAX_TOKEN] * MAX_BLOCK_TOKENS
    expected = hashing.sha256((hashing.sha256(VLLM_SEED), tuple(tokens), None))
    assert ask(tokens, algorithm="sha256", block_size=MAX_BLOCK_TOKENS) == expected


def test_of_a_seed_its_digest_is_told() -> None:
    assert digest_seed("7").hex() == "7902699be42c8a8e46fbbb4501726517e86b22c56a189f7625a6da49081b2451"
