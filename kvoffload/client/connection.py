"""A process's connection to its server: all calls that do not wait, and the thread that keeps the process served."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from typing_extensions import Buffer

from kvoffload.cache import AcquiredBlocks, Ask, BlockLease, Publication, ReservedSlots
from kvoffload.client.block_calls import BlockCalls, HintSettings, PendingAcquire, PendingSlots, TierWait
from kvoffload.client.inventory import Heard
from kvoffload.client.lanes import Pending
from kvoffload.client.link import SECOND_NS, Link
from kvoffload.client.memories import MappedBlocks, Memories
from kvoffload.client.prompt_log import PromptLog, PromptNote
from kvoffload.client.settings import ClientSettings, LinkState
from kvoffload.client.wire import SocketWire
from kvoffload.errors import KVOffloadError
from kvoffload.protocol import Bye, Error, Hinted, Role, Subscribe
from kvoffload.protocol.message import Request

PARTING_S = 0.2
"""How long an end waits at most for the server to have had all that was sent."""
_KEEPER_S = 0.2
_ANSWERS_S = 0.02
"""How often the connection's thread looks for answers while no caller waits for them, in seconds."""


class Connection(MappedBlocks):
    """The base of both clients. Safe to call from any thread of the process that made it; not in a forked child.

    No public call waits: each reads mapped memory, sends a message, or notes what was heard. Without a server every
    look-up is a miss; the connection's own thread keeps trying to join one.
    """

    _hears_answers = False
    """Whether the thread receives answers as soon as they come, because no caller looks for them."""

    def __init__(self, settings: ClientSettings, *, on_event: Callable[[Heard, int], None] | None) -> None:
        memories = Memories(keeps_former=settings.member.role is Role.WORKER)
        super().__init__(memories, groups=0 if settings.register is None else len(settings.register.groups))
        self.settings = settings
        self.lock = threading.Lock()
        self.wire = SocketWire(settings.socket if isinstance(settings.socket, Path) else None)
        self._pidfd = os.pidfd_open(os.getpid())
        self.link = Link(
            settings.member,
            settings.register,
            settings.link,
            self.wire,
            memories,
            pidfd=self._pidfd,
            random=Random(),
            on_event=on_event,
        )
        self._blocks = None if settings.register is None else BlockCalls(self.link, settings.register, settings.link)
        self._prompts = None if settings.register is None else PromptLog(self.link, settings.register)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._keeper = threading.Thread(target=self._keep, name="kvoffload-client", daemon=True)
        self._is_closing = False
        self._sleeps_until_ns = 0
        """The time at which the thread looks again by itself."""
        self.wire.on_unsent = self._wake_keeper

    # ---- how it stands ----

    @property
    def state(self) -> LinkState:
        return self.link.state

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
    def refusal(self) -> Error | None:
        """Returns what the server said, if it has refused this client."""
        return self.link.refusal

    @property
    def socket(self) -> Path | None:
        """The socket of the server in use, or None if there is no server or its path is not known yet."""
        return self.wire.path

    @property
    def warnings(self) -> int:
        """How many the servers' logs had since this began, as far as they told."""
        return self.link.warnings.count

    @property
    def has_tiers(self) -> bool:
        """Whether the server has slower tiers, for which an acquire may wait."""
        return self.link.has("promote")

    @property
    def boot_id(self) -> int:
        """The boot id of the server in use, or of the last one; 0: there was none."""
        return self.link.boot_id

    def most_slots(self, group: int) -> int:
        """Returns how many slots are held ready at best: a share of the pool, if that is less than what is wanted."""
        return self.blocks.most_slots(group)

    @property
    def is_woken(self) -> bool:
        """Its thread was told to look, and has not looked yet."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        return bool(poller.poll(0))

    @property
    def blocks(self) -> BlockCalls:
        """The calls about blocks, for which the caller holds the lock."""
        assert self._blocks is not None, "an observer has no blocks"
        return self._blocks

    # ---- loads ----

    def start_acquire(self, ask: Ask, *, far: TierWait | None = None, wait_s: float = 0.0) -> PendingAcquire:
        """Asks for an `acquire`, which the caller polls. It is a miss if the answer takes longer than the acquire
        deadline and than `wait_s`. With `far`, it waits for slower tiers first."""
        wait_ns = max(self._acquire_ns, int(wait_s * SECOND_NS))
        with self.lock:
            return self.blocks.start_acquire(ask, time.monotonic_ns(), wait_ns, far=far)

    def poll(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        """Returns the answer. None: there is none yet."""
        if pending.found is None:
            with self.lock:
                now_ns = time.monotonic_ns()
                self._look(now_ns)
                self.blocks.go_on(pending, now_ns)
        return pending.found

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
                self._look(now_ns)
            return self.blocks.ready_slots(now_ns)

    def take(self, group: int, count: int) -> ReservedSlots:
        """Slots that are held ready, as many as there are."""
        with self.lock:
            now_ns = time.monotonic_ns()
            self._look(now_ns)
            return self.blocks.take(group, count, now_ns)

    def publish(self, publication: Publication) -> bool:
        with self.lock:
            return self.blocks.publish(publication, time.monotonic_ns())

    def abort(self, slots: ReservedSlots) -> None:
        with self.lock:
            self.blocks.abort(slots, time.monotonic_ns())

    def invalidate(self, group: int, hashes: Buffer) -> None:
        with self.lock:
            self.blocks.invalidate(group, hashes, time.monotonic_ns())

    def note_prompt(self, note: PromptNote) -> None:
        """Records what became of a prompt, for the server's counts. Another thread tells the server later."""
        with self.lock:
            assert self._prompts is not None, "an observer has no prompts"
            self._prompts.note(note, time.monotonic_ns())

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

    # ---- for the clients ----

    @property
    def _acquire_ns(self) -> int:
        return int(self.settings.link.acquire_deadline_s * SECOND_NS)

    @property
    def _call_ns(self) -> int:
        return int(self.settings.link.call_deadline_s * SECOND_NS)

    def _start_entries(self, group: int, hashes: Buffer, shards: Sequence[int]) -> PendingAcquire:
        with self.lock:
            return self.blocks.start_acquire_entries(
                group, hashes, time.monotonic_ns(), self._acquire_ns, shards=shards
            )

    def _start_reserve(self, group: int, count: int, hashes: Buffer | None) -> PendingSlots:
        with self.lock:
            return self.blocks.start_reserve(group, time.monotonic_ns(), count=count, hashes=hashes)

    def _start_ask(self, message: Request) -> Pending:
        with self.lock:
            return self.link.ask(message, time.monotonic_ns(), self._call_ns)

    def _confirm(self) -> Pending | None:
        """Returns a request that is over when the server has received all that was told before. None: it has."""
        with self.lock:
            return self.link.confirm(time.monotonic_ns(), self._call_ns)

    def _end_turn(self) -> None:
        """Called by the thread, with the lock, after it has received what had come."""

    def _wake_keeper(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _end(self) -> None:
        """Gives back what is held, parts from the server and closes everything. Waits for 0.4 s at most."""
        with self.lock:
            if self._is_closing:
                return
            self._is_closing = True
        self._wake_keeper()
        if self._keeper.ident is not None:
            # It may be starting a server; then it ends by itself.
            self._keeper.join(_KEEPER_S)
        with self.lock:
            if self._blocks is not None:
                self._blocks.close(time.monotonic_ns())
            self._part()
            self.link.close()
            self._memories.close()
            self.wire.close()
            os.close(self._pidfd)
        if not self._keeper.is_alive():
            os.close(self._wake)

    # ---- inside ----

    def _part(self) -> None:
        """Sees to it that everything sent arrives: the last messages are told apart from lost ones."""
        if self.link.state is not LinkState.SERVING:
            return
        now_ns = time.monotonic_ns()
        end_ns = now_ns + int(PARTING_S * SECOND_NS)
        # Late answers may bring leases and slots, which are given back; the server should receive that, too.
        while now_ns < end_ns and (pending := self.link.confirm(now_ns, end_ns - now_ns)) is not None:
            self._await(pending)
            now_ns = time.monotonic_ns()
        if now_ns < end_ns:
            self._await(self.link.ask(Bye(one_way_count=self.link.one_way_count), now_ns, end_ns - now_ns))

    def _await(self, pending: Pending) -> None:
        while not pending.is_over:
            self.wire.await_answers(0.001)
            now_ns = time.monotonic_ns()
            self.wire.receive_all(self.link, now_ns)
            self.link.on_time(now_ns)

    def _find_server(self) -> None:
        """Finds or starts a private server. The lock is not held meanwhile, since that can take seconds."""
        find = self.settings.socket
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
            self._wake_keeper()

    def _keep(self) -> None:
        """Joins a server, and joins again after each hang-up. Also handles what no caller waits for."""
        while True:
            self._find_server()
            with self.lock:
                if self._is_closing:
                    return
                now_ns = time.monotonic_ns()
                self.wire.receive_all(self.link, now_ns)
                if not self.wire.needs_path:
                    self.link.on_time(now_ns)
                if self._blocks is not None:
                    self._blocks.refill(now_ns)
                if self._prompts is not None:
                    self._prompts.send(now_ns, self._call_ns)
                self._end_turn()
                files = {self.wire.lifeline_file: select.POLLIN}
                if self.link.state is LinkState.JOINING or self.link.hears_events or self._hears_answers:
                    files[self.wire.control_file] = select.POLLIN
                if self._hears_answers:
                    files[self.wire.express_file] = select.POLLIN
                for file in self.wire.files_to_write:
                    files[file] = files.get(file, 0) | select.POLLOUT
                wait_s = (self.link.next_ns(now_ns) - now_ns) / SECOND_NS
                if self.link.awaits_answers:
                    wait_s = min(wait_s, _ANSWERS_S)
                self._sleeps_until_ns = now_ns + int(wait_s * SECOND_NS)
            poller = select.poll()
            for file, flags in {**files, self._wake: select.POLLIN}.items():
                if file >= 0:
                    poller.register(file, flags)
            poller.poll(max(wait_s, 0) * 1000)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
