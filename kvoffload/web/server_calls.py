"""The questions that the pages ask their cache server, awaited in an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib

from kvoffload.cache import CacheStats
from kvoffload.client import Client
from kvoffload.client.insight import ServerInsight, expect, read_found, read_insight, read_stats
from kvoffload.protocol import Clear, ClearedBlocks, Done, Drain, Draining, Inspect, ServerMessage, SetQuota, Stats
from kvoffload.protocol.message import Reply, Request


class ServerCalls:
    """Belongs to one loop. Each call waits for the client's call deadline at most. ServerError: the server refuses, or
    there is no answer."""

    def __init__(self, client: Client) -> None:
        """Takes an observer's client. The caller starts and closes it."""
        self.client = client

    async def stats(self) -> CacheStats:
        return read_stats(await self._ask(Stats()))

    async def insight(self) -> ServerInsight:
        """Returns the outcomes of prompts and the timings of calls."""
        return read_insight(await self._ask(Inspect()))

    async def clear(self, *, token: str = "") -> int:
        """Makes the memory forget all blocks and returns how many there were."""
        return expect(await self._ask(Clear(token=token)), ClearedBlocks, "clear").blocks

    async def set_quota(self, tenant: str, quota_bytes: int, *, token: str = "") -> None:
        """Sets a tenant's quota until the server ends."""
        message = SetQuota(tenant=tenant, quota_bytes=quota_bytes, token=token)
        expect(await self._ask(message), Done, "quota")

    async def look_into(self, message: Request) -> Reply:
        """Asks a question of `kvoffload.protocol.survey` and returns its reply."""
        return read_found(message, await self._ask(message))

    async def drain(self, *, token: str = "") -> Draining:
        """The server takes nothing new and ends."""
        return expect(await self._ask(Drain(token=token)), Draining, "drain")

    async def _ask(self, message: Request) -> ServerMessage | None:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[ServerMessage | None] = loop.create_future()

        def tell(answer: ServerMessage | None) -> None:
            if not answered.done():  # It may have been cancelled.
                answered.set_result(answer)

        def pass_on(answer: ServerMessage | None) -> None:
            # A loop that has ended hears nothing.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, answer)

        self.client.start_ask(message, pass_on)
        return await answered
