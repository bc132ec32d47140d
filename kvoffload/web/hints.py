"""Does what hints over HTTP say, by asking the cache server as an operator."""

from __future__ import annotations

import asyncio
from collections import Counter
from http import HTTPStatus

from kvoffload.errors import ServerError
from kvoffload.protocol import Hint, HintAction, Hinted
from kvoffload.protocol.survey import IdentityRead
from kvoffload.web.hint_envelope import Action, Envelope, IgnoredAction
from kvoffload.web.http_message import HttpError
from kvoffload.web.prefix_question import NO_LIMIT
from kvoffload.web.prompt_chains import MAX_IDENTITIES, KnownIdentities, PromptChains, Row, name_identity
from kvoffload.web.server_calls import ServerCalls

AT_ONCE = 4
"""Envelopes. Others wait for them."""
ANSWER_S = 5.0


class Hints:
    """Belongs to one loop; for one domain of the server, that of the client."""

    def __init__(self, calls: ServerCalls, token: str) -> None:
        """Takes the calls to the server, and the operator's `token` for those who are not the server's user."""
        self._calls = calls
        self._token = token
        self._doing = asyncio.Semaphore(AT_ONCE)
        self._identities = KnownIdentities(calls, token)
        self.ignored: Counter[str] = Counter()
        """Actions that are not known here, by why."""

    async def do(self, envelope: Envelope) -> Row:
        """Does one action after the other, and answers for each. HttpError: there was no time for all. ServerError: the
        server refuses, or does not answer; some may have been done."""
        try:
            async with asyncio.timeout(ANSWER_S), self._doing:
                actions = [await self._do_one(action) for action in envelope.actions]
        except TimeoutError as fault:
            raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, f"not all was done within {ANSWER_S:g} s") from fault
        except ServerError:
            self._identities.forget()
            raise
        return {"message_id": envelope.message_id, "actions": actions}

    async def _do_one(self, action: Action | IgnoredAction) -> Row:
        told = {"action_id": action.name, "action_type": action.kind}
        if isinstance(action, IgnoredAction):
            self.ignored[action.why] += 1
            return {**told, "ignored": action.why}
        chosen = await self._identities.choose(action.meant)
        if chosen.is_partial:
            line = f"more than {MAX_IDENTITIES} identities are meant: say more of `identity`, or `model`"
            raise HttpError(HTTPStatus.BAD_REQUEST, line)
        chains = None if action.prompt is None else PromptChains(action.prompt, action.meant)
        return {**told, "identities": [await self._hint(action, chains, read) for read in chosen.reads]}

    async def _hint(self, action: Action, chains: PromptChains | None, read: IdentityRead) -> Row:
        try:
            chain = b"" if chains is None else await chains.make(read)
        except ValueError as fault:
            return {**name_identity(read), "outcome": None, "why": str(fault)}
        self._identities.check_same()
        message = Hint(
            name_space=read.name_space,
            action=action.does,
            chain=chain,
            limit=NO_LIMIT if action.prompt is None else action.prompt.limit,
            session=action.session,
            ttl_ms=action.ttl_ms,
            priority=action.priority,
            token=self._token,
        )
        # Of a session alone it would be another prefix than the one that is meant.
        is_none = action.prompt is not None and action.does in (HintAction.RETAIN, HintAction.HAND_OVER)
        if not chain and (is_none or not action.session):
            return {**name_identity(read), "outcome": "nothing", "tokens": 0, "ttl_s": 0.0}
        found = await self._calls.look_into(message)
        assert isinstance(found, Hinted)
        return {
            **name_identity(read),
            "outcome": found.outcome.name.lower(),
            "tokens": found.tokens,
            "ttl_s": found.ttl_ms / 1000,
        }
