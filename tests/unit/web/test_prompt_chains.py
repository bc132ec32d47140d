"""A prompt's hashes are made once for all identities that name blocks alike, and refused where only an engine can."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.keys.prompt_hashes import digest_seed
from kvoffload.protocol.limits import MAX_BLOCKS
from kvoffload.protocol.survey import IdentityRead
from kvoffload.web.prefix_question import Meant, Prompt
from kvoffload.web.prompt_chains import PromptChains, name_identity
from tests.kit.web.vllm_blocks import BLOCK, SEED, name_blocks

READ = IdentityRead(
    total=1,
    fingerprint=b"\xab" * 32,
    hash_algorithm="sha256",
    hash_block_size=BLOCK,
    hash_seed=digest_seed(SEED),
)
TOKENS = list(range(4 * BLOCK))


def make(tokens: list[int], seed: str = SEED) -> PromptChains:
    return PromptChains(Prompt(tokens=np.array(tokens, np.int64)), Meant(seed=seed))


async def test_hashes_are_the_engines_and_made_once() -> None:
    chains = make(TOKENS)
    made = await chains.make(READ)
    assert made == name_blocks(TOKENS)
    assert await chains.make(READ) is made


async def test_hashes_that_are_said_are_taken_as_they_are() -> None:
    assert await PromptChains(Prompt(hashes=b"\1" * 32), Meant()).make(READ) == b"\1" * 32


async def test_what_only_an_engine_can_make_is_refused() -> None:
    for chains, read, why in (
        (make(TOKENS, "8"), READ, "PYTHONHASHSEED"),
        (make(TOKENS), IdentityRead(total=1), "no engine has said yet"),
        (make([0] * (MAX_BLOCKS + 1) * BLOCK), READ, f"more than {MAX_BLOCKS} hashes"),
    ):
        with pytest.raises(ValueError, match=why):
            await chains.make(read)


def test_an_identity_has_the_beginning_of_its_fingerprint() -> None:
    assert name_identity(READ) == {"identity": "ab" * 6, "model": ""}
