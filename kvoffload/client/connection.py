"""A process's connection to its server, as far as it is the same for threads and for an asyncio loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from kvoffload.client.block_calls import BlockCalls
from kvoffload.client.inventory import Heard
from kvoffload.client.lanes import Pending
from kvoffload.client.link import SECOND_NS, Link
from kvoffload.client.memories import MappedBlocks, Memories
from kvoffload.client.prompt_log import PromptLog
from kvoffload.client.terms import ClientTerms, LinkState
from kvoffload.client.wire import SocketWire
from kvoffload.protocol import Bye, Error, Role

PARTING_S = 0.2
"""How long an end waits at most for the server to have had all that was sent."""


class Connection(MappedBlocks):
    """The base of both clients. Its public members send nothing and do not wait. For all others, hold the client's
    lock."""

    def __init__(self, terms: ClientTerms, *, on_event: Callable[[Heard, int], None] | None) -> None:
        memories = Memories(keeps_former=terms.member.role is Role.WORKER)
        super().__init__(memories, groups=0 if terms.register is None else len(terms.register.groups))
        self.terms = terms
        self.wire = SocketWire(terms.socket if isinstance(terms.socket, Path) else None)
        self._pidfd = os.pidfd_open(os.getpid())
        self.link = Link(
            terms.member,
            terms.register,
            terms.link,
            self.wire,
            memories,
            pidfd=self._pidfd,
            random=Random(),
            on_event=on_event,
        )
        self._blocks = None if terms.register is None else BlockCalls(self.link, terms.register, terms.link)
        self._prompts = None if terms.register is None else PromptLog(self.link, terms.register)

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
        return self.engine.most_slots(group)

    # ---- for the clients ----

    @property
    def engine(self) -> BlockCalls:
        assert self._blocks is not None, "an observer has no blocks"
        return self._blocks

    @property
    def _acquire_ns(self) -> int:
        return int(self.terms.link.acquire_deadline_s * SECOND_NS)

    @property
    def _call_ns(self) -> int:
        return int(self.terms.link.call_deadline_s * SECOND_NS)

    def _end(self) -> None:
        """Gives back what is held, parts from the server and closes everything. Waits for `PARTING_S` at most."""
        if self._blocks is not None:
            self._blocks.close(time.monotonic_ns())
        self._part()
        self.link.close()
        self._memories.close()
        self.wire.close()
        os.close(self._pidfd)

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
