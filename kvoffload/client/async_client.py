"""A process's connection to its cache server, for an asyncio loop: `Client` with `await` where that one waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from kvoffload.cache import AcquiredBlocks, Ask, BlockLease, CacheStats, Publication, ReservedSlots
from kvoffload.client.block_calls import FarTerms, HintTerms, PendingAcquire, PendingSlots
from kvoffload.client.connection import Connection
from kvoffload.client.insight import ServerInsight, expect, read_found, read_insight, read_stats
from kvoffload.client.inventory import Heard
from kvoffload.client.lanes import Pending
from kvoffload.client.link import SECOND_NS
from kvoffload.client.prompt_log import PromptNote
from kvoffload.client.terms import ClientTerms, LinkState
from kvoffload.errors import KVOffloadError
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
    Subscribe,
)
from kvoffload.protocol.message import Reply, Request

"""How often answers are looked for while some are awaited, whatever the loop hears from the socket."""


class AsyncClient(Connection):
    """Must be called only from the loop in which `start` is awaited. A cancelled call gives back what it would have
    brought.

    There is no step budget, since a call blocks no other task: calls end by their deadlines.
    """

    def __init__(self, terms: ClientTerms, *, on_event: Callable[[Heard, int], None] | None = None) -> None:
        """`on_event` hears of the events of a subscription; it must not call the client."""
        super().__init__(terms, on_event=on_event)
        self._watched: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._served = asyncio.Event()
        self._finding: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        """Begins to join."""
        self._turn()
        return self

    async def close(self) -> None:
        """Gives back what is held and parts from the server. Holds the loop for 0.2 s at most."""
        if self.link.state is LinkState.CLOSED:
            return
        self._unwatch()
        if self._finding is not None:
            self._finding.cancel()
        self._end()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def wait_until_served(self, timeout_s: float) -> bool:
        """Waits until it is served. False: it is not by then, and `fault` says why."""
        try:
            await asyncio.wait_for(self._served.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # ---- loads and saves ----

    async def acquire(self, ask: Ask, *, far: FarTerms | None = None) -> AcquiredBlocks:
        """Waits, for the acquire deadline at most, and before that for slower tiers if they are wanted."""
        over = asyncio.Event()
        pending = self.engine.start_acquire(ask, time.monotonic_ns(), self._acquire_ns, far=far, on_over=over.set)
        return await self._finish(pending, over)

    async def acquire_entries(self, group: int, hashes: Buffer, *, shards: Sequence[int] = ()) -> AcquiredBlocks:
        over = asyncio.Event()
        pending = self.engine.start_acquire_entries(
            group,
            hashes,
            time.monotonic_ns(),
            self._acquire_ns,
            shards=shards,
            on_over=over.set,
        )
        return await self._finish(pending, over)

    def release(self, lease: BlockLease) -> None:
        self.engine.release(lease, time.monotonic_ns())

    def prefetch(self, ask: Ask) -> None:
        """Sends word to the server that a request with this ask comes soon."""
        self.engine.prefetch(ask, time.monotonic_ns())

    async def hint(self, hint: HintTerms) -> Hinted:
        """Does what a hint says, as far as it can be done. ServerError: the server takes none, or refuses this one."""
        pending = self.engine.start_hint(hint, time.monotonic_ns())
        await self._await_over(pending)
        return expect(pending.answer, Hinted, "hint")

    def take(self, group: int, count: int) -> ReservedSlots:
        """Slots that are held ready, as many as there are."""
        return self.engine.take(group, count, time.monotonic_ns())

    async def reserve(self, group: int, *, count: int = 0, hashes: Buffer | None = None) -> ReservedSlots:
        over = asyncio.Event()
        pending = self.engine.start_reserve(group, time.monotonic_ns(), count=count, hashes=hashes, on_over=over.set)
        await self._finish_slots(pending, over)
        return pending.slots

    def publish(self, publication: Publication) -> bool:
        return self.engine.publish(publication, time.monotonic_ns())

    def abort(self, slots: ReservedSlots) -> None:
        self.engine.abort(slots, time.monotonic_ns())

    def invalidate(self, group: int, hashes: Buffer) -> None:
        self.engine.invalidate(group, hashes, time.monotonic_ns())

    async def stats(self) -> CacheStats:
        """Returns the server's counts, with all that was told before. ServerError: there is no answer."""
        confirmed = self.link.confirm(time.monotonic_ns(), self._call_ns)
        if confirmed is not None:
            await self._await_over(confirmed)
        return read_stats(await self._ask(Stats()))

    def note_prompt(self, note: PromptNote) -> None:
        """Records what became of a prompt, for the server's counts. The server is told later."""
        assert self._prompts is not None, "an observer has no prompts"
        self._prompts.note(note, time.monotonic_ns())

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

    def subscribe(self, name_spaces: Sequence[int] = (), *, with_inventory: bool = False) -> None:
        """Starts a subscription to events, which is renewed after every reconnect. With an inventory, the blocks that
        are there already are told as well, for these namespaces or else for the client's own: `InventoryBegun`,
        `Stored` events among the others, `InventoryEnded`. The inventory is repeated after every loss."""
        message = Subscribe(name_spaces=tuple(name_spaces))
        self.link.subscribe(message, time.monotonic_ns(), with_inventory=with_inventory)

    # ---- inside ----

    async def _ask(self, message: Request) -> ServerMessage | None:
        request = self.link.ask(message, time.monotonic_ns(), self._call_ns)
        await self._await_over(request)
        return request.answer

    async def _await_over(self, request: Pending) -> None:
        over = asyncio.Event()
        request.when_over(over.set)
        self._turn()
        await over.wait()

    async def _finish(self, pending: PendingAcquire, over: asyncio.Event) -> AcquiredBlocks:
        if not pending.is_over:
            self._turn()
            try:
                await over.wait()
                if not pending.is_over:
                    # The slower tiers have done what they could.
                    over.clear()
                    self.engine.go_on(pending, time.monotonic_ns())
                    self._turn()
                    while not pending.is_over:
                        await over.wait()
            except asyncio.CancelledError:
                self.engine.cancel(pending, time.monotonic_ns())
                raise
        assert pending.found is not None
        return pending.found

    async def _finish_slots(self, pending: PendingSlots, over: asyncio.Event) -> None:
        if not pending.is_over:
            self._turn()
            try:
                await over.wait()
            except asyncio.CancelledError:
                self.engine.cancel_slots(pending, time.monotonic_ns())
                raise

    def _turn(self) -> None:
        """Hands over what has come, and sees to it that it is called again."""
        self._unwatch()
        if self.link.state is LinkState.CLOSED:
            return
        now_ns = time.monotonic_ns()
        self.wire.receive_all(self.link, now_ns)
        if not self.wire.needs_path:
            self.link.on_time(now_ns)
        elif self.link.is_dial_due(now_ns) and self._finding is None:
            self._finding = asyncio.get_running_loop().create_task(self._find_server())
        if self._blocks is not None:
            self._blocks.refill(now_ns)
        if self._prompts is not None:
            self._prompts.send(now_ns, self._call_ns)
        if self.link.is_serving:
            self._served.set()
        else:
            self._served.clear()
        loop = asyncio.get_running_loop()
        for file in (self.wire.lifeline_file, self.wire.control_file, self.wire.express_file):
            if file >= 0:
                loop.add_reader(file, self._turn)
                self._watched.append(file)
        wait_s = (self.link.next_ns(now_ns) - now_ns) / SECOND_NS
        for file in self.wire.files_to_write:
            loop.add_writer(file, self._turn)
        self._timer = loop.call_later(max(wait_s, 0), self._turn)

    async def _find_server(self) -> None:
        """A private one is found or started on another thread."""
        find = self.terms.socket
        assert not isinstance(find, Path)
        try:
            holds_memory = self.link.memories.current is not None
            self.wire.path = await asyncio.to_thread(find, holds_memory)
        except KVOffloadError as fault:
            self.link.cannot_dial(time.monotonic_ns(), str(fault))
        finally:
            self._finding = None
        self._turn()

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for file in self._watched:
            loop.remove_reader(file)
            loop.remove_writer(file)
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
