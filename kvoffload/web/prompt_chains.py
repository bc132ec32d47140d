"""Which of the server's identities are meant by what was asked, and a prompt's blocks by the names that each gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from kvoffload.errors import ServerError
from kvoffload.keys.prompt_hashes import HashSettings, choose_seed, digest_seed, hash_prompt
from kvoffload.protocol.limits import LINE_BYTES, MAX_BLOCKS, NAME_BYTES
from kvoffload.protocol.opening import find_model
from kvoffload.protocol.survey import IdentityRead, ReadIdentity
from kvoffload.web.http_message import HttpError
from kvoffload.web.prefix_question import Meant, Prompt
from kvoffload.web.server_calls import ServerCalls

Row = dict[str, Any]
FRESH_S = 1.0
"""For so long the server's identities are taken to be the same."""
MAX_IDENTITIES = 16
"""How many identities one answer has at most."""
_SHOWN_DIGITS = 12


@dataclass(frozen=True)
class Chosen:
    """Identities that a question means."""

    reads: Sequence[IdentityRead]
    is_partial: bool = False
    """Whether there are more, which are left out."""


class KnownIdentities:
    """Belongs to one loop; of one domain of the server, that of the client."""

    def __init__(self, calls: ServerCalls, token: str) -> None:
        """Takes the calls to the server, and the operator's `token` for those who are not the server's user."""
        self._calls = calls
        self._token = token
        self._known: dict[tuple[str, str], Chosen] = {}
        """Recent choices, by the beginning of a fingerprint and the model."""
        self._known_of = 0
        """Which server's, by its boot id: another one gives other numbers."""
        self._fresh_until_s = 0.0

    async def choose(self, meant: Meant) -> Chosen:
        """Those that are meant, MAX_IDENTITIES at most. ServerError: the server refuses, or does not answer."""
        if self._known_of != self._calls.client.link.boot_id or time.monotonic() >= self._fresh_until_s:
            self._known, self._known_of = {}, self._calls.client.link.boot_id
            self._fresh_until_s = time.monotonic() + FRESH_S
        wanted = meant.identity, meant.model
        if wanted not in self._known:
            self._known[wanted] = await self._read(meant)
        return self._known[wanted]

    def check_same(self) -> None:
        """Checks that the server is that whose identities were chosen. ServerError: it is not."""
        if self._calls.client.link.boot_id != self._known_of:
            raise ServerError("the cache server was replaced meanwhile", remedy="ask again")

    def forget(self) -> None:
        """One of them may not be known to the server any more."""
        self._fresh_until_s = 0.0

    async def _read(self, meant: Meant) -> Chosen:
        """Lets the server look for them, because there may be thousands of others."""
        found: list[IdentityRead] = []
        place = 0
        while len(meant.model.encode()) <= LINE_BYTES:
            # A fingerprint has fewer digits than what is left of a longer text.
            question = ReadIdentity(
                place=place, token=self._token, identity=meant.identity[:NAME_BYTES], model=meant.model
            )
            read = await self._calls.look_into(question)
            assert isinstance(read, IdentityRead)
            if read.fingerprint and len(found) == MAX_IDENTITIES:
                return Chosen(found, is_partial=True)
            if read.fingerprint:
                found.append(read)
            place = max(place, read.place) + 1
            if place >= read.total:
                break
        return Chosen(found)


class PromptChains:
    """One prompt's hashes, made once for all identities that name blocks alike."""

    def __init__(self, prompt: Prompt, meant: Meant) -> None:
        self._prompt = prompt
        self._meant = meant
        self._made: dict[tuple[str, int], bytes] = {}

    async def make(self, read: IdentityRead) -> bytes:
        """Makes what an identity calls the prompt's blocks. ValueError: only an engine can, or it is too long.
        HttpError: no thread can be started for it."""
        kind = read.hash_algorithm, read.hash_block_size
        self._check_seed(read)
        if kind not in self._made:
            self._made[kind] = await self._make(read)
        return self._made[kind]

    def _check_seed(self, read: IdentityRead) -> None:
        """Checks the seed. ValueError: other hashes would come of these tokens than the engine's."""
        if self._prompt.tokens is None:
            return
        if not read.hash_block_size:
            raise ValueError("no engine has said yet how these blocks are named: ask with hashes")
        seed = choose_seed(read.hash_algorithm, self._meant.seed)
        if read.hash_seed and read.hash_seed != digest_seed(seed):
            raise ValueError("its engines have another seed: say their PYTHONHASHSEED as `seed`, or ask with hashes")

    async def _make(self, read: IdentityRead) -> bytes:
        prompt = self._prompt
        if prompt.tokens is None:
            return prompt.hashes
        if len(prompt.tokens) // read.hash_block_size > MAX_BLOCKS:
            raise ValueError(f"{len(prompt.tokens)} tokens make more than {MAX_BLOCKS} hashes")
        settings = HashSettings(
            algorithm=read.hash_algorithm,
            block_size=read.hash_block_size,
            seed=self._meant.seed,
            salt=prompt.salt,
            tenant=prompt.tenant,
        )
        # Long ones take tens of milliseconds, in which others want to be answered.
        try:
            made = asyncio.get_running_loop().run_in_executor(None, hash_prompt, prompt.tokens, settings)
        except RuntimeError as fault:
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, f"too busy to hash a prompt: {fault}") from fault
        return await made


def name_identity(read: IdentityRead) -> Row:
    """Names an identity as answers do."""
    return {"identity": read.fingerprint.hex()[:_SHOWN_DIGITS], "model": find_model(read.identity)}
