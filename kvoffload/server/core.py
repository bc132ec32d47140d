"""The server as a state machine: what comes in, with the time at which it did; out comes what is to be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from kvoffload.server.drain import DrainState, check_operator
from kvoffload.server.event_feed import EVENT_BLOCKS, EventFeed, Space
from kvoffload.server.hints.hint_calls import HintCalls
from kvoffload.server.operators.counts import describe_draining
from kvoffload.server.operators.fault_log import FaultLog
from kvoffload.server.operators.operator_calls import OperatorCalls
from kvoffload.server.operators.prompt_ledger import OnPrompt
from kvoffload.server.operators.survey import Survey
from kvoffload.server.outbox import FoundLater, Later, Sendable, SendMemory, ToConnection, ToLifeline
from kvoffload.server.peer_links import PeerLinks, peer_calls
from kvoffload.server.refusal import refuse
from kvoffload.server.sessions.adoption import Adoption
from kvoffload.server.sessions.domain import Domain, DomainTerms
from kvoffload.server.sessions.former_memory import count_former, hear_holding
from kvoffload.server.sessions.registration import Identities, open_express
from kvoffload.server.sessions.session import Connection, EngineSession, Guest, Peer
from kvoffload.server.sessions.session_table import SessionTable
from kvoffload.server.terms import CoreTerms
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.requests import TierRequests

_ENDS_WITH_DRAIN = (Adopt, Hint, Promote)

_TIMED = (Promote, Prefetch, FollowBlock, FindPrefix, Hint, ListRetained, ListBlocks)
"""Whoever serves these has to know the time, or the number for an answer that comes later."""

LISTINGS_AT_ONCE = 4
"""Answers to `list_blocks` in a turn of the loop. The others wait for the next one."""

_Answer: TypeAlias = ServerMessage | Callable[[], FoundLater] | None
"""None: there is none. A call: it takes long to find, on whatever thread."""


class ServerCore:
    """Belongs to one thread. Knows no socket and no clock: `now_ns` is CLOCK_MONOTONIC where it counts.

    Whatever a peer sends is answered by a value; nothing here raises for it. A fault of the cache is INTERNAL to the
    one that met it.
    """

    def __init__(
        self,
        terms: CoreTerms,
        domains: Sequence[DomainTerms],
        *,
        draw: Callable[[], int],
        on_heard: Callable[[bool], None] = lambda _: None,
        tiers: Mapping[str, TierChain] = MappingProxyType({}),
        links: PeerLinks | None = None,
        express: ExpressChannels | None = None,
        on_prompt: OnPrompt | None = None,
    ) -> None:
        """`draw` gives random numbers of 32 bits, which make sessions hard to guess. `on_heard` is told whether anybody
        wants to hear of blocks that are stored; `tiers`, by domain, always do."""
        self._terms = terms
        self.domains = {domain.name: Domain(domain, terms.handshake, tiers.get(domain.name)) for domain in domains}
        self._feed = EventFeed(terms.limits, on_heard)
        self._sessions = SessionTable(
            self.domains,
            boot_id=terms.boot_id,
            limits=terms.limits,
            draw=draw,
            on_disconnect=self._feed.unsubscribe,
        )
        self._adoption = Adoption()
        self._drain = DrainState()
        self._closing: Closing | None = None
        self.faults = FaultLog()
        self._listings: dict[bytes, tuple[Connection, Call]] = {}
        """By connection: who waits for an answer to `list_blocks`, the first comer first."""
        self._tiers = TierRequests(tiers, self._feed, self.faults)
        self._hints = HintCalls(terms, self.domains, self._tiers)
        self._insight = OperatorCalls(
            self.domains,
            tell_cleared=self.tell_cleared,
            hints=self._hints.by_domain,
            express=express,
            on_prompt=on_prompt,
        )
        self._survey = Survey(self._sessions, self._tiers)
        self._identities = Identities(
            terms.limits, self._sessions, self._forget_identities, on_evict=self._hints.forget_spaces
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
        """The sessions, to be read only."""
        return self._sessions

    @property
    def feed(self) -> EventFeed:
        """What subscribers are to be told."""
        return self._feed

    @property
    def tiers(self) -> TierRequests:
        """The traffic with what lies below memory, which the loop keeps going."""
        return self._tiers

    def attach_memory(self, domain: str, cache: LocalCache, *, adopted_boot_id: int = 0) -> list[Sendable]:
        """The domain serves from here on: memory was taken, or that of an old server adopted."""
        self._adoption.forget(domain)
        self.domains[domain].attach(cache, adopted_boot_id=adopted_boot_id)
        self._hints.attach(domain, cache)
        self._feed.attach(domain, cache)
        self.faults.attempt(f"attaching tiers to domain {domain!r}", self._tiers.attach, domain, cache)
        waiting = self._sessions.attach(self.domains[domain])
        return [SendMemory(process.lifeline, domain, adopted_boot_id) for process in waiting]

    def refuse_offer(self, session: EngineSession, verdict: AdoptVerdict) -> None:
        """The memory that this session offered was no use; another may be."""
        self._adoption.refuse(session, verdict)

    def is_offer_wanted(self, lifeline: int, former_boot_id: int) -> bool:
        """Says whether what a process offers was asked for."""
        session = self._sessions.find_lifeline(lifeline)
        return session is not None and self._adoption.is_wanted(session, former_boot_id)

    def count_offered(self, lifeline: int) -> int:
        """Of how many segments the memory is that this process was asked for."""
        session = self._sessions.find_lifeline(lifeline)
        return 0 if session is None else self._adoption.count_segments(session)

    def greet(
        self, lifeline: int, call: Call, peer: Peer, pidfd: ReceivedDescriptor | None, now_ns: int
    ) -> list[Sendable]:
        """A greeting came in on a lifeline. Takes the pidfd, whatever the answer."""
        message = call.message
        assert isinstance(message, Greeting)
        if call.is_late(now_ns):
            if pidfd is not None:
                pidfd.close()
            return []
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
            control=self._terms.control,
            pid=self._terms.pid,
            uid=self._terms.uid,
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
        """A lifeline came to its end, or a farewell on it. Only exits free what its session holds."""
        self.faults.attempt("close_lifeline", self._sessions.close_lifeline, lifeline)

    def hear_holding(self, lifeline: int, message: Holding) -> list[Sendable]:
        """Hears what a process has of former servers' memory. Returns what asks processes to let go of theirs."""
        session = self._sessions.find_lifeline(lifeline)
        return [] if session is None else [*hear_holding(session, lifeline, message)]

    def count_former(self, domain: str, own: int) -> int:
        """Bytes of former servers' memory that the domain's engines still have. `own`: the name of the present one."""
        return count_former(self._sessions, domain, own)

    def close_connection(self, connection: bytes) -> None:
        """Nothing can be sent on this control connection any more."""
        self._sessions.close_connection(connection)

    def handle(self, connection: bytes, call: Call, now_ns: int, *, uid: int | None = None) -> list[Sendable]:
        """A message came in on the control channel. The answer to it comes first, or a `Later` about it.

        `uid` is the connection's user by the kernel's word, without which a server of several domains serves nobody.
        """
        if call.is_late(now_ns) and not isinstance(call.message, OneWay):
            return []
        behind: list[Sendable] = []
        answer = self.faults.serve(call.message, self._serve, connection, call, now_ns, uid, behind)
        if callable(answer):
            return [Later(connection, call.message, call.number, answer), *behind]
        return behind if answer is None else [self._answer(connection, answer, call.number), *behind]

    def finish(self, later: Later, find: Callable[[], FoundLater]) -> list[Sendable]:
        """Ends a call that took long: what `later` was to find is found, and `find` returns or raises it."""

        def conclude() -> ServerMessage | None:
            found = find()
            return found() if callable(found) else found

        answer = self.faults.serve(later.request, conclude)
        return [] if answer is None else [self._answer(later.connection, answer, later.number)]

    def handle_guest(self, connection: bytes, call: Call, guest: Guest, now_ns: int) -> list[Sendable]:
        """A message came in over TCP, on a connection whose key nobody on the Unix socket can have. Its session is the
        connection's own and is called 0 there; its sender's clock says nothing here.
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
        """A frame came in that is no message. If it was a one-way message, it is counted."""
        behind: list[Sendable] = []
        answer: ServerMessage = answer_fault(fault)
        known = self._sessions.find_connection(connection)
        if known is not None and fault.op in ONE_WAY_OPS:
            arrival = known.one_way.accept(fault.number)
            if arrival is not Arrival.IN_ORDER:
                answer = self._reset(known, arrival, fault.op, behind)
        return [self._answer(connection, answer, fault.number), *behind]

    def overflow(self, connection: bytes, call: Call) -> list[Sendable]:
        """There was no room for this message of a connection; a lost one-way message ends its session's connection."""
        known = self._sessions.find_connection(connection)
        if not isinstance(call.message, OneWay) or known is None:
            return [self._answer(connection, refuse(call.message, ErrorCode.BUSY, "too many at once"), call.number)]
        behind: list[Sendable] = []
        answer = self._reset(known, known.one_way.overflow(), call.message.op, behind)
        return [self._answer(connection, answer, call.number), *behind]

    def tick(self) -> None:
        """To be called now and then, and when a process has exited: takes back what ended sessions held, and finds what
        subscribers have to be told."""
        self.faults.attempt("reclaim", self._sessions.reclaim)
        self.faults.attempt("identities", self._identities.tick)
        self.faults.attempt("sweep", self._sweep)
        self.faults.attempt("look", self._tiers.look)
        for domain in self.domains:
            self.faults.attempt("disks", self._feed.check_disks, domain)

    def advance(self, now_ns: int) -> list[Sendable]:
        """To be called in every turn of the loop: goes on with tiers and hints, and gives the answers that are due."""
        self.faults.attempt("hints", self._hints.advance, now_ns)
        return [*self._list_some(), *self._tiers.advance(now_ns)]

    @property
    def is_behind(self) -> bool:
        """The next turn has something to do whatever comes."""
        return self._feed.is_behind or bool(self._listings)

    def tell_cleared(self, domain: str, name_space: int) -> None:
        """All blocks of a registered identity are being forgotten."""
        self._hints.forget_spaces(domain, {name_space})
        fingerprint = self.domains[domain].fingerprints[name_space]
        self._feed.tell_cleared(Space(domain=domain, name_space=name_space, fingerprint=fingerprint))

    def tell_stored(self, space: Space, stored: StoredBlocks) -> None:
        """An engine's blocks became readable."""
        self._feed.tell_stored(space, stored)
        self._tiers.note_stored(space, stored)

    def tell_more(self) -> None:
        """To be called in every turn of the loop: tells of what has left, where that was too much for a tick."""
        if self._feed.is_behind:
            self.faults.attempt("sweep", self._sweep)

    def start_drain(
        self, now_ns: int, *, reason: ClosingReason = ClosingReason.REPLACED, deadline_ms: int = 0
    ) -> list[Sendable]:
        """Takes nothing new from now on. Returns what all processes are told, once. Who had a session may come back to
        it, and is told then."""
        if not self._drain.start(now_ns, deadline_ms):
            return []
        self.faults.attempt("hints", self._hints.let_all_go)
        after_ms = self._terms.successor_after_ms if reason is ClosingReason.REPLACED else 0
        closing = self._closing = Closing(reason=reason, retry_after_ms=after_ms)
        return [ToLifeline(lifeline, closing) for session in self._sessions for lifeline in session.processes]

    @property
    def is_draining(self) -> bool:
        """The server has begun to end."""
        return self._drain.is_on

    def is_drained(self, now_ns: int) -> bool:
        """Says whether the server may end."""
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
        refusal = check_call(connection.agreed, message) or check_operator(self._terms, connection.session, message)
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
        """What was lost is not guessed: the session keeps what it holds and has to be greeted anew."""
        received = connection.one_way.received
        line = f"one-way messages: {arrival.value} after number {received}; the session is quarantined"
        told = Quarantine(code=ErrorCode.OUT_OF_ORDER, message=line)
        behind += [ToLifeline(lifeline, told) for lifeline in connection.session.processes]
        self._sessions.quarantine(connection.session)
        return Error(code=ErrorCode.OUT_OF_ORDER, message=line, about_op=op)

    def _answer(self, connection: bytes, answer: ServerMessage, number: int) -> ToConnection:
        self._insight.note_answer(answer)
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
        """One of a connection at a time: a listing takes a thousand times as long as most other calls."""
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
        """At once, and not on the thread of long calls: events of what changes meanwhile come behind the answer."""
        session = connection.session
        cache = session.domain.cache
        if cache is None:
            return refuse(message, ErrorCode.BUSY, "the memory is not there yet")
        if message.name_space not in session.domain.fingerprints:
            return refuse(message, ErrorCode.NOT_FOUND, f"there is no namespace {message.name_space}")
        most = self._terms.limits.listed_blocks if session.guest is None else EVENT_BLOCKS
        listed = cache.list_blocks(message.name_space, first=message.first, limit=most)
        return BlocksListed(
            next=listed.next, hashes=listed.hashes, parents=listed.parents, groups=listed.groups.tobytes()
        )

    def _count_draining(self) -> Draining:
        caches = [domain.cache for domain in self.domains.values() if domain.cache is not None]
        return describe_draining((cache.stats for cache in caches), len(self._sessions))

    def _refuse_draining(self, message: ClientMessage) -> Error:
        refusal = refuse(message, ErrorCode.DRAINING, "this server ends, nothing new is taken")
        return replace(refusal, retry_after_ms=self._terms.successor_after_ms)
