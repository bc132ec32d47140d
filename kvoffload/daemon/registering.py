"""How an engine says what its blocks are."""

from __future__ import annotations

from kvoffload.daemon.domain import Domain, read_geometry
from kvoffload.daemon.event_feed import Space
from kvoffload.daemon.refusal import refuse
from kvoffload.daemon.session import Connection, EngineSession, Registration
from kvoffload.daemon.to_send import OpenExpress
from kvoffload.protocol import Agreement, Error, ErrorCode, Introduce, Register, Registered, advance
from kvoffload.types import Fingerprint


def register(connection: Connection, message: Register, *, namespace_limit: int, user_limit: int) -> Registered | Error:
    """The namespace of the session's blocks, the same for all its processes. A refusal changes nothing."""
    session, domain = connection.session, connection.session.domain
    if session.is_observer:
        return refuse(message, ErrorCode.NOT_ALLOWED, "an observer has no blocks")
    if domain.cache is None:
        return refuse(message, ErrorCode.BUSY, "the memory is not there yet")
    agreed = _compare(connection, message)
    if isinstance(agreed, Error):
        return agreed
    is_new = message.fingerprint not in domain.fingerprints.values()
    refusal = _check_share(domain, message, session.uid, user_limit) if is_new else None
    tenant = refusal or domain.choose_tenant(message, session.uid)
    if isinstance(tenant, Error):
        return tenant
    name_space = open_namespace(domain, message, namespace_limit)
    if isinstance(name_space, Error):
        return name_space
    domain.brought[session.uid] += is_new
    connection.agreed = agreed
    tenants = domain.list_tenants(session.uid)
    session.registration = Registration(name_space=name_space, register=message, tenant=tenant, tenants=tenants)
    return Registered(
        name_space=name_space,
        held_limit_bytes=domain.terms.held_limit_bytes,
        resume=session.resume,
        tenants=tuple(tenants),
    )


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


def _check_share(domain: Domain, message: Register, uid: int, user_limit: int) -> Error | None:
    """Whether engines of this user may bring another identity."""
    if domain.brought[uid] < user_limit:
        return None
    return refuse(message, ErrorCode.BUSY, f"engines of user {uid} have brought {user_limit} identities")


def _compare(connection: Connection, message: Register) -> Agreement | Error:
    """With what this session said before, or else anybody with this fingerprint."""
    domain, before = connection.session.domain, connection.session.registration
    known = before.register if before is not None else domain.registers.get(message.fingerprint)
    return advance(domain.handshake, connection.agreed, message, known=known)


def open_namespace(domain: Domain, message: Register | Introduce, namespace_limit: int) -> int | Error:
    """Of an identity, known or new. A refusal changes nothing."""
    assert domain.cache is not None
    known = domain.fingerprints
    if len(known) >= namespace_limit and message.fingerprint not in known.values():
        return refuse(message, ErrorCode.BUSY, f"there are {len(known)} identities")
    geometry = read_geometry(message)
    try:
        name_space = domain.cache.open_namespace(Fingerprint(message.fingerprint), geometry)
    except ValueError as fault:
        return refuse(message, ErrorCode.MISMATCH, str(fault))
    except RuntimeError as fault:
        # Adopted memory has identities that nobody has named to this server.
        return refuse(message, ErrorCode.BUSY, str(fault))
    if isinstance(message, Register):
        domain.registers.setdefault(message.fingerprint, message)
    domain.fingerprints[name_space] = message.fingerprint
    domain.geometries[name_space] = geometry
    if domain.traffic is not None:
        domain.traffic.learn(name_space, message.fingerprint, geometry)
    return name_space
