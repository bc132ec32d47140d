"""The server's counts for all readers. The server is asked for them as seldom as the readers allow."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from kvoffload.cache import CacheStats
from kvoffload.client.insight import AS_OPERATOR, ServerInsight
from kvoffload.client.inspector import NO_ENGINES, EngineSurvey, survey_engines
from kvoffload.errors import ServerError
from kvoffload.protocol import AgentSession, AgentSessions, Draining, ListAgentSessions
from kvoffload.web.server_calls import ServerCalls

FRESH_S = 0.1
"""Readers who come within that time are told the same."""
ANSWER_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """`stats` is None where the server does not answer, and `fault` says why."""

    stats: CacheStats | None
    insight: ServerInsight | None = None
    """The server's insight; None although `stats` is not: the server is of an earlier version."""
    survey: EngineSurvey | None = NO_ENGINES
    """The engines that have joined; None: the server tells this to operators only."""
    fault: str = ""


class Watcher:
    """Asks the server for all readers, in one loop. However many ask, the server is asked by one at a time."""

    def __init__(self, calls: ServerCalls) -> None:
        self._calls = calls
        self._asking = asyncio.Lock()
        self._seen = Seen(stats=None, fault="not asked yet")
        self._fresh_until_s = 0.0

    async def look(self) -> Seen:
        async with self._asking:
            if time.monotonic() >= self._fresh_until_s:
                self._seen = await self._ask()
                self._fresh_until_s = time.monotonic() + FRESH_S
            return self._seen

    async def drain(self, token: str) -> Draining:
        """Drains the server. ServerError: the server refuses, or does not answer."""
        return await self._calls.drain(token=token)

    async def clear(self, token: str) -> int:
        """Clears the memory, and returns how many blocks it forgot. ServerError: the server refuses, or does not
        answer."""
        return await self._calls.clear(token=token)

    async def set_quota(self, tenant: str, quota_bytes: int, token: str) -> None:
        """Sets a tenant's quota. ServerError: the server refuses, or does not answer."""
        await self._calls.set_quota(tenant, quota_bytes, token=token)

    async def list_agents(self, token: str) -> AgentSessions:
        """Returns all agents' sessions, the one with the latest turn first. ServerError: the server refuses, or does
        not answer."""
        found: list[AgentSession] = []
        while True:
            answer = await self._calls.look_into(ListAgentSessions(first=len(found), token=token))
            assert isinstance(answer, AgentSessions)
            found += answer.sessions
            if len(found) >= answer.total or not answer.sessions:
                return replace(answer, sessions=tuple(found))

    async def _find_insight(self) -> ServerInsight | None:
        try:
            return await self._calls.insight()
        except ServerError:
            return None

    async def _survey_engines(self) -> EngineSurvey | None:
        """A server that has refused once is not asked again: it counts refusals as errors."""
        if self._seen.survey is None:
            return None
        steps, reply = survey_engines(), None
        while True:
            try:
                message = next(steps) if reply is None else steps.send(reply)
                reply = await self._calls.look_into(message)
            except StopIteration as end:
                survey: EngineSurvey = end.value
                return survey
            except ServerError as fault:
                return None if fault.remedy == AS_OPERATOR else NO_ENGINES

    async def _ask(self) -> Seen:
        try:
            async with asyncio.timeout(ANSWER_S):
                stats = await self._calls.stats()
                insight = await self._find_insight()
                return Seen(stats=stats, insight=insight, survey=await self._survey_engines())
        except ServerError as fault:
            return Seen(stats=None, fault=self._calls.client.fault or fault.message)
        except TimeoutError:
            return Seen(stats=None, fault=self._calls.client.fault or f"no answer within {ANSWER_S:g} s")
