"""The server as a state machine: it takes messages with the time at which they came, and returns those to send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeAlias

from kvoffload.cache import LocalCache, StoredBlocks
from kvoffload.packets import ReceivedDescriptor
from kvoffload.protocol import (
    Adopt,
    AdoptAnswer,
    AdoptVerdict,
    Agreement,
    Arrival,
    BlocksListed,
    Bye,
    Call,
    ClientMessage,
    Closing,
    ClosingReason,
    Done,
    Drain,
    Draining,
    Error,
    ErrorCode,
    Greeting,
    Hello,
    Hint,
    Holding,
    ListBlocks,
    Mark,
    Prefetch,
    Promote,
    ProtocolFault,
    Quarantine,
    Register,
    Registered,
    ServerMessage,
    Subscribe,
    Subscribed,
    Welcome,
    advance,
    answer_fault,
    check_call,
)
from kvoffload.protocol.hints import ListRetained
from kvoffload.protocol.message import ONE_WAY_OPS, OneWay
from kvoffload.protocol.survey import FindPrefix, FollowBlock
from kvoffload.server.channels.express_channels import ExpressChannels
from kvoffload.server.common.fault_log import FaultLog
from kvoffload.server.common.refusal import refuse
from kvoffload.server.common.steps import Find, FoundLater
from kvoffload.server.hints.hint_calls import HintCalls
from kvoffload.server.operators.operator_calls import OperatorCalls
from kvoffload.server.operators.prompt_ledger import OnPrompt
from kvoffload.server.operators.survey import Survey
from kvoffload.server.peer_links import PeerLinks, peer_calls
from kvoffload.server.sessions.adoption import Adoption
from kvoffload.server.sessions.domain import Domain, DomainSettings
from kvoffload.server.sessions.drain import DrainState, check_operator, is_operator
from kvoffload.server.sessions.event_feed import EVENT_BLOCKS, EventFeed, Space
from kvoffload.server.sessions.former_memory import hear_holding
from kvoffload.server.sessions.outbox import Later, Sendable, SendMemory, ToConnection, ToLifeline
from kvoffload.server.sessions.registration import Identities, open_express
from kvoffload.server.sessions.session import Connection, EngineSession, Guest, Peer
from kvoffload.server.sessions.session_table import SessionTable
from kvoffload.server.sessions.settings import CoreSettings
from kvoffload.server.sessions.tier_requests import TierRequests
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.counts import describe_draining

_ENDS_WITH_DRAIN = (Adopt, Hint, Promote)

_TIMED = (Promote, Prefetch, FollowBlock, FindPrefix, Hint, ListRetained, ListBlocks)
"""Messages whose handlers need the time, or the number for an answer that comes later."""

LISTINGS_AT_ONCE = 4
"""Number of `list_blocks` calls that are answered in a turn of the loop. The others wait for the next one."""

CLOCKS_DIFFER_S = 60
"""No greeting waits for so long: one that is later comes from a process with another clock, whose requests would all
be late."""

_Answer: TypeAlias = ServerMessage | Find | None
"""An answer, or a callable that takes long to find it, on any thread. None: there is none, or it comes later."""


class ServerCore:
    """Belongs to one thread. It knows no socket and no clock: callers pass `now_ns`, which is CLOCK_MONOTONIC.

    Every message of a peer is answered by a value; none makes a method raise. After a fault of the cache, the sender of
    the message gets the error INTERNAL.
    """

    def __init__(
        self,
        settings: CoreSettings,
        domains: Sequence[DomainSettings],
        *,
        draw: Callable[[], int],
        on_heard: Callable[[bool], None] = lambda _: None,
        tiers: Mapping[str, TierChain] = MappingProxyType({}),
        links: PeerLinks | None = None,
        express: ExpressChannels | None = None,
        on_prompt: OnPrompt | None = None,
    ) -> None:
        """`draw` returns random numbers of 32 bits, which make sessions hard to guess. `on_heard` is told whether any
        subscriber wants to hear of blocks that are stored. `tiers`, by domain, always want to."""
        self._settings = settings
        self.domains = {domain.name: Domain(domain, settings.handshake, tiers.get(domain.name)) for domain in domains}
        self._feed = EventFeed(settings.limits, on_heard)
        self._sessions = SessionTable(
            self.domains,
            boot_id=settings.boot_id,
            limits=settings.limits,
            draw=draw,
            on_disconnect=self._feed.unsubscribe,
        )
        self._adoption = Adoption()
        self._drain = DrainState()
        self._closing: Closing | None = None
        self.faults = FaultLog()
        self._listings: dict[bytes, tuple[Connection, Call]] = {}
        """Calls of `list_blocks` that wait for their answers, by connection, the oldest first."""
        self._tiers = TierRequests(tiers, self._feed, self.faults)
        self._hints = HintCalls(settings, self.domains, self._tiers)
        self._insight = OperatorCalls(
            self.domains,
            tell_cleared=self.tell_cleared,
            hints=self._hints.by_domain,
            is_operator=partial(is_operator, settings),
            express=express,
            on_prompt=on_prompt,
        )
        self._tiers.on_moved = self._insight.note_moved
        self._survey = Survey(self._sessions, self._tiers)
        self._identities = Identities(
            settings.limits, self._sessions, self._forget_identities, on_evict=self._hints.forget_spaces
        )
        self._handlers: Mapping[type[ClientMessage], Callable[[Connection, Any], _Answer]] = {
            Register: self._register,
            Adopt: self._adopt,
            **peer_calls(links, self._identities),
            Mark: lambda _, __: Done(),
            **self._insight.handlers,
            **self._survey.handlers,
            Subscribe: self._subscribe,
        }

    @property
    def sessions(self) -> SessionTable:
        """The sessions. Callers only read them."""
        return self._sessions

    @property
    def feed(self) -> EventFeed:
        """The events for subscribers."""
        return self._feed

    @property
    def tiers(self) -> TierRequests:
        """The traffic with tiers slower than memory, which the loop keeps going."""
        return self._tiers

    def attach_memory(self, domain: str, cache: LocalCache, *, adopted_boot_id: int = 0) -> list[Sendable]:
        """Notes that the domain serves from now on, because its memory was taken, or adopted from an old server.
        Returns the memory for the processes that wait for it."""
        self._adoption.forget(domain)
        self.domains[domain].attach(cache, adopted_boot_id=adopted_boot_id)
        self._hints.attach(domain, cache)
        self._feed.attach(domain, cache)
        self.faults.attempt(f"attaching tiers to domain {domain!r}", self._tiers.attach, domain, cache)
        waiting = self._sessions.attach(self.domains[domain])
        return [SendMemory(process.lifeline, domain, adopted_boot_id) for process in waiting]

    def refuse_offer(self, session: EngineSession, verdict: AdoptVerdict) -> None:
        """Notes that the memory that this session offered could not be used, so that another offer may be wanted."""
        self._adoption.refuse(session, verdict)

    def is_offer_wanted(self, lifeline: int, former_boot_id: int) -> bool:
        """Whether the server has asked for the memory that a process offers."""
        session = self._sessions.find_lifeline(lifeline)
        return session is not None and self._adoption.is_wanted(session, former_boot_id)

    def count_offered(self, lifeline: int) -> int:
        """Returns how many segments the memory has that this process was asked for; 0: it was asked for none."""
        session = self._sessions.find_lifeline(lifeline)
        return 0 if session is None else self._adoption.count_segments(session)

    def greet(
        self, lifeline: int, call: Call, peer: Peer, pidfd: ReceivedDescriptor | None, now_ns: int
    ) -> list[Sendable]:
        """Answers a greeting that came in on a lifeline. Takes the pidfd in every case."""
        message = call.message
        assert isinstance(message, Greeting)
        if call.is_late(now_ns):
            if pidfd is not None:
                pidfd.close()
            ahead_s = (now_ns - call.expires_ns) // 1_000_000_000
            if ahead_s < CLOCKS_DIFFER_S:
                return []
            line = (
                f"the server's monotonic clock is {ahead_s:,} s ahead of the process's: run both in one time namespace"
            )
            return [ToLifeline(lifeline, refuse(message, ErrorCode.MISMATCH, line), call.number)]
        greet = partial(self._sessions.greet, may_open=not self._drain.is_on)
        found = self.faults.serve(message, greet, lifeline, message, peer, pidfd)
        if isinstance(found, Error):
            refusal = self._refuse_draining(message) if found.code is ErrorCode.DRAINING else found
            self._insight.note_answer(refusal)
            return [ToLifeline(lifeline, refusal, call.number)]
        session, is_reopened = found
        protocol = min(session.domain.handshake.protocol_max, message.protocol_max)
        welcome = Welcome(
            protocol=protocol,
            session=session.number,
            domain=session.domain.name,
            control=self._settings.control,
            pid=self._settings.pid,
            uid=self._settings.uid,
            seen_pid=peer.pid,
            seen_uid=peer.uid,
            is_reopened=is_reopened,
            software=session.domain.handshake.software,
        )
        sent: list[Sendable] = [ToLifeline(lifeline, welcome, call.number)]
        if session.cache_session is not None:
            sent.append(SendMemory(lifeline, session.domain.name, session.domain.adopted_boot_id))
        sent += open_express(session)
        if self._closing is not None:
            sent.append(ToLifeline(lifeline, self._closing))
        return sent

    def close_lifeline(self, lifeline: int) -> None:
        """Notes that a lifeline has ended, or a farewell came on it. Its session keeps what it holds until its
        processes have exited."""
        self.faults.attempt("close_lifeline", self._sessions.close_lifeline, lifeline)

    def hear_holding(self, lifeline: int, message: Holding) -> list[Sendable]:
        """Notes which memory of former servers a process has. Returns requests to processes to let go of theirs."""
        session = self._sessions.find_lifeline(lifeline)
        return [] if session is None else [*hear_holding(session, lifeline, message)]

    def count_former(self, domain: str, own: int) -> int:
        """Bytes of former servers' memory that the domain's engines still have. `own`: the name of the present one."""
        return self.domains[domain].former.count(own) if domain in self.domains else 0

    def close_connection(self, connection: bytes) -> None:
        """Notes that nothing can be sent on this control connection any more."""
        self._sessions.close_connection(connection)

    def handle(self, connection: bytes, call: Call, now_ns: int, *, uid: int | None = None) -> list[Sendable]:
        """Serves a message of the control channel. Its answer, or a `Later` in its place, comes first in the returned
        list.

        `uid` is the connection's user as the kernel reports it, which a server of several domains needs to serve it.
        None stands for any user, where there is only one domain.
        """
        if call.is_late(now_ns) and not isinstance(call.message, OneWay):
            return []
        behind: list[Sendable] = []
        answer = self.faults.serve(call.message, self._serve, connection, call, now_ns, uid, behind)
        if callable(answer):
            return [Later(connection, call.message, call.number, answer), *behind]
        return behind if answer is None else [self._answer(connection, answer, call.number), *behind]

    def finish(self, later: Later, find: Callable[[], FoundLater]) -> list[Sendable]:
        """Answers a call that took long. `find` returns, or raises, what `later.find` did."""

        def conclude() -> ServerMessage | None:
            found = find()
            return found() if callable(found) else found

        answer = self.faults.serve(later.request, conclude)
        return [] if answer is None else [self._answer(later.connection, answer, later.number)]

    def handle_guest(self, connection: bytes, call: Call, guest: Guest, now_ns: int) -> list[Sendable]:
        """Serves a message that came over TCP, on a connection whose key no connection of the Unix socket can have.
        Each such connection has its own session, whose number in messages is 0. Deadlines are ignored, as the sender
        has another clock.
        """
        message = call.message
        session = self._sessions.hear_guest(connection)
        if call.session or (session is None and not isinstance(message, Hello | Bye)):
            line = "the session over TCP is 0, and begins with hello"
            return [self._answer(connection, refuse(message, ErrorCode.NO_SESSION, line), call.number)]
        if session is None and isinstance(message, Hello):
            session = self._sessions.open_guest(connection, guest)
            if session is None:
                return [self._answer(connection, refuse(message, ErrorCode.BUSY, "too many sessions"), call.number)]
        number = 0 if session is None else session.number
        sent = self.handle(connection, call._replace(session=number, expires_ns=0), now_ns)
        if self._sessions.find_connection(connection) is None:
            self._sessions.close_connection(connection)
        return sent

    def handle_fault(self, connection: bytes, fault: ProtocolFault) -> list[Sendable]:
        """Answers a frame that is no valid message. If it was to be a one-way message, it is counted."""
        behind: list[Sendable] = []
        answer: ServerMessage = answer_fault(fault)
        known = self._sessions.find_connection(connection)
        if known is not None and fault.op in ONE_WAY_OPS:
            arrival = known.one_way.accept(fault.number)
            if arrival is not Arrival.IN_ORDER:
                answer = self._reset(known, arrival, fault.op, behind)
        return [self._answer(connection, answer, fault.number), *behind]

    def overflow(self, connection: bytes, call: Call) -> list[Sendable]:
        """Refuses a message for which its connection has no room. If it was one-way, its session is quarantined."""
        known = self._sessions.find_connection(connection)
        if not isinstance(call.message, OneWay) or known is None:
            return [self._answer(connection, refuse(call.message, ErrorCode.BUSY, "too many at once"), call.number)]
        behind: list[Sendable] = []
        answer = self._reset(known, known.one_way.overflow(), call.message.op, behind)
        return [self._answer(connection, answer, call.number), *behind]

    def tick(self) -> None:
        """Takes back what ended sessions held, and queues events for subscribers. To be called now and then, and when a
        process has exited."""
        self.faults.attempt("reclaim", self._sessions.reclaim)
        self.faults.attempt("identities", self._identities.tick)
        self.faults.attempt("reports", self._survey.tick)
        self.faults.attempt("sweep", self._sweep)
        self.faults.attempt("look", self._tiers.look)
        for domain in self.domains:
            self.faults.attempt("disks", self._feed.check_disks, domain)

    def advance(self, now_ns: int) -> list[Sendable]:
        """Goes on with tiers and hints, and returns the answers that are due. To be called in every turn of the
        loop."""
        self.faults.attempt("hints", self._hints.advance, now_ns)
        self.faults.attempt("ledger", self._insight.look, now_ns)
        return [*self._list_some(), *self._tiers.advance(now_ns)]

    @property
    def is_behind(self) -> bool:
        """Whether the next turn of the loop has something to do even if no message comes."""
        return self._feed.is_behind or bool(self._listings)

    def tell_cleared(self, domain: str, name_spaces: Set[int]) -> None:
        """Informs subscribers that all blocks of these registered identities are being forgotten, and forgets the hints
        about them."""
        self._hints.forget_spaces(domain, name_spaces)
        fingerprints = self.domains[domain].fingerprints
        self._feed.tell_cleared(domain, {number: fingerprints[number] for number in sorted(name_spaces)})

    def tell_stored(self, space: Space, stored: StoredBlocks) -> None:
        """Informs subscribers and tiers that an engine's blocks became readable."""
        self._feed.tell_stored(space, stored)
        self._tiers.note_stored(space, stored)

    def tell_more(self) -> None:
        """Informs subscribers of blocks that have left memory, if they were too many for a tick. To be called in every
        turn of the loop."""
        if self._feed.is_behind:
            self.faults.attempt("sweep", self._sweep)

    def start_drain(
        self, now_ns: int, *, reason: ClosingReason = ClosingReason.REPLACED, deadline_ms: int = 0
    ) -> list[Sendable]:
        """Takes nothing new from now on. Returns messages that tell all processes; none if it was called before. A
        process may still come back to its session, and is told then."""
        if not self._drain.start(now_ns, deadline_ms):
            return []
        self.faults.attempt("hints", self._hints.let_all_go)
        after_ms = self._settings.successor_after_ms if reason is ClosingReason.REPLACED else 0
        closing = self._closing = Closing(reason=reason, retry_after_ms=after_ms)
        return [ToLifeline(lifeline, closing) for session in self._sessions for lifeline in session.processes]

    @property
    def is_draining(self) -> bool:
        """Whether the server has begun to end."""
        return self._drain.is_on

    def is_drained(self, now_ns: int) -> bool:
        """Whether the server may end."""
        found = self._count_draining()
        return self._drain.is_over(now_ns, holds_something=bool(found.leases or found.reserved))

    def _forget_identities(self, domain: str, fingerprints: Mapping[int, bytes]) -> None:
        self._hints.forget_spaces(domain, fingerprints.keys())
        self._feed.forget(domain, fingerprints)

    def _sweep(self) -> None:
        for domain in self.domains.values():
            self._feed.sweep(domain.name, domain.fingerprints)

    def _serve(self, key: bytes, call: Call, now_ns: int, uid: int | None, behind: list[Sendable]) -> _Answer:
        message = call.message
        connection = self._sessions.find_connection(key)
        session = self._sessions.find(call.session)
        if isinstance(message, Bye) and connection is None:
            return Done()
        is_other = connection is not None and connection.session is not session
        if session is not None and isinstance(message, Hello):
            is_other = is_other or not self._sessions.may_connect(key, session, uid)
        if session is None or not session.is_open or is_other:
            return refuse(message, ErrorCode.NO_SESSION, f"session {call.session} is not open on this connection")
        if isinstance(message, Hello):
            return self._greet_connection(key, connection, session, message)
        if connection is None:
            return refuse(message, ErrorCode.NOT_GREETED, "it came before hello was accepted")
        if isinstance(message, OneWay):
            arrival = connection.one_way.accept(call.number)
            if arrival is not Arrival.IN_ORDER:
                return self._reset(connection, arrival, message.op, behind)
        return None if call.is_late(now_ns) else self._serve_connection(connection, call, now_ns, behind)

    def _serve_connection(self, connection: Connection, call: Call, now_ns: int, behind: list[Sendable]) -> _Answer:
        message = call.message
        refusal = check_call(connection.agreed, message) or check_operator(self._settings, connection.session, message)
        if refusal is not None:
            return refusal
        if self._drain.is_on and isinstance(message, _ENDS_WITH_DRAIN):
            return self._refuse_draining(message)
        if isinstance(message, Bye):
            return self._part(connection, message, behind)
        if isinstance(message, Drain):
            behind += self.start_drain(now_ns, deadline_ms=message.deadline_ms)
            return self._count_draining()
        if isinstance(message, _TIMED):
            return self._choose_timed(message)(connection, call, now_ns)
        answer = self._handlers[type(message)](connection, message)
        if isinstance(answer, Registered):
            behind += open_express(connection.session)
        return answer

    def _choose_timed(self, message: ClientMessage) -> Callable[[Connection, Call, int], _Answer]:
        if isinstance(message, Promote | Prefetch):
            return self._tiers.serve
        if isinstance(message, ListBlocks):
            return self._await_listing
        return self._hints.serve if isinstance(message, Hint | ListRetained) else self._survey.find

    def _greet_connection(
        self, key: bytes, connection: Connection | None, session: EngineSession, message: Hello
    ) -> ServerMessage:
        before = connection.agreed if connection is not None else Agreement()
        agreed = advance(session.domain.handshake, before, message)
        if isinstance(agreed, Error):
            return agreed
        self._sessions.connect(key, session, agreed)
        return agreed.describe(session.domain.handshake)

    def _part(self, connection: Connection, message: Bye, behind: list[Sendable]) -> ServerMessage:
        if message.one_way_count != connection.one_way.received:
            # The last ones were lost, which no number after them will show.
            return self._reset(connection, Arrival.GAP, message.op, behind)
        connection.session.parted += 1
        self._sessions.close_connection(connection.key)
        return Done()

    def _reset(self, connection: Connection, arrival: Arrival, op: int, behind: list[Sendable]) -> Error:
        """Quarantines a session that has lost one-way messages, because the server does not guess which. The session
        keeps what it holds, and its processes have to greet again."""
        received = connection.one_way.received
        line = f"one-way messages: {arrival.value} after number {received}; the session is quarantined"
        told = Quarantine(code=ErrorCode.OUT_OF_ORDER, message=line)
        behind += [ToLifeline(lifeline, told) for lifeline in connection.session.processes]
        self._sessions.quarantine(connection.session)
        return Error(code=ErrorCode.OUT_OF_ORDER, message=line, about_op=op)

    def _answer(self, connection: bytes, answer: ServerMessage, number: int) -> ToConnection:
        known = self._sessions.find_connection(connection)
        self._insight.note_answer(answer, None if known is None else known.session)
        return ToConnection(connection, answer, number)

    def _register(self, connection: Connection, message: Register) -> ServerMessage:
        self._survey.keep_report(connection.session, message)
        return self._identities.register(connection, replace(message, report=b""))

    def _adopt(self, connection: Connection, message: Adopt) -> ServerMessage:
        if connection.session.is_observer:
            return refuse(message, ErrorCode.NOT_ALLOWED, "an observer has no memory")
        return AdoptAnswer(verdict=self._adoption.judge(connection.session, message))

    def _subscribe(self, connection: Connection, message: Subscribe) -> ServerMessage:
        session = connection.session
        if not self._feed.subscribe(connection.key, session.domain.name, message.name_spaces, owner=session.owner):
            return refuse(message, ErrorCode.BUSY, "there are too many subscribers")
        return Subscribed()

    def _await_listing(self, connection: Connection, call: Call, _now_ns: int) -> ServerMessage | None:
        """Queues a listing, one of each connection at a time: it takes a thousand times as long as most other calls."""
        if connection.key in self._listings:
            return refuse(call.message, ErrorCode.BUSY, "one list_blocks at a time")
        self._listings[connection.key] = connection, call
        return None

    def _list_some(self) -> Iterator[Sendable]:
        for key in list(islice(self._listings, LISTINGS_AT_ONCE)):
            connection, call = self._listings.pop(key)
            assert isinstance(call.message, ListBlocks)
            if self._sessions.find_connection(key) is connection:
                answer = self.faults.serve(call.message, self._list_blocks, connection, call.message)
                yield self._answer(key, answer, call.number)

    def _list_blocks(self, connection: Connection, message: ListBlocks) -> ServerMessage:
        """Lists blocks on this thread and not on that of long calls, so that events of later changes come after it."""
        session = connection.session
        cache = session.domain.cache
        if cache is None:
            return refuse(message, ErrorCode.BUSY, "the memory is not there yet")
        if message.name_space not in session.domain.fingerprints:
            return refuse(message, ErrorCode.NOT_FOUND, f"there is no namespace {message.name_space}")
        most = self._settings.limits.listed_blocks if session.guest is None else EVENT_BLOCKS
        listed = cache.list_blocks(message.name_space, first=message.first, limit=most)
        return BlocksListed(
            next=listed.next, hashes=listed.hashes, parents=listed.parents, groups=listed.groups.tobytes()
        )

    def _count_draining(self) -> Draining:
        caches = [domain.cache for domain in self.domains.values() if domain.cache is not None]
        return describe_draining((cache.stats for cache in caches), len(self._sessions))

    def _refuse_draining(self, message: ClientMessage) -> Error:
        refusal = refuse(message, ErrorCode.DRAINING, "this server ends, nothing new is taken")
        return replace(refusal, retry_after_ms=self._settings.successor_after_ms)
