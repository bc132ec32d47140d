"""A process's calls to its cache server: look-ups in mapped memory, messages for all else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from kvoffload.cache import AcquiredBlocks, Ask, BlockLease, CacheStats, Publication, ReservedSlots
from kvoffload.client.block_calls import HintSettings, PendingAcquire, TierWait
from kvoffload.client.connection import Connection
from kvoffload.client.insight import ServerInsight, expect, read_found, read_insight, read_stats
from kvoffload.client.inventory import Heard
from kvoffload.client.lanes import Backoff, Pending
from kvoffload.client.memories import MappedBlocks
from kvoffload.client.prompt_log import PromptNote
from kvoffload.client.settings import SECOND_NS, ClientSettings, LinkState
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

_SLICE_S = 0.001
"""How long a waiting call sleeps at most before it looks again."""
_RETURN_NS = 400_000
"""Part of a step's budget that is kept for the return from a wait."""
_LOOK_S = 0.0002
"""The end of a step's budget, in which a wait looks and does not sleep: a sleep would end when the system lets it."""
_LATE_NS = 2_000_000
"""A wait that ends so long after the step's budget shows that this thread does not get a processor when it wakes."""


class Client(MappedBlocks):
    """Safe to call from any thread of the process that made it; not in a forked child.

    A call whose docstring says that it waits does so within a bound, and never beyond what is left of the step's budget
    between two `begin_step`. All other calls read mapped memory, send a message, or note what was heard, and do not
    wait. Without a server every look-up is a miss.
    """

    def __init__(self, settings: ClientSettings, *, on_event: Callable[[Heard, int], None] | None = None) -> None:
        """`on_event` hears of the events of a subscription, mostly on the client's own thread; it must not call the
        client, which waits for it."""
        self.settings = settings
        self.connection = connection = Connection(settings, on_event=on_event)
        groups = () if settings.register is None else settings.register.groups
        super().__init__(connection.link.memories, groups=len(groups))
        self.lock, self.wire, self.link = connection.lock, connection.wire, connection.link
        self.blocks = connection.blocks
        """The calls about blocks, for which the caller holds the lock."""
        budget_ns = int(settings.step_budget_s * SECOND_NS)
        self._step_ns = max(budget_ns - _RETURN_NS, budget_ns // 2)
        self.budget_ns = -1
        """Nanoseconds left of the step's budget; -1: there are no steps."""
        self._waits_again_ns = 0
        """From when on `wait_for` waits again, after a wait that ended late."""
        self._pauses = Backoff(SECOND_NS, 16 * SECOND_NS, Random())

    def start(self) -> Self:
        """Begins to join. Only `wait_until_served` waits until that is done."""
        self.connection.start()
        return self

    def close(self) -> None:
        """Gives back what is held and parts from the server: no copy runs any more. Waits for 1.2 s at most."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_until_served(self, timeout_s: float) -> bool:
        """Waits until it is served. False: it is not by then, and `fault` says why."""
        with self.connection.turned:
            return self.connection.turned.wait_for(lambda: self.link.is_serving, timeout_s)

    # ---- how it stands ----

    @property
    def is_served(self) -> bool:
        """There is a server, and it answers in time."""
        return self.link.is_serving

    @property
    def fault(self) -> str:
        """Why it is not served, in one line; empty: it is."""
        if self.link.state is LinkState.SERVING and not self.link.is_serving:
            return "the server has not answered in time and is asked until it answers again"
        return self.link.fault

    @property
    def warnings(self) -> int:
        """How many the servers' logs had since this began, as far as they told."""
        return self.link.warnings.count

    @property
    def has_tiers(self) -> bool:
        """Whether the server has slower tiers, for which an acquire may wait."""
        return self.link.has("promote")

    def most_slots(self, group: int) -> int:
        """Returns how many slots are held ready at best: a share of the pool, if that is less than what is wanted."""
        return self.blocks.most_slots(group)

    # ---- loads ----

    def begin_step(self) -> None:
        """Starts a new step: the calls that follow share a full budget for waiting."""
        self.budget_ns = self._step_ns

    def start_acquire(self, ask: Ask, *, far: TierWait | None = None, wait_s: float = 0.0) -> PendingAcquire:
        """Asks for an `acquire`, which the caller polls. It is a miss if the answer takes longer than the acquire
        deadline and than `wait_s`. With `far`, it waits for slower tiers first."""
        wait_ns = max(self.settings.link.acquire_ns, int(wait_s * SECOND_NS))
        with self.lock:
            return self.blocks.start_acquire(ask, time.monotonic_ns(), wait_ns, far=far)

    def poll(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        """Returns the answer. None: there is none yet."""
        if pending.found is None:
            with self.lock:
                now_ns = time.monotonic_ns()
                self.connection.look(now_ns)
                self.blocks.go_on(pending, now_ns)
        return pending.found

    def wait_for(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        """Does the same as `poll`, but waits: for what is left of the step's budget at most. While the server is late,
        and for some seconds after a wait that took too long because the machine is busy, it does not wait."""
        if pending.found is None and self.link.is_prompt and time.monotonic_ns() >= self._waits_again_ns:
            self._wait(lambda: self.poll(pending) is not None)
        return pending.found

    def acquire(self, ask: Ask, *, far: TierWait | None = None) -> AcquiredBlocks:
        """Waits, for the acquire deadline at most, and before that for slower tiers if they are wanted."""
        return self._finish(self.start_acquire(ask, far=far))

    def acquire_entries(self, group: int, hashes: Buffer, *, shards: Sequence[int] = ()) -> AcquiredBlocks:
        """Waits, for the acquire deadline at most."""
        with self.lock:
            pending = self.blocks.start_acquire_entries(
                group, hashes, time.monotonic_ns(), self.settings.link.acquire_ns, shards=shards
            )
        return self._finish(pending)

    def cancel(self, pending: PendingAcquire) -> None:
        """Ends a call whose answer is not wanted any more. A lease that it brought, or still brings, is given back."""
        with self.lock:
            self.blocks.cancel(pending, time.monotonic_ns())

    def release(self, lease: BlockLease) -> None:
        with self.lock:
            self.blocks.release(lease, time.monotonic_ns())

    def prefetch(self, ask: Ask) -> None:
        """Sends word to the server that a request with this ask comes soon."""
        with self.lock:
            self.blocks.prefetch(ask, time.monotonic_ns())

    def start_hint(self, hint: HintSettings, *, on_answer: Callable[[Hinted | None], None] | None = None) -> Pending:
        """Sends a hint without waiting: `is_over` and `answer` of the result say what came of it.

        `on_answer` is called once, on any thread of this process. It gets None if the server takes no hints, refuses
        this one, or did not answer in time. It must not call the client.
        """
        with self.lock:
            pending = self.blocks.start_hint(hint, time.monotonic_ns())
            if on_answer is not None:
                pending.when_over(lambda: on_answer(pending.answer if isinstance(pending.answer, Hinted) else None))
        return pending

    # ---- saves ----

    def ready_slots(self) -> list[int]:
        """Returns how many slots `take` would give now, by group; where they run low, more are asked for."""
        with self.lock:
            now_ns = time.monotonic_ns()
            if self.blocks.is_low:
                self.connection.look(now_ns)
            return self.blocks.ready_slots(now_ns)

    def take(self, group: int, count: int) -> ReservedSlots:
        """Slots that are held ready, as many as there are."""
        with self.lock:
            now_ns = time.monotonic_ns()
            self.connection.look(now_ns)
            return self.blocks.take(group, count, now_ns)

    def publish(self, publication: Publication) -> bool:
        now_ns = time.monotonic_ns()
        with self.lock:
            is_told = self.blocks.publish(publication, now_ns)
            if is_told and self.connection.prompts is not None:
                self.connection.prompts.note_saved(publication, now_ns)
            return is_told

    def abort(self, slots: ReservedSlots) -> None:
        with self.lock:
            self.blocks.abort(slots, time.monotonic_ns())

    def invalidate(self, group: int, hashes: Buffer) -> None:
        with self.lock:
            self.blocks.invalidate(group, hashes, time.monotonic_ns())

    def note_prompt(self, note: PromptNote) -> None:
        """Records what became of a prompt, for the server's counts. Another thread tells the server later."""
        with self.lock:
            assert self.connection.prompts is not None, "an observer has no prompts"
            self.connection.prompts.note(note, time.monotonic_ns())

    def reserve(self, group: int, *, count: int = 0, hashes: Buffer | None = None) -> ReservedSlots:
        """Waits, for the call deadline at most."""
        with self.lock:
            pending = self.blocks.start_reserve(group, time.monotonic_ns(), count=count, hashes=hashes)
        self._wait(lambda: pending.is_over)
        if not pending.is_over:
            # The step's budget is spent.
            with self.lock:
                self.blocks.cancel_slots(pending, time.monotonic_ns())
        return pending.slots

    # ---- memories and events ----

    def retire(self, memory_id: int) -> None:
        """No process of the engine uses this former memory any more."""
        with self.lock:
            self.link.memories.retire(memory_id)

    def subscribe(self, name_spaces: Sequence[int] = (), *, with_inventory: bool = False) -> None:
        """Starts a subscription to events, which is renewed after every reconnect. With an inventory, the blocks that
        are there already are told as well, for these namespaces or else for the client's own: `InventoryBegun`,
        `Stored` events among the others, `InventoryEnded`. The inventory is repeated after every loss."""
        with self.lock:
            message = Subscribe(name_spaces=tuple(name_spaces))
            self.link.subscribe(message, time.monotonic_ns(), with_inventory=with_inventory)

    def take_inventory(self) -> bool:
        """The inventory of a subscription follows once more. False: there is none."""
        with self.lock:
            return self.link.begin_inventory(time.monotonic_ns())

    # ---- administration ----

    def stats(self) -> CacheStats:
        """Returns the server's counts, with all that was told before. Waits, for the call deadline at most.
        ServerError: there is no answer."""
        with self.lock:
            confirmed = self.link.confirm(time.monotonic_ns(), self.settings.link.call_ns)
        self._wait(lambda: confirmed is None or confirmed.is_over)
        return read_stats(self._ask(Stats()))

    def insight(self) -> ServerInsight:
        """Returns the outcomes of prompts and the timings of calls. Waits like `stats`."""
        return read_insight(self._ask(Inspect()))

    def clear(self, *, token: str = "") -> int:
        """Makes the memory forget all blocks and returns how many there were. Waits like `stats`; ServerError: it
        refuses."""
        return expect(self._ask(Clear(token=token)), ClearedBlocks, "clear").blocks

    def set_quota(self, tenant: str, quota_bytes: int, *, token: str = "") -> None:
        """Sets a tenant's quota until the server ends. Waits like `stats`; ServerError: it refuses."""
        message = SetQuota(tenant=tenant, quota_bytes=quota_bytes, token=token)
        expect(self._ask(message), Done, "quota")

    def look_into(self, message: Request) -> Reply:
        """Asks a question of `kvoffload.protocol.survey` for its reply. Waits like `stats`; ServerError: it refuses."""
        return read_found(message, self._ask(message))

    def drain(self, *, token: str = "", deadline_ms: int = 0) -> Draining:
        """The server takes nothing new and ends. Waits like `stats`; ServerError: it refuses."""
        return expect(self._ask(Drain(token=token, deadline_ms=deadline_ms)), Draining, "drain")

    def start_ask(self, message: Request, on_answer: Callable[[ServerMessage | None], None]) -> None:
        """Sends a question and does not wait. `on_answer` is called once, on any thread of this process; with None if
        there is no answer in time. It must not call the client."""
        with self.lock:
            pending = self.link.ask(message, time.monotonic_ns(), self.settings.link.call_ns)
            pending.when_over(lambda: on_answer(pending.answer))
            if not (pending.is_over or self.connection.hears_answers):
                self.connection.wake()

    # ---- inside ----

    def _finish(self, pending: PendingAcquire) -> AcquiredBlocks:
        self._wait(lambda: self.poll(pending) is not None)
        if pending.found is None:
            # The step's budget is spent.
            self.cancel(pending)
        assert pending.found is not None
        return pending.found

    def _ask(self, message: Request) -> ServerMessage | None:
        with self.lock:
            pending = self.link.ask(message, time.monotonic_ns(), self.settings.link.call_ns)
        self._wait(lambda: pending.is_over)
        if not pending.is_over:
            pending.is_wanted = False
        return pending.answer

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Waits until the call is over, at its deadline at the latest, or until the step's budget is spent."""
        start_ns = now_ns = time.monotonic_ns()
        budget_ns = self.budget_ns
        while not is_over() and (budget_ns < 0 or now_ns - start_ns < budget_ns):
            # The link ends unanswered calls at their deadlines, so an interrupted or useless sleep does no harm.
            left_s = _SLICE_S if budget_ns < 0 else (budget_ns - (now_ns - start_ns)) / SECOND_NS
            if left_s > _LOOK_S and budget_ns >= 0:
                left_s -= _LOOK_S
            self.wire.await_answers(min(left_s, _SLICE_S), with_control=self.link.lanes.awaits_control)
            now_ns = time.monotonic_ns()
            with self.lock:
                self.connection.look(now_ns)
        if budget_ns >= 0:
            left_ns = budget_ns - (now_ns - start_ns)
            self.budget_ns = max(left_ns, 0)
            if left_ns > -_LATE_NS:
                self._pauses.reset()
            else:
                self._waits_again_ns = now_ns + self._pauses.next_ns()
