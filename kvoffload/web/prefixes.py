"""Answers how much of a prompt is there, by asking the cache server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import numpy as np

from kvoffload.errors import ServerError
from kvoffload.protocol.survey import NOT_ASKED, FindPrefix, IdentityRead, PrefixFound
from kvoffload.types import HASH_BYTES
from kvoffload.web.http_message import HttpError
from kvoffload.web.prefix_question import Prompt, Question
from kvoffload.web.prompt_chains import KnownIdentities, PromptChains, Row, name_identity
from kvoffload.web.server_calls import ServerCalls

AT_ONCE = 4
"""Questions. Others wait for them."""
ANSWER_S = 5.0


@dataclass(frozen=True)
class FoundPrefixes:
    """The answer to a question."""

    prompts: Sequence[Sequence[Row]]
    """For each prompt a row for each identity."""
    is_partial: bool
    """Whether more identities are meant than were looked at."""


class Prefixes:
    """Answers in one loop, for one domain of the server: that of the client."""

    def __init__(self, calls: ServerCalls, token: str) -> None:
        """Takes the calls to the server, and the operator's `token` for those who are not the server's user."""
        self._calls = calls
        self._token = token
        self._asking = asyncio.Semaphore(AT_ONCE)
        self._identities = KnownIdentities(calls, token)

    async def answer(self, question: Question) -> FoundPrefixes:
        """Looks for all prompts. HttpError: there was no time. ServerError: the server refuses, or does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S), self._asking:
                meant = await self._identities.choose(question.meant)
                found = [await self._find(prompt, question, meant.reads) for prompt in question.prompts]
                self._identities.check_same()
                return FoundPrefixes(found, meant.is_partial)
        except TimeoutError as fault:
            raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, f"there was no answer within {ANSWER_S:g} s") from fault
        except ServerError:
            # One of them may have been forgotten.
            self._identities.forget()
            raise

    async def _find(self, prompt: Prompt, question: Question, meant: Sequence[IdentityRead]) -> list[Row]:
        chains = PromptChains(prompt, question.meant)
        rows = []
        for read in meant:
            try:
                chain = await chains.make(read)
            except ValueError as fault:
                rows.append({**name_identity(read), "hit_tokens": None, "why": str(fault)})
                continue
            message = FindPrefix(
                name_space=read.name_space,
                chain=chain,
                limit=prompt.limit,
                alignment=question.alignment,
                wait_ms=question.wait_ms,
                token=self._token,
            )
            found = await self._calls.look_into(message)
            assert isinstance(found, PrefixFound)
            rows.append({**name_identity(read), **_describe(prompt, read, found)})
        return rows


def _describe(prompt: Prompt, read: IdentityRead, found: PrefixFound) -> Row:
    """Describes one prompt's hit. A place's reach includes the places before it, as a load would take them."""
    reaches: list[int | None] = [found.in_memory]
    reaches += [None if reach == NOT_ASKED else int(reach) for reach in np.frombuffer(found.reaches, "<u8")]
    hashes = len(prompt.hashes) // HASH_BYTES
    return {
        "block_tokens": read.hash_block_size,
        "asked_tokens": hashes * read.hash_block_size if prompt.tokens is None else len(prompt.tokens),
        "hit_tokens": max(reach for reach in reaches if reach is not None),
        "reaches": dict(zip(("memory", *found.tiers), reaches, strict=True)),
    }
