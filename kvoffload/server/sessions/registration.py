"""Registers the identities of engines' blocks, and forgets those that are not used any more."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice

from kvoffload.cache import CacheGeometry
from kvoffload.protocol import Agreement, Error, ErrorCode, Introduce, Register, Registered, advance
from kvoffload.protocol.differences import differ_by_setting, tell_differences
from kvoffload.protocol.opening import find_model
from kvoffload.server.common.refusal import refuse
from kvoffload.server.sessions.domain import Domain, sizes_of
from kvoffload.server.sessions.event_feed import Space
from kvoffload.server.sessions.outbox import OpenExpress
from kvoffload.server.sessions.session import Connection, EngineSession, Registration
from kvoffload.server.sessions.settings import ServerLimits
from kvoffload.types import Fingerprint

logger = logging.getLogger(__name__)

_AT_ONCE = 256
"""Divisor of a limit on identities: one of so many gives way at a time, those that no session has registered for
longest."""
MAX_COMPARED = 16
"""Number of other identities, the latest ones, with which a new engine's settings are compared."""
MAX_TOLD = 64
"""Number of different lines about engines that differ by a setting. Later ones are not logged, so that no user can
fill the log."""
_TRIES = 4
"""Attempts, each with other identities if blocks of the chosen ones are leased or on their way."""

OnForgotten = Callable[[str, Mapping[int, bytes]], None]
"""Called with a domain's forgotten identities: its name, and fingerprints by namespace."""

OnEvict = Callable[[str, Set[int]], None]
"""Called with a domain's identities before their blocks are evicted."""


class Identities:
    """The identities of all domains. Belongs to the thread of the server's core.

    An identity is known as long as it has blocks or slots in memory, a session that registered it is open or
    quarantined, a tier has something to do for it, or a request of a peer is using it. Others are forgotten once their
    places are wanted, and their numbers then name nothing. If all have blocks, those that no session has registered for
    longest give way, with their blocks.
    """

    def __init__(
        self,
        limits: ServerLimits,
        sessions: Iterable[EngineSession],
        on_forgotten: OnForgotten,
        *,
        on_evict: OnEvict = lambda *_: None,
    ) -> None:
        """Takes its limits. Iterating over `sessions` yields all sessions of that moment, each time."""
        self._limits = limits
        self._sessions = sessions
        self._on_forgotten = on_forgotten
        self._on_evict = on_evict
        self._told: set[str] = set()
        """Lines about engines that differ by a setting. Each is logged once, and no more than MAX_TOLD of them."""

    def register(self, connection: Connection, message: Register) -> Registered | Error:
        """Returns the namespace of the session's blocks, the same for all its processes. A refusal may have made others
        be forgotten or give way, and changes nothing else."""
        session, domain = connection.session, connection.session.domain
        if session.is_observer:
            return refuse(message, ErrorCode.NOT_ALLOWED, "an observer has no blocks")
        if domain.cache is None:
            return refuse(message, ErrorCode.BUSY, "the memory is not there yet")
        agreed = _compare(connection, message)
        if isinstance(agreed, Error):
            return agreed
        tenant = domain.choose_tenant(message, session.uid)
        if isinstance(tenant, Error):
            return tenant
        name_space = self.open(domain, message, uid=session.uid)
        if isinstance(name_space, Error):
            return name_space
        connection.agreed = agreed
        tenants = domain.list_tenants(session.uid)
        session.registration = Registration(name_space=name_space, register=message, tenant=tenant, tenants=tenants)
        self._tell_differing(domain, name_space)
        return Registered(
            name_space=name_space,
            held_limit_bytes=domain.settings.held_limit_bytes,
            resume=session.resume,
            tenants=tuple(tenants),
        )

    def open(self, domain: Domain, message: Register | Introduce, *, uid: int | None = None) -> int | Error:
        """Returns the number of an identity, known or new, for engines of this user; `uid` is None for a peer. A
        refusal may have made others be forgotten or give way, and changes nothing else."""
        geometry = CacheGeometry.read(message)
        is_known = message.fingerprint in domain.fingerprints.values()
        refusal = None if is_known else self._make_place(domain, message, geometry, uid)
        if refusal is not None:
            return refusal
        name_space = _open(domain, message, geometry)
        if isinstance(name_space, Error) and name_space.code is ErrorCode.BUSY:
            # Adopted memory has identities that no engine has named to this server.
            self._forget(domain)
            name_space = _open(domain, message, geometry)
            if isinstance(name_space, Error) and name_space.code is ErrorCode.BUSY:
                self._evict(domain, _list_unnamed(domain)[: self._limits.namespaces])
                name_space = _open(domain, message, geometry)
        if isinstance(name_space, Error):
            return name_space
        if isinstance(message, Register):
            domain.registers.setdefault(message.fingerprint, message)
        domain.learn(name_space, message.fingerprint, geometry, uid)
        _teach_tiers(domain, name_space)
        return name_space

    def tick(self) -> None:
        """Notes that the identities of present sessions are in use. The event loop calls it periodically."""
        for session in self._sessions:
            if session.registration is not None:
                session.domain.note_use(session.registration.name_space)

    def _tell_differing(self, domain: Domain, name_space: int) -> None:
        """Logs once that an engine shares no blocks with one that joined before, because a setting differs. The values
        are told if both engines are one user's."""
        ours = domain.registers[domain.fingerprints[name_space]]
        others = (number for number in reversed(domain.fingerprints) if number != name_space)
        for other in islice(others, MAX_COMPARED):
            theirs = domain.registers.get(domain.fingerprints[other])
            if theirs is None or not differ_by_setting(ours, theirs):
                continue
            is_own = domain.brought.get(name_space) == domain.brought.get(other)
            line = _describe_differing(ours, theirs, with_values=is_own)
            if line not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(line)
                logger.warning("%s", line)
            return

    def _make_place(
        self, domain: Domain, message: Register | Introduce, geometry: CacheGeometry, uid: int | None
    ) -> Error | None:
        """Makes place for another identity. At a bound, unused identities are forgotten first. Then those that no
        session has registered for longest give way, with their blocks: at a user's bound those of this user, else those
        of all."""
        if _find_lack(domain, self._limits, geometry, uid) is None:
            return None
        self._forget(domain)
        tried: set[int] = set()
        for _ in range(_TRIES):
            lack = _find_lack(domain, self._limits, geometry, uid)
            if lack is None:
                return None
            victims = _choose_victims(domain, lack, self._list_idle(domain, lack, tried))
            if not victims or not self._evict(domain, victims):
                break
            tried.update(victims)
        lack = _find_lack(domain, self._limits, geometry, uid)
        return None if lack is None else refuse(message, ErrorCode.BUSY, lack.line)

    def _list_idle(self, domain: Domain, lack: _Lack, tried: Set[int]) -> list[int]:
        """Returns identities that no session has registered, in the order of their last use."""
        spared = self._list_registered(domain) | tried
        return [
            number
            for number in domain.used_last
            if number not in spared and (lack.uid is None or domain.brought.get(number) == lack.uid)
        ]

    def _list_registered(self, domain: Domain) -> set[int]:
        registrations = (session.registration for session in self._sessions if session.domain is domain)
        return {one.name_space for one in registrations if one is not None}

    def _evict(self, domain: Domain, name_spaces: Sequence[int]) -> bool:
        """Evicts the blocks of these identities, and forgets those that have none then. False: another thread has to
        finish first."""
        assert domain.cache is not None
        if domain.cache.is_evicting:
            return False
        self._on_evict(domain.name, set(name_spaces))
        if not domain.cache.leave_evict(name_spaces):
            return False
        logger.info("domain %r: %d identities that no engine has registered gave way", domain.name, len(name_spaces))
        self._forget(domain)
        return True

    def _forget(self, domain: Domain) -> None:
        """Forgets the identities that no session, block or tier uses any more."""
        assert domain.cache is not None
        unknown = domain.fingerprints.keys() - self._list_registered(domain) - domain.cache.used_by_each().keys()
        if domain.traffic is not None:
            unknown = domain.traffic.forget_spaces(unknown)
        forgotten = set(domain.cache.forget_namespaces(domain.fingerprints.keys() - unknown))
        self._on_forgotten(domain.name, {name_space: domain.forget(name_space) for name_space in unknown & forgotten})
        for name_space in unknown - forgotten:
            # A call of a session that has just ended goes on with it.
            _teach_tiers(domain, name_space)


def open_express(session: EngineSession) -> list[OpenExpress]:
    """Returns express channels to open for those of the session's processes that want one and have none, once the
    session has registered and has memory."""
    registration, cache_session = session.registration, session.cache_session
    if registration is None or cache_session is None:
        return []
    space = Space(
        domain=session.domain.name,
        name_space=registration.name_space,
        fingerprint=registration.register.fingerprint,
    )
    tenants = tuple(registration.tenants.values())
    wanting = [process for process in session.processes.values() if process.wants_express]
    for process in wanting:
        process.wants_express = False
    return [
        OpenExpress(process.lifeline, session.number, cache_session, registration.tenant, tenants, space, session.owner)
        for process in wanting
    ]


def _describe_differing(ours: Register, theirs: Register, *, with_values: bool) -> str:
    told = ", ".join(
        f"{one.name} {one.ours} here, {one.theirs} in the engine that joined before"
        if with_values and one.is_readable
        else f"{one.name} is another one than in the engine that joined before"
        for one in tell_differences(ours, theirs)
    )
    return (
        f"an engine of {find_model(ours.identity)} has the same weights as one before and shares no blocks with it, as "
        f"settings differ: {told}. Start both with the same settings"
    )


def _compare(connection: Connection, message: Register) -> Agreement | Error:
    """Compares a registration with the session's former one, or else with that of any engine with this fingerprint."""
    domain, before = connection.session.domain, connection.session.registration
    known = before.register if before is not None else domain.registers.get(message.fingerprint)
    if before is None and known is not None:
        # Engines that share units of heads need not have as many ranks; all else is in their fingerprint.
        known = replace(known, ranks=message.ranks)
    return advance(domain.handshake, connection.agreed, message, known=known)


@dataclass(frozen=True)
class _Lack:
    """The bound that leaves no place for one more identity."""

    line: str
    limit: int
    uid: int | None = None
    """The user whose bound it is; None: it is the domain's."""
    sizes: int = 0
    """Number of record sizes that have to go; 0: identities have to go."""


def _find_lack(domain: Domain, limits: ServerLimits, geometry: CacheGeometry, uid: int | None) -> _Lack | None:
    sizes = sizes_of(geometry)
    if uid is not None:
        count = sum(brought_by == uid for brought_by in domain.brought.values())
        line = f"engines of user {uid} have brought {count} identities"
        if count >= limits.user_namespaces:
            return _Lack(line, limits.user_namespaces, uid)
        excess = _count_sizes(domain.user_sizes.get(uid, {}), sizes) - limits.user_record_sizes
        if excess > 0:
            return _Lack(f"{line} and too many record sizes", limits.user_namespaces, uid, excess)
    line = f"there are {len(domain.fingerprints)} identities"
    if len(domain.fingerprints) >= limits.namespaces:
        return _Lack(line, limits.namespaces)
    excess = _count_sizes(domain.sizes, sizes) - limits.record_sizes
    return None if excess <= 0 else _Lack(f"{line} and too many record sizes", limits.namespaces, None, excess)


def _count_sizes(known: Mapping[int, int], more: Set[int]) -> int:
    return len(known) + sum(size not in known for size in more)


def _choose_victims(domain: Domain, lack: _Lack, idle: Sequence[int]) -> Sequence[int]:
    """Chooses several at once, because finding their blocks takes a look at all blocks in memory."""
    least = max(lack.limit // _AT_ONCE, 1)
    left = Counter(domain.sizes if lack.uid is None else domain.user_sizes[lack.uid])
    gone = 0
    for count, number in enumerate(idle, start=1):
        sizes = sizes_of(domain.geometries[number])
        left.subtract(sizes)
        gone += sum(left[size] == 0 for size in sizes)
        if gone >= lack.sizes and count >= least:
            return idle[:count]
    return idle


def _list_unnamed(domain: Domain) -> list[int]:
    """Returns the identities of adopted memory that have blocks and that no engine has named to this server."""
    assert domain.cache is not None
    return [number for number in domain.cache.used_by_each() if number not in domain.fingerprints]


def _teach_tiers(domain: Domain, name_space: int) -> None:
    if domain.traffic is not None:
        domain.traffic.learn(name_space, domain.fingerprints[name_space], domain.geometries[name_space])


def _open(domain: Domain, message: Register | Introduce, geometry: CacheGeometry) -> int | Error:
    assert domain.cache is not None
    try:
        return domain.cache.open_namespace(Fingerprint(message.fingerprint), geometry)
    except ValueError as fault:
        return refuse(message, ErrorCode.MISMATCH, str(fault))
    except RuntimeError as fault:
        return refuse(message, ErrorCode.BUSY, str(fault))
