"""A process's connection to its cache server, for threads: look-ups in mapped memory, messages for all else."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from kvoffload.cache import AcquiredBlocks, Ask, BlockLease, CacheStats, Publication, ReservedSlots
from kvoffload.client.block_calls import FarTerms, HintTerms, PendingAcquire
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

_SLICE_S = 0.001
"""How long a waiting call sleeps at most before it looks again."""
_RETURN_NS = 400_000
"""Part of a step's budget that is kept for the return from a wait."""
_LOOK_S = 0.0002
"""The end of a step's budget, in which a wait looks and does not sleep: a sleep would end when the system lets it."""
_KEEPER_S = 0.2
_ANSWERS_S = 0.02
"""How often the client's thread looks for answers while no caller waits for them, in seconds."""


class Client(Connection):
    """Safe to call from any thread of the process that made it; not in a forked child.

    A call whose docstring says that it waits does so within a bound, and never beyond what is left of the step's budget
    between two `begin_step`. All other calls only send, and do not wait. Without a server every look-up is a miss; the
    client's own thread keeps trying to join one.
    """

    def __init__(self, terms: ClientTerms, *, on_event: Callable[[Heard, int], None] | None = None) -> None:
        """`on_event` hears of the events of a subscription, mostly on the client's own thread; it must not call the
        client, which waits for it."""
        super().__init__(terms, on_event=on_event)
        self.lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition(self.lock)
        self._keeper = threading.Thread(target=self._keep, name="kvoffload-client", daemon=True)
        budget_ns = int(terms.step_budget_s * SECOND_NS)
        self._step_ns = max(budget_ns - _RETURN_NS, budget_ns // 2)
        self.budget_ns = -1
        """Nanoseconds left of the step's budget; -1: there are no steps."""
        self._is_closing = False
        self.wire.on_unsent = lambda: os.eventfd_write(self._wake, 1)

    def start(self) -> Self:
        """Begins to join. Only `wait_until_served` waits until that is done."""
        self._keeper.start()
        return self

    def close(self) -> None:
        """Gives back what is held and parts from the server: no copy runs any more. Waits for 0.4 s at most."""
        with self.lock:
            if self._is_closing:
                return
            self._is_closing = True
        os.eventfd_write(self._wake, 1)
        if self._keeper.ident is not None:
            # It may be starting a server; then it ends by itself.
            self._keeper.join(_KEEPER_S)
        with self.lock:
            self._end()
        if not self._keeper.is_alive():
            os.close(self._wake)

    def __enter__(self) -> Self:
        return self if self._keeper.ident is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_until_served(self, timeout_s: float) -> bool:
        """Waits until it is served. False: it is not by then, and `fault` says why."""
        with self._changed:
            return self._changed.wait_for(lambda: self.link.is_serving, timeout_s)

    @property
    def is_woken(self) -> bool:
        """Its thread was told to look, and has not looked yet."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        return bool(poller.poll(0))

    def retire(self, memory_id: int) -> None:
        """No process of the engine uses this former memory any more."""
        with self.lock:
            self.link.memories.retire(memory_id)

    # ---- loads ----

    def begin_step(self) -> None:
        """Starts a new step: the calls that follow share a full budget for waiting."""
        self.budget_ns = self._step_ns

    def start_acquire(self, ask: Ask, *, far: FarTerms | None = None, wait_s: float = 0.0) -> PendingAcquire:
        """Asks for an `acquire`, which the caller polls. It is a miss if the answer takes longer than the acquire
        deadline and than `wait_s`. With `far`, it waits for slower tiers first."""
        wait_ns = max(self._acquire_ns, int(wait_s * SECOND_NS))
        with self.lock:
            return self.engine.start_acquire(ask, time.monotonic_ns(), wait_ns, far=far)

    def poll(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        """Returns the answer. None: there is none yet."""
        if pending.found is None:
            with self.lock:
                now_ns = time.monotonic_ns()
                self._look(now_ns)
                self.engine.go_on(pending, now_ns)
        return pending.found

    def wait_for(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        """Does the same as `poll`, but waits: for what is left of the step's budget at most."""
        if pending.found is None:
            self._wait(lambda: self.poll(pending) is not None)
        return pending.found

    def cancel(self, pending: PendingAcquire) -> None:
        """Ends a call whose answer is not wanted any more. A lease that it brought, or still brings, is given back."""
        with self.lock:
            self.engine.cancel(pending, time.monotonic_ns())

    def acquire(self, ask: Ask, *, far: FarTerms | None = None) -> AcquiredBlocks:
        """Waits, for the acquire deadline at most, and before that for slower tiers if they are wanted."""
        return self._finish(self.start_acquire(ask, far=far))

    def acquire_entries(self, group: int, hashes: Buffer, *, shards: Sequence[int] = ()) -> AcquiredBlocks:
        """Waits, for the acquire deadline at most."""
        with self.lock:
            pending = self.engine.start_acquire_entries(
                group, hashes, time.monotonic_ns(), self._acquire_ns, shards=shards
            )
        return self._finish(pending)

    def release(self, lease: BlockLease) -> None:
        with self.lock:
            self.engine.release(lease, time.monotonic_ns())

    def prefetch(self, ask: Ask) -> None:
        """Sends word to the server that a request with this ask comes soon."""
        with self.lock:
            self.engine.prefetch(ask, time.monotonic_ns())

    def start_hint(self, hint: HintTerms, *, on_answer: Callable[[Hinted | None], None] | None = None) -> Pending:
        """Sends a hint without waiting: `is_over` and `answer` of the result say what came of it.

        `on_answer` is called once, on any thread of this process. It gets None if the server takes no hints, refuses
        this one, or did not answer in time. It must not call the client.
        """
        with self.lock:
            pending = self.engine.start_hint(hint, time.monotonic_ns())
            if on_answer is not None:
                pending.when_over(lambda: on_answer(pending.answer if isinstance(pending.answer, Hinted) else None))
        return pending

    # ---- saves ----

    def ready_slots(self) -> list[int]:
        """Returns how many slots `take` would give now, by group; where they run low, more are asked for."""
        with self.lock:
            now_ns = time.monotonic_ns()
            if self.engine.is_low:
                self._look(now_ns)
            return self.engine.ready_slots(now_ns)

    def take(self, group: int, count: int) -> ReservedSlots:
        """Slots that are held ready, as many as there are."""
        with self.lock:
            now_ns = time.monotonic_ns()
            self._look(now_ns)
            return self.engine.take(group, count, now_ns)

    def reserve(self, group: int, *, count: int = 0, hashes: Buffer | None = None) -> ReservedSlots:
        """Waits, for the call deadline at most."""
        with self.lock:
            pending = self.engine.start_reserve(group, time.monotonic_ns(), count=count, hashes=hashes)
        self._wait(lambda: pending.is_over)
        return pending.slots

    def publish(self, publication: Publication) -> bool:
        with self.lock:
            return self.engine.publish(publication, time.monotonic_ns())

    def abort(self, slots: ReservedSlots) -> None:
        with self.lock:
            self.engine.abort(slots, time.monotonic_ns())

    def invalidate(self, group: int, hashes: Buffer) -> None:
        with self.lock:
            self.engine.invalidate(group, hashes, time.monotonic_ns())

    def note_prompt(self, note: PromptNote) -> None:
        """Records what became of a prompt, for the server's counts. Another thread tells the server later."""
        with self.lock:
            assert self._prompts is not None, "an observer has no prompts"
            self._prompts.note(note, time.monotonic_ns())

    # ---- administration ----

    def stats(self) -> CacheStats:
        """Returns the server's counts, with all that was told before. Waits, for the call deadline at most.
        ServerError: there is no answer."""
        with self.lock:
            confirmed = self.link.confirm(time.monotonic_ns(), self._call_ns)
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
            pending = self.link.ask(message, time.monotonic_ns(), self._call_ns)
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
            self.wire.await_answers(min(left_s, _SLICE_S), with_control=self.link.awaits_control)
            now_ns = time.monotonic_ns()
            with self.lock:
                self._look(now_ns)
        if budget_ns >= 0:
            self.budget_ns = max(budget_ns - (now_ns - start_ns), 0)

    def _find_server(self) -> None:
        """Finds or starts a private server. The lock is not held meanwhile, since that can take seconds."""
        find = self.terms.socket
        with self.lock:
            now_ns = time.monotonic_ns()
            is_due = self.wire.needs_path and self.link.is_dial_due(now_ns) and not self._is_closing
            holds_memory = self.link.memories.current is not None
        if isinstance(find, Path) or not is_due:
            return
        path, line = None, ""
        try:
            path = find(holds_memory)
        except KVOffloadError as fault:
            line = str(fault)
        with self.lock:
            self.wire.path = path
            if path is None:
                self.link.cannot_dial(time.monotonic_ns(), line)

    def _look(self, now_ns: int) -> None:
        """Receives answers on a caller's thread. It may hang up, but it never joins: the keeper thread does that."""
        was_serving = self.link.state is LinkState.SERVING
        if was_serving and not self.wire.receive_answers(self.link, now_ns):
            # The lifeline may say why.
            self.wire.receive_all(self.link, now_ns)
        if self.link.state is LinkState.SERVING:
            self.link.on_time(now_ns)
        if was_serving and self.link.state is not LinkState.SERVING:
            os.eventfd_write(self._wake, 1)

    def _keep(self) -> None:
        """Joins a server, and joins again after each hang-up. Also handles what no caller waits for."""
        while True:
            self._find_server()
            with self.lock:
                if self._is_closing:
                    return
                was_serving = self.link.is_serving
                now_ns = time.monotonic_ns()
                self.wire.receive_all(self.link, now_ns)
                if not self.wire.needs_path:
                    self.link.on_time(now_ns)
                if self._blocks is not None:
                    self._blocks.refill(now_ns)
                if self._prompts is not None:
                    self._prompts.send(now_ns, self._call_ns)
                if self.link.is_serving and not was_serving:
                    self._changed.notify_all()
                files = {self.wire.lifeline_file: select.POLLIN}
                if self.link.state is LinkState.JOINING or self.link.hears_events:
                    files[self.wire.control_file] = select.POLLIN
                for file in self.wire.files_to_write:
                    files[file] = files.get(file, 0) | select.POLLOUT
                wait_s = (self.link.next_ns(now_ns) - now_ns) / SECOND_NS
                if self.link.awaits_answers:
                    wait_s = min(wait_s, _ANSWERS_S)
            poller = select.poll()
            for file, flags in {**files, self._wake: select.POLLIN}.items():
                if file >= 0:
                    poller.register(file, flags)
            poller.poll(max(wait_s, 0) * 1000)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
