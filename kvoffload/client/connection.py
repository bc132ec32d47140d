"""A process's connection to its server, as far as it is the same for threads and for an asyncio loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import NO_LIMIT, CacheStats, Placed, PlaceUsage, SegmentMap, TenantUsage
from kvoffload.client.block_calls import BlockCalls
from kvoffload.client.insight import ServerInsight, read_insight
from kvoffload.client.lanes import Pending
from kvoffload.client.link import SECOND_NS, Link
from kvoffload.client.memories import Memories
from kvoffload.client.prompt_log import PromptLog
from kvoffload.client.terms import ClientTerms, LinkState
from kvoffload.client.wire import SocketWire
from kvoffload.errors import ServerError
from kvoffload.protocol import Bye, ClearedBlocks, Counts, Done, Draining, Error, Insight, Role, ServerMessage
from kvoffload.protocol.message import Event, Reply, Request
from kvoffload.protocol.shape import name_of

_IS_IT_THERE = "see whether the cache server runs"
_AS_OPERATOR = "ask as the server's user, or with its operator's token"
PARTING_S = 0.2
"""How long an end waits at most for the server to have had all that was sent."""


class Connection:
    """What is public here asks nobody and waits for nobody. All else belongs to whoever holds the client's lock."""

    def __init__(self, terms: ClientTerms, *, on_event: Callable[[Event, int], None] | None) -> None:
        self._terms = terms
        self._wire = SocketWire(terms.socket if isinstance(terms.socket, Path) else None)
        self._pidfd = os.pidfd_open(os.getpid())
        self._link = Link(
            terms.member,
            terms.register,
            terms.link,
            self._wire,
            Memories(keeps_former=terms.member.role is Role.WORKER),
            pidfd=self._pidfd,
            random=Random(),
            on_event=on_event,
        )
        self._blocks = None if terms.register is None else BlockCalls(self._link, terms.register, terms.link)
        self._prompts = None if terms.register is None else PromptLog(self._link, terms.register)

    # ---- how it stands ----

    @property
    def state(self) -> LinkState:
        return self._link.state

    @property
    def is_served(self) -> bool:
        """There is a server, and it answers in time."""
        return self._link.is_serving

    @property
    def fault(self) -> str:
        """Why it is not served, in one line."""
        return self._link.fault

    @property
    def refusal(self) -> Error | None:
        """What the server said, if that is why."""
        return self._link.refusal

    @property
    def socket(self) -> Path | None:
        """The socket of the server that it is served by; None: there is none, or nobody knows yet where one will be."""
        return self._wire.path

    @property
    def warnings(self) -> int:
        """How many the servers' logs had since this began, as far as they told."""
        return self._link.warnings.count

    @property
    def has_tiers(self) -> bool:
        """The server has something below its memory, which an acquire may wait for."""
        return self._link.has("promote")

    @property
    def boot_id(self) -> int:
        """Of the server that it is or was served by last; 0: none."""
        return self._link.boot_id

    # ---- without a message ----

    @property
    def memory_id(self) -> int:
        return self._engine.memory_id

    @property
    def session(self) -> int:
        """Of the engine, by the memory's own count: what new leases and slots belong to."""
        return self._engine.session

    def places(self) -> tuple[tuple[int, int], ...]:
        """(memory, session) of all that `may_copy` accepts."""
        return self._link.memories.places()

    def memory(self, memory_id: int) -> SegmentMap:
        return self._engine.memory(memory_id)

    def ready_bytes(self, memory_id: int) -> int:
        """Of that memory, from its beginning: what has its pages, and may be touched. It never becomes less."""
        return self._engine.ready_bytes(memory_id)

    def may_copy(self, held: Placed) -> bool:
        return self._engine.may_copy(held)

    def lookup(self, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        return self._engine.lookup(group, hashes)

    def find_boundary(self, chain: Buffer, *, local: int = 0, limit: int = NO_LIMIT, alignment: int = 1) -> int:
        return self._engine.find_boundary(chain, local=local, limit=limit, alignment=alignment)

    @property
    def has_room(self) -> bool:
        """Part of the pool was given to nobody yet: what is saved there displaces nothing."""
        return self._engine.has_room

    def most_slots(self, group: int) -> int:
        """How many slots are held ready at best: a share of the pool, if that is less than what is wanted."""
        return self._engine.most_slots(group)

    # ---- for the clients ----

    @property
    def _engine(self) -> BlockCalls:
        assert self._blocks is not None, "an observer has no blocks"
        return self._blocks

    @property
    def _acquire_ns(self) -> int:
        return int(self._terms.link.acquire_deadline_s * SECOND_NS)

    @property
    def _call_ns(self) -> int:
        return int(self._terms.link.call_deadline_s * SECOND_NS)

    def _read_stats(self, answer: ServerMessage | None) -> CacheStats:
        counts = read_counts(answer)
        if isinstance(counts, str):
            raise ServerError(f"counts: {counts}", remedy=_IS_IT_THERE)
        return counts

    def _read_draining(self, answer: ServerMessage | None) -> Draining:
        if not isinstance(answer, Draining):
            raise ServerError(f"drain: {_describe_fault(answer)}", remedy=_choose_remedy(answer))
        return answer

    def _read_insight(self, answer: ServerMessage | None) -> ServerInsight:
        if not isinstance(answer, Insight):
            raise ServerError(f"insight: {_describe_fault(answer)}", remedy=_IS_IT_THERE)
        return read_insight(answer)

    def _read_cleared(self, answer: ServerMessage | None) -> int:
        if not isinstance(answer, ClearedBlocks):
            raise ServerError(f"clear: {_describe_fault(answer)}", remedy=_choose_remedy(answer))
        return answer.blocks

    def _read_quota(self, answer: ServerMessage | None) -> None:
        if not isinstance(answer, Done):
            raise ServerError(f"quota: {_describe_fault(answer)}", remedy=_choose_remedy(answer))

    def _read_found(self, message: Request, answer: ServerMessage | None) -> Reply:
        if not isinstance(answer, Reply) or isinstance(answer, Error):
            # A refusal begins with the call's name on the wire, which says nothing to who typed a command.
            line = _describe_fault(answer).removeprefix(f"{name_of(type(message))}: ")
            raise ServerError(line, remedy=_choose_remedy(answer))
        return answer

    def _end(self) -> None:
        """Gives back what is held, parts from the server and closes everything. Waits for `PARTING_S` at most."""
        if self._blocks is not None:
            self._blocks.close(time.monotonic_ns())
        self._part()
        self._link.close()
        self._link.memories.close()
        self._wire.close()
        os.close(self._pidfd)

    def _part(self) -> None:
        """Sees to it that everything sent arrives: the last messages are told apart from lost ones."""
        if self._link.state is not LinkState.SERVING:
            return
        now_ns = time.monotonic_ns()
        end_ns = now_ns + int(PARTING_S * SECOND_NS)
        # What answers bring that nobody waits for is given back, and that is to arrive too.
        while now_ns < end_ns and (pending := self._link.confirm(now_ns, end_ns - now_ns)) is not None:
            self._await(pending)
            now_ns = time.monotonic_ns()
        if now_ns < end_ns:
            self._await(self._link.ask(Bye(one_way_count=self._link.one_way_count), now_ns, end_ns - now_ns))

    def _await(self, pending: Pending) -> None:
        while not pending.is_over:
            self._wire.await_answers(0.001)
            now_ns = time.monotonic_ns()
            self._wire.receive_all(self._link, now_ns)
            self._link.on_time(now_ns)


def read_counts(answer: ServerMessage | None) -> CacheStats | str:
    """Or what went wrong, in one line."""
    if isinstance(answer, Counts):
        counts: dict[str, Any] = {name: value for name, value in vars(answer).items() if isinstance(value, int)}
        tenants = tuple(
            TenantUsage(name=tenant.name, quota_bytes=tenant.quota_bytes, used_bytes=tenant.used_bytes)
            for tenant in answer.tenants
        )
        places = tuple(PlaceUsage(**vars(place)) for place in answer.places)
        traffic = {one.tier: {k: v for k, v in vars(one).items() if isinstance(v, int)} for one in answer.traffic}
        return CacheStats(tenants=tenants, places=places, traffic=traffic, **counts)
    return _describe_fault(answer)


def _choose_remedy(answer: ServerMessage | None) -> str:
    """Of what an operator has asked for."""
    return _AS_OPERATOR if isinstance(answer, Error) else _IS_IT_THERE


def _describe_fault(answer: ServerMessage | None) -> str:
    return answer.message if isinstance(answer, Error) else "the cache server did not answer in time"
