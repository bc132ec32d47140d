"""Answers how much of a prompt is there, by asking the cache server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from http import HTTPStatus
from itertools import count
from typing import Any

import numpy as np

from kvoffload.client.async_client import AsyncClient
from kvoffload.errors import ServerError
from kvoffload.keys.prompt_hashes import HashTerms, choose_seed, digest_seed, hash_prompt
from kvoffload.protocol.limits import MAX_BLOCKS
from kvoffload.protocol.survey import NOT_ASKED, FindPrefix, IdentityRead, PrefixFound, ReadIdentity
from kvoffload.types import HASH_BYTES
from kvoffload.web.http_message import HttpError
from kvoffload.web.prefix_question import Prompt, Question

Row = dict[str, Any]
AT_ONCE = 4
"""Questions. Others wait for them."""
ANSWER_S = 5.0
FRESH_S = 1.0
"""For so long the server's identities are taken to be the same."""
MAX_IDENTITIES = 16
"""In one answer."""
_SHOWN_DIGITS = 12


class Prefixes:
    """Answers in one loop, for one domain of the server: that of the client."""

    def __init__(self, client: AsyncClient, token: str) -> None:
        """Takes a client, and the operator's `token` for those who are not the server's user."""
        self._client = client
        self._token = token
        self._asking = asyncio.Semaphore(AT_ONCE)
        self._known: tuple[IdentityRead, ...] = ()
        self._known_of = 0
        """Which server's, by its boot id: another one gives other numbers."""
        self._fresh_until_s = 0.0

    async def answer(self, question: Question) -> list[list[Row]]:
        """For each prompt a row for each identity that is meant. HttpError: too much is asked, or there was no time.
        ServerError: the server refuses, or does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S), self._asking:
                meant = _choose(await self._read_identities(), question)
                found = [await self._find(prompt, question, meant) for prompt in question.prompts]
                if self._client.boot_id != self._known_of:
                    raise ServerError("the cache server was replaced meanwhile", remedy="ask again")
                return found
        except TimeoutError as fault:
            raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, f"there was no answer within {ANSWER_S:g} s") from fault
        except ServerError:
            # One of them may have been forgotten.
            self._fresh_until_s = 0.0
            raise

    async def _read_identities(self) -> tuple[IdentityRead, ...]:
        if self._known_of != self._client.boot_id or time.monotonic() >= self._fresh_until_s:
            boot_id, found = self._client.boot_id, []
            for place in count():
                read = await self._client.look_into(ReadIdentity(place=place, token=self._token))
                assert isinstance(read, IdentityRead)
                if read.fingerprint:
                    found.append(read)
                if place + 1 >= read.total:
                    break
            self._known, self._known_of, self._fresh_until_s = tuple(found), boot_id, time.monotonic() + FRESH_S
        return self._known

    async def _find(self, prompt: Prompt, question: Question, meant: Sequence[IdentityRead]) -> list[Row]:
        chains: dict[tuple[str, int], bytes] = {}
        rows = []
        for read in meant:
            kind = read.hash_algorithm, read.hash_block_size
            try:
                _check_seed(prompt, question, read)
                if kind not in chains:
                    chains[kind] = await _make_chain(prompt, question, read)
            except ValueError as fault:
                rows.append({**_name(read), "hit_tokens": None, "why": str(fault)})
                continue
            message = FindPrefix(
                name_space=read.name_space,
                chain=chains[kind],
                limit=prompt.limit,
                alignment=question.alignment,
                wait_ms=question.wait_ms,
                token=self._token,
            )
            found = await self._client.look_into(message)
            assert isinstance(found, PrefixFound)
            rows.append({**_name(read), **_describe(prompt, read, found)})
        return rows


def _choose(known: Sequence[IdentityRead], question: Question) -> list[IdentityRead]:
    meant = [
        read
        for read in known
        if read.fingerprint.hex().startswith(question.identity) and question.model in ("", _model_of(read))
    ]
    if len(meant) > MAX_IDENTITIES:
        line = f"{len(meant)} identities are meant, {MAX_IDENTITIES} are allowed: say more of `identity`, or `model`"
        raise HttpError(HTTPStatus.BAD_REQUEST, line)
    return meant


def _check_seed(prompt: Prompt, question: Question, read: IdentityRead) -> None:
    """Checks the seed. ValueError: other hashes would come of these tokens than the engine's."""
    if prompt.tokens is None:
        return
    if not read.hash_block_size:
        raise ValueError("no engine has said yet how these blocks are named: ask with hashes")
    seed = choose_seed(read.hash_algorithm, question.seed)
    if read.hash_seed and read.hash_seed != digest_seed(seed):
        raise ValueError("its engines have another seed: say their PYTHONHASHSEED as `seed`, or ask with hashes")


async def _make_chain(prompt: Prompt, question: Question, read: IdentityRead) -> bytes:
    """Names a prompt's blocks. ValueError: it is too long, or an engine alone can make it."""
    if prompt.tokens is None:
        return prompt.hashes
    if len(prompt.tokens) // read.hash_block_size > MAX_BLOCKS:
        raise ValueError(f"{len(prompt.tokens)} tokens make more than {MAX_BLOCKS} hashes")
    terms = HashTerms(
        algorithm=read.hash_algorithm,
        block_size=read.hash_block_size,
        seed=question.seed,
        salt=prompt.salt,
        tenant=prompt.tenant,
    )
    # Long ones take tens of milliseconds, in which others want to be answered.
    return await asyncio.to_thread(hash_prompt, prompt.tokens, terms)


def _describe(prompt: Prompt, read: IdentityRead, found: PrefixFound) -> Row:
    """What each place adds is counted with what stands before it, as a load would take it."""
    reaches: list[int | None] = [found.in_memory]
    reaches += [None if reach == NOT_ASKED else int(reach) for reach in np.frombuffer(found.reaches, "<u8")]
    hashes = len(prompt.hashes) // HASH_BYTES
    return {
        "asked_tokens": hashes * read.hash_block_size if prompt.tokens is None else len(prompt.tokens),
        "hit_tokens": max(reach for reach in reaches if reach is not None),
        "reaches": dict(zip(("memory", *found.tiers), reaches, strict=True)),
    }


def _name(read: IdentityRead) -> Row:
    return {"identity": read.fingerprint.hex()[:_SHOWN_DIGITS], "model": _model_of(read)}


def _model_of(read: IdentityRead) -> str:
    return next((part.value for part in read.identity if part.name == "model"), "")
