"""A process's connection to its cache server, for an asyncio loop: `Client` with `await` where that one waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from kvoffload.cache import AcquiredBlocks, Ask, CacheStats, ReservedSlots
from kvoffload.client.block_calls import HintSettings, PendingAcquire, TierWait
from kvoffload.client.client_calls import ClientCalls
from kvoffload.client.connection import Connection
from kvoffload.client.insight import ServerInsight, expect, read_found, read_insight, read_stats
from kvoffload.client.inventory import Heard
from kvoffload.client.settings import ClientSettings
from kvoffload.protocol import (
    Clear,
    ClearedBlocks,
    Done,
    Drain,
    Draining,
    Hinted,
    Inspect,
    ServerMessage,
    SetQuota,
    Stats,
)
from kvoffload.protocol.message import Reply, Request


class AsyncClient(ClientCalls):
    """Must be called only from the loop in which `start` is awaited. A cancelled call gives back what it would have
    brought.

    There is no step budget, since a call blocks no other task: calls end by their deadlines.
    """

    def __init__(self, settings: ClientSettings, *, on_event: Callable[[Heard, int], None] | None = None) -> None:
        """`on_event` hears of the events of a subscription, in the loop."""
        self._turns = _Turns()
        hear = None if on_event is None else partial(self._turns.call, on_event)
        super().__init__(settings, Connection(settings, on_event=hear, on_turn=self._turns.tell))

    async def start(self) -> Self:
        """Begins to join."""
        self._turns.enter_loop()
        self.connection.start()
        return self

    async def close(self) -> None:
        """Gives back what is held and parts from the server. Holds the loop for 1.2 s at most."""
        self.connection.close()
        self._turns.end()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def wait_until_served(self, timeout_s: float) -> bool:
        """Waits until it is served. False: it is not by then, and `fault` says why."""
        try:
            await asyncio.wait_for(self._until(lambda: self.link.is_serving), timeout_s)
        except TimeoutError:
            return False
        return True

    # ---- loads and saves ----

    async def acquire(self, ask: Ask, *, far: TierWait | None = None) -> AcquiredBlocks:
        """Waits, for the acquire deadline at most, and before that for slower tiers if they are wanted."""
        return await self._finish(self.start_acquire(ask, far=far))

    async def acquire_entries(self, group: int, hashes: Buffer, *, shards: Sequence[int] = ()) -> AcquiredBlocks:
        with self.lock:
            pending = self.blocks.start_acquire_entries(
                group, hashes, time.monotonic_ns(), self.settings.link.acquire_ns, shards=shards
            )
        return await self._finish(pending)

    async def hint(self, hint: HintSettings) -> Hinted:
        """Does what a hint says, as far as it can be done. ServerError: the server takes none, or refuses this one."""
        pending = self.start_hint(hint)
        await self._until(lambda: pending.is_over)
        return expect(pending.answer, Hinted, "hint")

    async def reserve(self, group: int, *, count: int = 0, hashes: Buffer | None = None) -> ReservedSlots:
        with self.lock:
            pending = self.blocks.start_reserve(group, time.monotonic_ns(), count=count, hashes=hashes)
        try:
            await self._until(lambda: pending.is_over)
        except asyncio.CancelledError:
            with self.lock:
                self.blocks.cancel_slots(pending, time.monotonic_ns())
            raise
        return pending.slots

    # ---- administration ----

    async def stats(self) -> CacheStats:
        """Returns the server's counts, with all that was told before. ServerError: there is no answer."""
        confirmed = self.connection.confirm()
        await self._until(lambda: confirmed is None or confirmed.is_over)
        return read_stats(await self._ask(Stats()))

    async def insight(self) -> ServerInsight:
        """Returns the outcomes of prompts and the timings of calls. ServerError: there is no answer."""
        return read_insight(await self._ask(Inspect()))

    async def clear(self, *, token: str = "") -> int:
        """Makes the memory forget all blocks and returns how many there were. ServerError: the server refuses."""
        return expect(await self._ask(Clear(token=token)), ClearedBlocks, "clear").blocks

    async def set_quota(self, tenant: str, quota_bytes: int, *, token: str = "") -> None:
        """Sets a tenant's quota until the server ends. ServerError: it refuses."""
        message = SetQuota(tenant=tenant, quota_bytes=quota_bytes, token=token)
        expect(await self._ask(message), Done, "quota")

    async def look_into(self, message: Request) -> Reply:
        """Asks a question of `kvoffload.protocol.survey` and returns its reply. ServerError: it refuses."""
        return read_found(message, await self._ask(message))

    async def drain(self, *, token: str = "", deadline_ms: int = 0) -> Draining:
        """The server takes nothing new and ends. ServerError: it refuses."""
        return expect(await self._ask(Drain(token=token, deadline_ms=deadline_ms)), Draining, "drain")

    # ---- inside ----

    async def _ask(self, message: Request) -> ServerMessage | None:
        request = self.connection.ask(message)
        await self._until(lambda: request.is_over)
        return request.answer

    async def _finish(self, pending: PendingAcquire) -> AcquiredBlocks:
        try:
            await self._until(lambda: self._has_found(pending))
        except asyncio.CancelledError:
            self.cancel(pending)
            raise
        assert pending.found is not None
        return pending.found

    def _has_found(self, pending: PendingAcquire) -> bool:
        if pending.then is not None and not pending.is_over:
            with self.lock:
                self.blocks.go_on(pending, time.monotonic_ns())
            # The memory may have been asked, with a deadline of its own.
            self.connection.wake_in_time()
        return pending.is_over

    async def _until(self, is_over: Callable[[], bool]) -> None:
        """Waits until it is so."""
        if not is_over():
            self.connection.wake_in_time()
        while not is_over():
            await self._turns.wait()


class _Turns:
    """The turns of a connection's thread, for which the tasks of a loop wait."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turned = asyncio.Event()
        """Set at the next turn, which may have ended calls. Each turn has its own."""

    def enter_loop(self) -> None:
        """Calls are made in the running loop from now on, and in no other one."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()

    def call(self, act: Callable[..., None], *arguments: object) -> None:
        """Calls `act` in the loop. Any thread may do that."""
        # A loop that has ended without closing its client hears nothing.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(act, *arguments)

    def tell(self) -> None:
        """Ends a turn. Any thread may do that."""
        self.call(self.end)

    def end(self) -> None:
        """Ends a turn, in the loop: all tasks that wait look at their calls."""
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

    async def wait(self) -> None:
        """Waits for the end of a turn."""
        await self._turned.wait()
