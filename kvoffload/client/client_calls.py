"""The calls of both clients that do not wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from typing_extensions import Buffer

from kvoffload.cache import AcquiredBlocks, Ask, BlockLease, Publication, ReservedSlots
from kvoffload.client.block_calls import HintSettings, PendingAcquire, TierWait
from kvoffload.client.connection import Connection
from kvoffload.client.lanes import Pending
from kvoffload.client.memories import MappedBlocks
from kvoffload.client.prompt_log import PromptNote
from kvoffload.client.settings import SECOND_NS, ClientSettings, LinkState
from kvoffload.protocol import Hinted, Subscribe


class ClientCalls(MappedBlocks):
    """The base of both clients. Safe to call from any thread of the process that made it; not in a forked child.

    No public call waits: each reads mapped memory, sends a message, or notes what was heard. Without a server every
    look-up is a miss.
    """

    def __init__(self, settings: ClientSettings, connection: Connection) -> None:
        groups = () if settings.register is None else settings.register.groups
        super().__init__(connection.link.memories, groups=len(groups))
        self.settings = settings
        self.connection = connection
        self.lock, self.wire, self.link = connection.lock, connection.wire, connection.link
        self.blocks = connection.blocks
        """The calls about blocks, for which the caller holds the lock."""

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
