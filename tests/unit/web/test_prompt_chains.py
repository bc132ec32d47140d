"""A prompt's hashes are made once for all identities that name blocks alike, and refused where only an engine can."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffload.keys.prompt_hashes import digest_seed
from kvoffload.protocol import IdentityField
from kvoffload.protocol.limits import MAX_BLOCKS
from kvoffload.protocol.survey import IdentityRead, ReadIdentity
from kvoffload.web.http_message import HttpError
from kvoffload.web.prefix_question import Meant, Prompt
from kvoffload.web.prompt_chains import MAX_IDENTITIES, KnownIdentities, PromptChains, name_identity
from tests.kit.cache.cache_model import PLAIN, fingerprint
from tests.kit.scarce_threads import scarce_threads
from tests.kit.server.harness import BOOT_ID, UID, Server, core_settings
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


async def test_without_a_thread_the_page_is_too_busy_and_goes_on() -> None:
    with scarce_threads(), pytest.raises(HttpError, match="too busy to hash a prompt") as refused:
        await make(TOKENS).make(READ)
    assert refused.value.status is HTTPStatus.SERVICE_UNAVAILABLE
    assert await make(TOKENS).make(READ) == name_blocks(TOKENS)


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


class Asked:
    """Calls to a server's core, which are counted."""

    def __init__(self, server: Server) -> None:
        self.client = SimpleNamespace(link=SimpleNamespace(boot_id=BOOT_ID))
        self.count = 0
        self._operator = server.process("web").watch()

    async def look_into(self, message: ReadIdentity) -> Any:
        self.count += 1
        return self._operator.ask(message)


async def test_the_identities_of_others_make_a_question_hardly_longer() -> None:
    with Server(settings=core_settings(operator_uids=frozenset({UID}))) as server:
        for number in range(400):
            named = (IdentityField(name="model", value="wanted" if number % 100 == 99 else "other"),)
            server.exit_process(server.process(f"engine {number}").join(PLAIN, name=f"{number}", identity=named))
        for meant, found, asked, is_partial in (
            (Meant(model="wanted"), 4, 11, False),
            (Meant(identity=fingerprint("399").hex()), 1, 7, False),
            (Meant(identity="z" * 500), 0, 7, False),
            (Meant(model="x" * 512), 0, 7, False),
            (Meant(model="é" * 512), 0, 0, False),
            (Meant(), MAX_IDENTITIES, MAX_IDENTITIES + 1, True),
        ):
            client = Asked(server)
            chosen = await KnownIdentities(client, "").choose(meant)  # type: ignore[arg-type]
            assert (len(chosen.reads), chosen.is_partial) == (found, is_partial)
            assert client.count <= asked


async def test_what_was_chosen_is_not_asked_for_again_at_once() -> None:
    with Server(settings=core_settings(operator_uids=frozenset({UID}))) as server:
        server.process().join(PLAIN)
        client = Asked(server)
        known = KnownIdentities(client, "")  # type: ignore[arg-type]
        assert await known.choose(Meant()) is await known.choose(Meant())
        assert client.count == 1
        known.forget()
        assert len((await known.choose(Meant())).reads) == 1
        assert client.count == 2
