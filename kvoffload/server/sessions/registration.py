"""How an engine says what its blocks are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvoffload.cache import CacheGeometry
from kvoffload.protocol import Agreement, Error, ErrorCode, Introduce, Register, Registered, advance
from kvoffload.server.event_feed import Space
from kvoffload.server.outbox import OpenExpress
from kvoffload.server.refusal import refuse
from kvoffload.server.sessions.domain import Domain, read_geometry
from kvoffload.server.sessions.session import Connection, EngineSession, Registration
from kvoffload.server.terms import ServerLimits
from kvoffload.types import Fingerprint

OnForgotten = Callable[[str, Mapping[int, bytes]], None]
"""Hears of a domain's forgotten identities: its name, and fingerprints by namespace."""


class Identities:
    """Those of all domains. Belongs to the thread of the server's core.

    An identity is known as long as it has blocks or slots in memory, a session that registered it is there, open or
    quarantined, a tier has something to do for it, or a request of a peer goes on with it. Others are forgotten once
    their places are wanted, and their numbers are nobody's from then on.
    """

    def __init__(self, limits: ServerLimits, sessions: Iterable[EngineSession], on_forgotten: OnForgotten) -> None:
        """`sessions`: all of this moment, whenever it is asked."""
        self._limits = limits
        self._sessions = sessions
        self._on_forgotten = on_forgotten

    def register(self, connection: Connection, message: Register) -> Registered | Error:
        """The namespace of the session's blocks, the same for all its processes. A refusal changes nothing but what is
        forgotten."""
        session, domain = connection.session, connection.session.domain
        if session.is_observer:
            return refuse(message, ErrorCode.NOT_ALLOWED, "an observer has no blocks")
        if domain.cache is None:
            return refuse(message, ErrorCode.BUSY, "the memory is not there yet")
        agreed = _compare(connection, message)
        if isinstance(agreed, Error):
            return agreed
        is_new = message.fingerprint not in domain.fingerprints.values()
        refusal = self._check_share(domain, message, session.uid) if is_new else None
        tenant = refusal or domain.choose_tenant(message, session.uid)
        if isinstance(tenant, Error):
            return tenant
        name_space = self.open(domain, message)
        if isinstance(name_space, Error):
            return name_space
        if is_new:
            domain.brought[name_space] = session.uid
        connection.agreed = agreed
        tenants = domain.list_tenants(session.uid)
        session.registration = Registration(name_space=name_space, register=message, tenant=tenant, tenants=tenants)
        return Registered(
            name_space=name_space,
            held_limit_bytes=domain.terms.held_limit_bytes,
            resume=session.resume,
            tenants=tuple(tenants),
        )

    def open(self, domain: Domain, message: Register | Introduce) -> int | Error:
        """The number of an identity, known or new. A refusal changes nothing but what is forgotten."""
        limit, known = self._limits.namespaces, domain.fingerprints
        is_known = message.fingerprint in known.values()
        if not is_known and len(known) >= limit:
            self._forget(domain)
            if len(known) >= limit:
                return refuse(message, ErrorCode.BUSY, f"there are {len(known)} identities")
        geometry = read_geometry(message)
        name_space = _open(domain, message, geometry)
        if isinstance(name_space, Error) and name_space.code is ErrorCode.BUSY:
            # Adopted memory has identities that nobody has named to this server.
            self._forget(domain)
            name_space = _open(domain, message, geometry)
        if isinstance(name_space, Error):
            return name_space
        if isinstance(message, Register):
            domain.registers.setdefault(message.fingerprint, message)
        domain.fingerprints[name_space] = message.fingerprint
        domain.geometries[name_space] = geometry
        _teach_tiers(domain, name_space)
        return name_space

    def _check_share(self, domain: Domain, message: Register, uid: int) -> Error | None:
        """Whether engines of this user may bring another identity."""
        limit = self._limits.user_namespaces
        if _count_brought(domain, uid) >= limit:
            self._forget(domain)
            if _count_brought(domain, uid) >= limit:
                return refuse(message, ErrorCode.BUSY, f"engines of user {uid} have brought {limit} identities")
        return None

    def _forget(self, domain: Domain) -> None:
        """Forgets the identities that nobody knows any more."""
        assert domain.cache is not None
        registrations = (session.registration for session in self._sessions if session.domain is domain)
        kept = {one.name_space for one in registrations if one is not None}
        unknown = domain.fingerprints.keys() - kept - domain.cache.stats.used_by.keys()
        if domain.traffic is not None:
            unknown = domain.traffic.forget_spaces(unknown)
        forgotten = set(domain.cache.forget_namespaces(domain.fingerprints.keys() - unknown))
        self._on_forgotten(domain.name, {name_space: domain.forget(name_space) for name_space in unknown & forgotten})
        for name_space in unknown - forgotten:
            # A call of a session that has just ended goes on with it.
            _teach_tiers(domain, name_space)


def open_express(session: EngineSession) -> list[OpenExpress]:
    """For those of its processes that want one and have none, once all of it is known."""
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


def _compare(connection: Connection, message: Register) -> Agreement | Error:
    """With what this session said before, or else anybody with this fingerprint."""
    domain, before = connection.session.domain, connection.session.registration
    known = before.register if before is not None else domain.registers.get(message.fingerprint)
    return advance(domain.handshake, connection.agreed, message, known=known)


def _count_brought(domain: Domain, uid: int) -> int:
    return sum(brought_by == uid for brought_by in domain.brought.values())


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
