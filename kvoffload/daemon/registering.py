"""How an engine says what its blocks are."""

from __future__ import annotations

from kvoffload.daemon.domain import Domain, read_geometry
from kvoffload.daemon.refusal import refuse
from kvoffload.daemon.session import Connection, Registration
from kvoffload.protocol import Agreement, Error, ErrorCode, Register, Registered, advance
from kvoffload.types import Fingerprint


def register(connection: Connection, message: Register, *, namespace_limit: int) -> Registered | Error:
    """The namespace of the session's blocks, the same for all its processes. A refusal changes nothing."""
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
    name_space = _open_namespace(domain, message, namespace_limit)
    if isinstance(name_space, Error):
        return name_space
    connection.agreed = agreed
    session.registration = Registration(name_space=name_space, register=message, tenant=tenant)
    return Registered(name_space=name_space, held_limit_bytes=domain.terms.held_limit_bytes, resume=session.resume)


def _compare(connection: Connection, message: Register) -> Agreement | Error:
    """With what this session said before, or else anybody with this fingerprint."""
    domain, before = connection.session.domain, connection.session.registration
    known = before.register if before is not None else domain.registers.get(message.fingerprint)
    return advance(domain.handshake, connection.agreed, message, known=known)


def _open_namespace(domain: Domain, message: Register, namespace_limit: int) -> int | Error:
    assert domain.cache is not None
    if message.fingerprint not in domain.registers and len(domain.registers) >= namespace_limit:
        return refuse(message, ErrorCode.BUSY, f"there are {len(domain.registers)} identities")
    try:
        name_space = domain.cache.open_namespace(Fingerprint(message.fingerprint), read_geometry(message))
    except ValueError as fault:
        return refuse(message, ErrorCode.MISMATCH, str(fault))
    domain.registers.setdefault(message.fingerprint, message)
    domain.fingerprints[name_space] = message.fingerprint
    return name_space
