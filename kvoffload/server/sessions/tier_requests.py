"""Serves engines' requests to the slower tiers, in all domains, and gives the answers later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Protocol

from kvoffload.cache import LocalCache, StoredBlocks
from kvoffload.protocol import Call, ClientMessage, ErrorCode, Medium, Prefetch, Promote, Promoted, ServerMessage
from kvoffload.server.common.fault_log import FaultLog
from kvoffload.server.common.refusal import refuse
from kvoffload.server.common.steps import Find
from kvoffload.server.sessions.event_feed import EventFeed, Space
from kvoffload.server.sessions.outbox import Later, Sendable, ToConnection
from kvoffload.server.sessions.session import Connection
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.promotion_parts import Wanted
from kvoffload.server.tiering.settings import TierSpace
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.server.tiering.watched_blocks import FindThere
from kvoffload.types import HASH_BYTES

_SECOND_NS = 1_000_000_000
MAX_NAMED = 256
"""Number of a domain's namespaces whose names for events are kept. Those beyond are made again each time."""


class OnMoved(Protocol):
    def __call__(self, domain: str, fingerprint: bytes, *, read_bytes: int = 0, written_bytes: int = 0) -> None: ...


class TierRequests:
    """Belongs to the thread of the server's core."""

    def __init__(
        self,
        traffic: Mapping[str, TierChain],
        feed: EventFeed,
        faults: FaultLog,
    ) -> None:
        """`traffic` is by domain. `feed` is told of blocks that can be read in memory again, and of those that tiers
        have."""
        self._traffic = traffic
        self._feed = feed
        self._faults = faults
        self.on_moved: OnMoved = lambda *_, **__: None
        """Called with blocks that a slower tier has brought up or taken."""
        self._answers: list[Sendable] = []
        self._unheard = 0
        """Number of pieces of work so far that no connection waits for."""

    def attach(self, domain: str, cache: LocalCache) -> None:
        """Connects a domain's memory to its tiers."""
        traffic = self._traffic.get(domain)
        if traffic is None:
            return

        # The same objects for the same space, which are watched together then.
        @lru_cache(MAX_NAMED)
        def name(space: TierSpace) -> Space:
            return Space(domain=domain, name_space=space.number, fingerprint=space.fingerprint)

        @lru_cache(MAX_NAMED)
        def choose_find(tier: TierTraffic, space: TierSpace) -> FindThere:
            return partial(tier.find_there, space)

        def tell(space: TierSpace, stored: StoredBlocks) -> None:
            self.on_moved(domain, space.fingerprint, read_bytes=_count_bytes(space, stored))
            self._feed.tell_stored(name(space), stored)

        def tell_written(tier: TierTraffic, space: TierSpace, stored: StoredBlocks) -> None:
            self.on_moved(domain, space.fingerprint, written_bytes=_count_bytes(space, stored))
            find = choose_find(tier, space) if tier.knows_all else None
            self._feed.tell_written(name(space), stored, medium=_medium_of(tier), find=find)

        def tell_missing(tier: TierTraffic, space: TierSpace, group: int, hashes: bytes) -> None:
            self._feed.tell_missing(name(space), group, hashes, medium=_medium_of(tier))

        traffic.attach(cache, tell)
        for tier in traffic.tiers:
            tier.tell(written=partial(tell_written, tier), missing=partial(tell_missing, tier))

    def serve(self, connection: Connection, call: Call, now_ns: int) -> ServerMessage | Find | None:
        """Returns the answer, or a callable that finds it. None: it comes with a later `advance`, or there is none."""
        message = call.message
        assert isinstance(message, Promote | Prefetch)
        if message.name_space != connection.registration.name_space:
            line = f"namespace {message.name_space} is not the session's"
            return refuse(message, ErrorCode.NOT_FOUND, line)
        traffic = self._traffic.get(connection.session.domain.name)
        if traffic is None:
            return None
        owner = connection.session.owner
        if isinstance(message, Promote):
            answer = partial(self.answer, connection.key, call.number)
            return traffic.serve(message, now_ns / _SECOND_NS, answer, owner=owner)
        return traffic.prefetch(message, now_ns / _SECOND_NS, owner=owner)

    def note_stored(self, space: Space, stored: StoredBlocks) -> None:
        """Notes that an engine's blocks can be read in memory from now on."""
        traffic = self._traffic.get(space.domain)
        if traffic is not None:
            self._faults.attempt("tier traffic", traffic.note_stored, space.name_space, stored)

    def forget(self, space: Space, group: int, hashes: bytes) -> bool:
        """Removes blocks that an engine does not trust from the slower tiers, too. False: there was a fault, and they
        may still be there."""
        traffic = self._traffic.get(space.domain)
        if traffic is None:
            return True
        return self._faults.attempt("tier traffic", traffic.forget, space.name_space, group, hashes) is None

    def find_chain(self, domain: str) -> TierChain | None:
        """Returns a domain's slower tiers, or None if it has none."""
        return self._traffic.get(domain)

    def bring(
        self, space: Space, group: int, hashes: bytes, now_ns: int, *, wait_s: float, then: Callable[[], object]
    ) -> None:
        """Brings up blocks of the nearest tier by their names. `then` is called once, now or later."""
        traffic = self._traffic.get(space.domain)
        if traffic is None:
            then()
            return
        now_s = now_ns / _SECOND_NS

        def answer(_: Promoted) -> None:
            then()

        wanted = Wanted(space.name_space, group, hashes, now_s + wait_s, answer)
        self._faults.attempt("tier traffic", traffic.bring, wanted, now_s)

    def advance(self, now_ns: int) -> list[Sendable]:
        """Moves what can be moved, and returns the answers that are due. The event loop calls it in every turn."""
        for traffic in self._traffic.values():
            self._faults.attempt("tier traffic", traffic.advance, now_ns / _SECOND_NS)
        answers, self._answers = self._answers, []
        return answers

    def next_ns(self) -> int | None:
        """Returns the latest time at which `advance` has something to do, unless the tiers' files say so earlier."""
        times = [traffic.next_s() for traffic in self._traffic.values()]
        due = [int(time_s * _SECOND_NS) for time_s in times if time_s is not None]
        return min(due, default=None)

    def files(self) -> list[int]:
        """Returns descriptors that are readable when `advance` may have something to do."""
        return [file for traffic in self._traffic.values() for file in traffic.files()]

    def close(self, now_ns: Callable[[], int], *, until_ns: int | None = None) -> None:
        """Writes what waits to be written, for a few seconds at most. After it no slot of any memory is touched.
        `until_ns`: the memory goes with the server, and blocks are handed over until then."""
        until_s = None if until_ns is None else until_ns / _SECOND_NS
        for traffic in self._traffic.values():
            traffic.close(lambda: now_ns() / _SECOND_NS, until_s=until_s)

    def look(self) -> None:
        """Does the tiers' periodic work. The event loop calls it."""
        for traffic in self._traffic.values():
            traffic.look()

    def find_later(self, message: ClientMessage, find: Find) -> None:
        """Queues work for the thread for long calls, which no connection waits for."""
        self._unheard += 1
        self._answers.append(Later(b"unheard %d" % self._unheard, message, 0, find))

    def answer(self, connection: bytes, number: int, answer: ServerMessage) -> None:
        """Queues an answer, which the next `advance` returns."""
        self._answers.append(ToConnection(connection, answer, number))


def _count_bytes(space: TierSpace, stored: StoredBlocks) -> int:
    return len(stored.hashes) // HASH_BYTES * space.block_bytes(stored.group)


def _medium_of(tier: TierTraffic) -> Medium:
    """Returns the medium that events name: a place to which no other server writes counts as this machine's own
    disk."""
    return Medium.DISK if tier.knows_all else Medium.REMOTE
