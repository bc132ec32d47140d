"""The handshake as a pure state function: what a server has, how far a process has come, its message; the next state.

NEW ──hello──► GREETED ──register──► REGISTERED
                  ▲                      │
                  └────────hello─────────┘        a refusal changes nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TypeAlias

from kvoffload.protocol.answers import Error
from kvoffload.protocol.faults import ErrorCode
from kvoffload.protocol.lifeline import Greeting
from kvoffload.protocol.message import PROTOCOL_MAX, PROTOCOL_MIN, ClientMessage, Phase
from kvoffload.protocol.opening import GroupTerms, Hello, HelloAccepted, Register
from kvoffload.protocol.shape import name_of


@dataclass(frozen=True, kw_only=True)
class HandshakeSettings:
    """A server's side of the handshake. With an empty `hash_algorithm` or `hash_seed` it accepts any."""

    capabilities: frozenset[str]
    domain: str
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    hash_algorithm: str = ""
    hash_seed: bytes = b""
    software: str = ""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far one process has come in its handshake with the server, and what was agreed."""

    phase: Phase = Phase.NEW
    protocol: int = 0
    capabilities: frozenset[str] = frozenset()
    register: Register | None = None
    """The accepted message, with which those of other processes of the session or identity are compared."""

    def describe(self, settings: HandshakeSettings) -> HelloAccepted:
        """Makes the answer to an accepted hello."""
        return HelloAccepted(
            protocol=self.protocol,
            capabilities=tuple(sorted(self.capabilities)),
            domain=settings.domain,
            software=settings.software,
        )


def advance(
    settings: HandshakeSettings, agreed: Agreement, message: Hello | Register, *, known: Register | None = None
) -> Agreement | Error:
    """Returns the next state, or a refusal to send, after which the old state stays.

    `known` is the register that was accepted from another process of the session, or else from any process with the
    same fingerprint.
    """
    if isinstance(message, Hello):
        protocol = agree_version(settings, message)
        if isinstance(protocol, Error):
            return protocol
        return Agreement(
            phase=Phase.GREETED,
            protocol=protocol,
            capabilities=settings.capabilities & frozenset(message.capabilities),
        )
    refusal = check_call(agreed, message)
    if refusal is not None:
        return refusal
    for field, ours, theirs in _compared(settings, message, known):
        if ours != theirs:
            return _refuse(message, field, ours, theirs)
    return replace(agreed, phase=Phase.REGISTERED, register=message)


def agree_version(settings: HandshakeSettings, message: Hello | Greeting) -> int | Error:
    """Returns the highest version that both have, if the domains agree too; else a refusal to send."""
    protocol = min(settings.protocol_max, message.protocol_max)
    if protocol < max(settings.protocol_min, message.protocol_min):
        ours = f"{settings.protocol_min} to {settings.protocol_max}"
        theirs = f"{message.protocol_min} to {message.protocol_max}"
        refusal = _refuse(message, "protocol", ours, theirs, code=ErrorCode.VERSION)
        if isinstance(message, Greeting):
            # The other side shows this line as it is, and its reader sits at the client.
            line = (
                f"the server is {_name_software(settings)} and has {ours}, the client is {_name_software(message)} and"
            )
            refusal = replace(refusal, message=f"{line} has {theirs}")
        return refusal
    if message.domain not in ("", settings.domain):
        return _refuse(message, "domain", settings.domain, message.domain)
    return protocol


def check_call(agreed: Agreement, message: ClientMessage) -> Error | None:
    """Returns the answer if the agreement does not permit this operation."""
    if message.needs > agreed.phase:
        if agreed.phase is Phase.NEW:
            return _answer(message, ErrorCode.NOT_GREETED, "came before hello was accepted")
        return _answer(message, ErrorCode.NOT_REGISTERED, "came before register was accepted")
    if agreed.phase is not Phase.NEW and message.since > agreed.protocol:
        line = f"is of protocol version {message.since}, agreed is {agreed.protocol}"
        return _answer(message, ErrorCode.UNKNOWN_OPERATION, line)
    if message.capability and message.capability not in agreed.capabilities:
        return _answer(message, ErrorCode.UNSUPPORTED, f"needs capability {message.capability}, not agreed")
    return None


Value: TypeAlias = str | int | bytes


def _compared(
    settings: HandshakeSettings, message: Register, known: Register | None
) -> Iterator[tuple[str, Value, Value]]:
    """Yields a field's name, its value here and its value there. Fields that explain a difference come before the
    fingerprint, which only shows that there is one."""
    if settings.hash_algorithm:
        yield "hash_algorithm", settings.hash_algorithm, message.hash_algorithm
    if settings.hash_seed:
        yield "hash_seed", settings.hash_seed, message.hash_seed
    if known is None:
        return
    yield "hash_algorithm", known.hash_algorithm, message.hash_algorithm
    yield "hash_seed", known.hash_seed, message.hash_seed
    parts, other_parts = ({part.name: part.value for part in side.identity} for side in (known, message))
    for name in sorted(parts.keys() & other_parts.keys()):
        yield f"identity.{name}", parts[name], other_parts[name]
    yield "hash_block_size", known.hash_block_size, message.hash_block_size
    yield "groups", len(known.groups), len(message.groups)
    for at, (ours, other) in enumerate(zip(known.groups, message.groups, strict=False)):
        for field in fields(GroupTerms):
            yield f"groups[{at}].{field.name}", getattr(ours, field.name), getattr(other, field.name)
    yield "ranks", known.ranks, message.ranks
    yield "fingerprint", known.fingerprint, message.fingerprint


def _refuse(
    message: ClientMessage, field: str, ours: Value, theirs: Value, *, code: ErrorCode = ErrorCode.MISMATCH
) -> Error:
    return Error(
        code=code,
        message=f"{name_of(type(message))}: {field} is {_shorten(ours)} here, {_shorten(theirs)} there",
        about_op=message.op,
        field=field,
        server_value=_show(ours),
        client_value=_show(theirs),
    )


def _name_software(side: HandshakeSettings | Greeting) -> str:
    return side.software or "of an unknown version"


def _answer(message: ClientMessage, code: ErrorCode, line: str) -> Error:
    return Error(code=code, message=f"{name_of(type(message))} {line}", about_op=message.op)


def _show(value: Value) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return value.name if isinstance(value, Enum) else str(value)


def _shorten(value: Value) -> str:
    text = _show(value)
    limit = 12 if isinstance(value, bytes) else 40
    return (text if len(text) <= limit else f"{text[:limit]}...") or "(nothing)"
