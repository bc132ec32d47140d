"""Which engines there are: processes by their lifelines, one session of the cache for all processes of an engine.

       last lifeline ends,
OPEN ──one-way messages out of order──► QUARANTINED ──all its processes have exited──► gone
  ▲                                          │
  └──── greeting with former_session ────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from kvoffload.cache import LocalCache, SessionId
from kvoffload.packets import ReceivedDescriptor
from kvoffload.protocol import Agreement, Error, ErrorCode, Greeting, InboundSequence, Role
from kvoffload.server.common.refusal import refuse
from kvoffload.server.common.shares import has_shares
from kvoffload.server.sessions.domain import Domain, choose_domain
from kvoffload.server.sessions.session import (
    CACHE_SESSION_BITS,
    Connection,
    EngineSession,
    Guest,
    Peer,
    Process,
)
from kvoffload.server.sessions.settings import ServerLimits

logger = logging.getLogger(__name__)


class SessionTable:
    """Belongs to the thread of the server's core.

    A session's number is hard to guess, as a control connection shows nothing else of who it is. Its lower half is the
    cache's own number for it, so that a server that adopts the memory knows what the engine speaks of.
    """

    def __init__(
        self,
        domains: Mapping[str, Domain],
        *,
        boot_id: int,
        limits: ServerLimits,
        draw: Callable[[], int],
        on_disconnect: Callable[[bytes], None],
    ) -> None:
        """`draw` returns random numbers of 32 bits. `on_disconnect` is called for every control connection that
        ends."""
        self._domains = domains
        self._boot_id = boot_id
        self._limits = limits
        self._draw = draw
        self._on_disconnect = on_disconnect
        self._by_number: dict[int, EngineSession] = {}
        self._by_engine: dict[tuple[str, int, str], EngineSession] = {}
        """Open sessions by their engine's key."""
        self._by_lifeline: dict[int, EngineSession] = {}
        self._by_connection: dict[bytes, Connection] = {}
        self._guests: dict[bytes, EngineSession] = {}
        """Sessions of guests by connection. The one that was silent longest comes first."""

    def __iter__(self) -> Iterator[EngineSession]:
        """Yields open and quarantined sessions."""
        return iter(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)

    def find(self, number: int) -> EngineSession | None:
        return self._by_number.get(number)

    def find_lifeline(self, lifeline: int) -> EngineSession | None:
        return self._by_lifeline.get(lifeline)

    def greet(
        self,
        lifeline: int,
        greeting: Greeting,
        peer: Peer,
        pidfd: ReceivedDescriptor | None,
        *,
        may_open: bool = True,
    ) -> tuple[EngineSession, bool] | Error:
        """Returns the session that the process belongs to now, and whether it goes on with what it held. Takes the
        pidfd.

        Without `may_open`, a process for which there is no session is refused with DRAINING.
        """
        try:
            found = self._admit(lifeline, greeting, peer, pidfd, may_open)
            kept = not isinstance(found, Error)
        except BaseException:
            kept = False
            raise
        finally:
            if not kept and pidfd is not None:
                pidfd.close()
        return found

    def hear_guest(self, key: bytes) -> EngineSession | None:
        """Returns the session of a connection over TCP, if it has one, and notes that the connection is not silent."""
        session = self._guests.pop(key, None)
        if session is not None:
            self._guests[key] = session
        return session

    def open_guest(self, key: bytes, guest: Guest) -> EngineSession | None:
        """Opens a session for a connection that has none, until that is closed. None: there are too many sessions."""
        assert key not in self._guests
        if len(self._guests) >= self._limits.guests:
            self._drop(next(iter(self._guests.values())))
        if len(self._by_number) >= self._limits.sessions:
            return None
        session = EngineSession(
            number=0, domain=self._domains[guest.domain], engine="", uid=-1, is_observer=True, guest=guest
        )
        self._number(session, 0)
        self._guests[key] = session
        return session

    def may_connect(self, key: bytes, session: EngineSession, uid: int | None) -> bool:
        """Whether a connection of this user may speak for the session. `uid` is None if there is only one domain, where
        users are not told apart."""
        if session.guest is not None:
            return self._guests.get(key) is session
        return uid is None or uid == session.uid

    def close_lifeline(self, lifeline: int) -> None:
        """Notes that the process is gone. With its last process the session is quarantined."""
        session = self._by_lifeline.pop(lifeline, None)
        if session is None:
            return
        process = session.processes.pop(lifeline)
        session.domain.former.change(process.former or {}, {})
        if process.pidfd is not None:
            process.pidfd.close()
        if session.processes:
            return
        self.quarantine(session)

    def quarantine(self, session: EngineSession) -> None:
        """Quarantines a session: it gets nothing new from here on, and its control connections end. A session that can
        hold nothing is removed."""
        session.is_open = False
        if self._by_engine.get(session.key) is session:
            del self._by_engine[session.key]
        for key in list(session.connections):
            self.close_connection(key)
        if session.cache_session is None or not _cache_of(session).quarantine_session(session.cache_session):
            self._drop(session)

    def reclaim(self) -> int:
        """Takes back what sessions held whose processes have all exited. Returns how many such sessions there were."""
        count = 0
        for domain in self._domains.values():
            ended = domain.cache.reclaim_ended() if domain.cache is not None else 0
            count += ended
            if ended:
                self._forget_ended(domain)
        return count

    def attach(self, domain: Domain) -> list[Process]:
        """Opens cache sessions for the sessions that came before the domain's memory. Returns all processes that wait
        for it."""
        waiting = [session for session in self if session.domain is domain and not session.is_observer]
        for session in waiting:
            try:
                self._open_in_cache(session)
            except RuntimeError as fault:
                # In adopted memory other sessions may have all places. The engine connects again.
                logger.warning("session %x ends: the memory has no place for it: %s", session.number, fault)
                self.quarantine(session)
                continue
            for process in session.processes.values():
                pidfd, process.pidfd = process.pidfd, None
                if pidfd is not None and session.is_open:
                    self._add_waiting(session, pidfd)
        return [process for session in waiting if session.is_open for process in session.processes.values()]

    def connect(self, key: bytes, session: EngineSession, agreed: Agreement) -> Connection:
        """Opens a connection after an accepted hello, with all counts at their beginning. At the bound the session's
        connection that was silent longest is closed."""
        self._disconnect(key)
        if len(session.connections) >= self._limits.session_connections:
            self.close_connection(next(iter(session.connections)))
        connection = Connection(key=key, session=session, agreed=agreed, one_way=InboundSequence())
        session.connections[key] = connection
        self._by_connection[key] = connection
        return connection

    def find_connection(self, key: bytes) -> Connection | None:
        connection = self._by_connection.get(key)
        if connection is not None:
            # The connection is not silent, so it moves to the end of the line.
            connections = connection.session.connections
            if len(connections) > 1:
                connections[key] = connections.pop(key)
        return connection

    def close_connection(self, key: bytes) -> None:
        """Ends a connection, and a guest's session with it."""
        self._disconnect(key)
        guest = self._guests.get(key)
        if guest is not None:
            self._drop(guest)

    def _disconnect(self, key: bytes) -> None:
        connection = self._by_connection.pop(key, None)
        if connection is not None:
            del connection.session.connections[key]
            self._on_disconnect(key)

    def _admit(
        self, lifeline: int, greeting: Greeting, peer: Peer, pidfd: ReceivedDescriptor | None, may_open: bool
    ) -> tuple[EngineSession, bool] | Error:
        domain = choose_domain(self._domains, greeting, peer.uid)
        if isinstance(domain, Error):
            return domain
        is_observer = greeting.role is Role.OBSERVER
        if pidfd is None and not is_observer:
            return refuse(greeting, ErrorCode.MALFORMED, "no pidfd came with it")
        # A second greeting on the same lifeline is that of a new process.
        self.close_lifeline(lifeline)
        session = self._find_to_join(domain, greeting, peer.uid)
        if session is None:
            spent = self._take_spent(domain, peer) if may_open and not is_observer else None
            refusal = None if spent is not None else self._refuse_new(domain, greeting, peer.uid, may_open)
            if refusal is not None:
                return refusal
            session = self._open(domain, greeting, peer.uid, spent)
        elif len(session.processes) >= self._limits.session_processes:
            return refuse(greeting, ErrorCode.BUSY, f"the session has {len(session.processes)} processes")
        try:
            kept = self._watch_process(session, pidfd)
        except ValueError as fault:
            if not session.processes:
                self.quarantine(session)
            return refuse(greeting, ErrorCode.MALFORMED, str(fault))
        session.note_process(peer.pid)
        session.processes[lifeline] = Process(
            lifeline=lifeline,
            role=greeting.role,
            rank=greeting.rank,
            peer=peer,
            pidfd=kept,
            wants_express=greeting.wants_express,
            wants_warnings=greeting.wants_warnings,
            heeds_shrinking=greeting.heeds_shrinking,
        )
        self._by_lifeline[lifeline] = session
        return session, self._is_former(session, greeting)

    def _refuse_new(self, domain: Domain, greeting: Greeting, uid: int, may_open: bool) -> Error | None:
        if not may_open:
            return refuse(greeting, ErrorCode.DRAINING, "there is no session to come back to")
        of_user = sum(session.uid == uid for session in self)
        of_domain = sum(session.domain is domain for session in self)
        if not has_shares(of_user, of_domain, total=len(self), limit=self._limits.sessions):
            line = f"there are {len(self)} sessions, {of_user} of user {uid} and {of_domain} of the domain"
            return refuse(greeting, ErrorCode.BUSY, line)
        return None

    def _take_spent(self, domain: Domain, peer: Peer) -> SessionId | None:
        """Returns the cache's number of a session that only this process had, that is over, and that holds nothing. The
        session is removed: the process gets another one with this number, and so may greet as often as it likes."""
        for session in list(self):
            is_its_own = session.domain is domain and session.uid == peer.uid and session.only_pid == peer.pid != 0
            number = session.cache_session
            if session.is_open or not is_its_own or number is None or _cache_of(session).held_bytes(number):
                continue
            if _reopen_in_cache(session):
                self._drop(session)
                return number
        return None

    def _find_to_join(self, domain: Domain, greeting: Greeting, uid: int) -> EngineSession | None:
        """Returns the engine's open session, or the quarantined one that it names."""
        if greeting.role is Role.OBSERVER:
            return None
        current = self._by_engine.get((domain.name, uid, greeting.engine))
        if current is not None:
            # The lifelines of an engine that has just died may still be open. A new engine must not join its session.
            self.reclaim()
            if _reopen_in_cache(current):
                return current
            self.quarantine(current)
        former = self._find_former(domain, greeting)
        if former is None or former.key != (domain.name, uid, greeting.engine) or not _reopen_in_cache(former):
            return None
        former.is_open = True
        self._by_engine[former.key] = former
        return former

    def _find_former(self, domain: Domain, greeting: Greeting) -> EngineSession | None:
        """Finds a session by its number, by the number that `registered` gave it, or by its number in adopted
        memory."""
        number = greeting.former_session
        if greeting.former_boot_id == self._boot_id:
            return self._by_number.get(number) or next((session for session in self if session.resume == number), None)
        if 0 != domain.adopted_boot_id == greeting.former_boot_id:
            number %= 1 << CACHE_SESSION_BITS
            return next((one for one in self if one.domain is domain and one.cache_session == number), None)
        return None

    def _open(
        self, domain: Domain, greeting: Greeting, uid: int, cache_session: SessionId | None = None
    ) -> EngineSession:
        """Opens a session with `cache_session`, which the cache has opened, or else with a new one of the cache."""
        is_observer = greeting.role is Role.OBSERVER
        session = EngineSession(number=0, domain=domain, engine=greeting.engine, uid=uid, is_observer=is_observer)
        if greeting.former_boot_id != self._boot_id and not is_observer:
            session.former_boot_id = greeting.former_boot_id
            session.former_cache_session = greeting.former_session % (1 << CACHE_SESSION_BITS)
        if cache_session is not None:
            session.cache_session = cache_session
        elif domain.cache is not None and not is_observer:
            self._open_in_cache(session)
        self._number(session, session.cache_session or session.former_cache_session)
        if not is_observer:
            self._by_engine[session.key] = session
        return session

    def _number(self, session: EngineSession, low: int) -> None:
        session.number = low
        while session.number == low or session.number in self._by_number:
            session.number = (self._draw() << CACHE_SESSION_BITS) + low
        self._by_number[session.number] = session

    def _open_in_cache(self, session: EngineSession) -> None:
        """Gives it the cache session that its engine had in adopted memory, if that can be had, else a new one."""
        cache, domain = _cache_of(session), session.domain
        former = SessionId(session.former_cache_session)
        is_adopted = former != 0 and 0 != domain.adopted_boot_id == session.former_boot_id
        owner = session.uid if domain.settings.is_shared else None
        if is_adopted and not self._is_taken(domain, former) and cache.reopen_session(former, owner=owner):
            session.cache_session = former
        else:
            session.cache_session = cache.open_session(held_limit_bytes=domain.settings.held_limit_bytes, owner=owner)

    def _is_taken(self, domain: Domain, cache_session: SessionId) -> bool:
        return any(other.domain is domain and other.cache_session == cache_session for other in self)

    def _is_former(self, session: EngineSession, greeting: Greeting) -> bool:
        if greeting.former_boot_id == self._boot_id:
            return greeting.former_session in (session.number, session.resume)
        former = greeting.former_session % (1 << CACHE_SESSION_BITS)
        is_adopted = 0 != session.domain.adopted_boot_id == greeting.former_boot_id
        return is_adopted and former == session.cache_session

    def _watch_process(self, session: EngineSession, pidfd: ReceivedDescriptor | None) -> ReceivedDescriptor | None:
        """Hands the pidfd to the cache, or returns it if it has to wait for the memory. ValueError: it is no pidfd."""
        if session.cache_session is None or pidfd is None:
            return pidfd
        self._add_pidfd(session, pidfd)
        return None

    def _add_pidfd(self, session: EngineSession, pidfd: ReceivedDescriptor) -> None:
        assert session.cache_session is not None
        _cache_of(session).add_process(session.cache_session, pidfd=pidfd.take())

    def _add_waiting(self, session: EngineSession, pidfd: ReceivedDescriptor) -> None:
        try:
            self._add_pidfd(session, pidfd)
        except ValueError:
            # It was no pidfd, and the process cannot be asked for another. Without one, memory might go while a copy
            # still runs.
            self.quarantine(session)

    def _forget_ended(self, domain: Domain) -> None:
        for session in [session for session in self if session.domain is domain and not session.is_open]:
            # A session that the cache does not know any more is one of those that were taken back.
            if session.cache_session is not None and not _cache_of(session).quarantine_session(session.cache_session):
                self._drop(session)

    def _drop(self, session: EngineSession) -> None:
        self._by_number.pop(session.number, None)
        for key in [key for key, guest in self._guests.items() if guest is session]:
            del self._guests[key]
        for key in list(session.connections):
            self._disconnect(key)
        for process in session.processes.values():
            self._by_lifeline.pop(process.lifeline, None)
            session.domain.former.change(process.former or {}, {})
            if process.pidfd is not None:
                process.pidfd.close()
        session.processes.clear()


def _cache_of(session: EngineSession) -> LocalCache:
    assert session.domain.cache is not None
    return session.domain.cache


def _reopen_in_cache(session: EngineSession) -> bool:
    """Opens a session in the cache again, with room for new processes. False: all its processes have exited, and it is
    being taken back."""
    return session.cache_session is None or _cache_of(session).reopen_session(session.cache_session)
