"""The records of the session table: an engine's session, its processes, its control connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffload.cache import SessionId
from kvoffload.packets import ReceivedDescriptor
from kvoffload.protocol import Agreement, InboundSequence, Register, Role
from kvoffload.server.sessions.domain import Domain

CACHE_SESSION_BITS = 32


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Who is at the other end of a lifeline, by the kernel's word."""

    pid: int
    uid: int
    gid: int = 0


@dataclass(frozen=True, kw_only=True)
class Guest:
    """Who is at the other end of a TCP connection, by its key: no process of this machine, so at most an observer."""

    domain: str
    name: str = ""
    """For logs."""
    is_operator: bool = False
    is_peer: bool = False
    """Another cache server, whose tier this one is: it may move records."""


@dataclass(kw_only=True)
class Process:
    """Is the process at one lifeline."""

    lifeline: int
    role: Role
    rank: int
    peer: Peer
    pidfd: ReceivedDescriptor | None
    """Until the cache has it."""
    wants_express: bool = False
    """Until it is given an express channel, or told that there is none to give."""
    wants_warnings: bool = False
    warned: int = 0
    """The number of the last warning that it was told."""
    former: Mapping[int, int] | None = None
    """Bytes of former memories that it has, by memory; None: it has said nothing."""
    asked: frozenset[int] = frozenset()
    """Of them, what it was asked to let go of."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What a session's blocks are."""

    name_space: int
    register: Register
    tenant: int
    tenants: Mapping[str, int] = field(default_factory=dict)
    """That a publish may name, by name; in their order."""


@dataclass(eq=False, kw_only=True)
class EngineSession:
    """One engine with all its processes. An observer has one of its own, without memory; a guest's ends with its only
    connection.
    """

    number: int
    domain: Domain
    engine: str
    uid: int
    """-1: a guest's."""
    is_observer: bool = False
    guest: Guest | None = None
    is_open: bool = True
    """Else it is quarantined: it gets nothing new, and keeps what it holds."""
    cache_session: SessionId | None = None
    """None: an observer's, or one that came before the memory did."""
    former_boot_id: int = 0
    former_cache_session: int = 0
    """What the engine's session was called in an old server's memory; it may be adopted."""
    processes: dict[int, Process] = field(default_factory=dict)
    """By lifeline."""
    only_pid: int = 0
    """The one process that it ever had, by the kernel's word; 0: it had others, too, or none."""
    joined: int = 0
    """Greetings of its processes so far."""
    parted: int = 0
    """Of them, those that said farewell: they copy nothing any more, though they may live on."""
    connections: dict[bytes, Connection] = field(default_factory=dict)
    """The one that was silent longest comes first."""
    registration: Registration | None = None

    @property
    def resume(self) -> int:
        """Names it to a later server too: in its lower half the cache's own number, once there is one."""
        return (self.number >> CACHE_SESSION_BITS << CACHE_SESSION_BITS) + (self.cache_session or 0)

    @property
    def has_parted(self) -> bool:
        """Nobody is left who could come back to it."""
        return not self.processes and self.joined == self.parted

    def note_process(self, pid: int) -> None:
        """Notes the process of one more greeting."""
        self.only_pid = pid if self.joined == 0 or self.only_pid == pid else 0
        self.joined += 1

    @property
    def owner(self) -> str:
        """Whose share of what is for all it uses: a user's of this machine, or that of a key."""
        return f"user {self.uid}" if self.guest is None else f"guest {self.guest.name}"

    @property
    def key(self) -> tuple[str, int, str]:
        """The same name means the same engine for one user of one domain only."""
        return self.domain.name, self.uid, self.engine


@dataclass(eq=False, kw_only=True)
class Connection:
    """One control connection, from its accepted hello on."""

    key: bytes
    session: EngineSession
    agreed: Agreement
    one_way: InboundSequence

    @property
    def registration(self) -> Registration:
        """Returns what its session registered; the agreement says that it has."""
        assert self.session.registration is not None
        return self.session.registration
