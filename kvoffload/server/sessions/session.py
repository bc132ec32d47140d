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
    """The process at the other end of a lifeline, as the kernel names it."""

    pid: int
    uid: int
    gid: int = 0


@dataclass(frozen=True, kw_only=True)
class Guest:
    """The client at the other end of a TCP connection, known by its key. It is no process of this machine, so at most
    an observer."""

    domain: str
    name: str = ""
    """Name for logs."""
    is_operator: bool = False
    is_peer: bool = False
    """Whether it is another cache server that uses this one as a tier: it may move records."""


@dataclass(kw_only=True)
class Process:
    """A process of a session, which has one lifeline."""

    lifeline: int
    role: Role
    rank: int
    peer: Peer
    pidfd: ReceivedDescriptor | None
    """Descriptor of the process until the cache takes it, then None."""
    wants_express: bool = False
    """Whether it still has to be given an express channel, or told that there is none."""
    wants_warnings: bool = False
    heeds_shrinking: bool = False
    """Whether it knows that memory may be given back."""
    warned: int = 0
    """Number of the last warning that it was told."""
    former: Mapping[int, int] | None = None
    """Bytes of the memories of former servers that it has, by memory; None: it has not said yet."""
    asked: frozenset[int] = frozenset()
    """Memories among them that it was asked to let go of."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """The identity of a session's blocks, and the tenants to whom they may belong."""

    name_space: int
    register: Register
    tenant: int
    tenants: Mapping[str, int] = field(default_factory=dict)
    """Tenants that a publish may name, by name and in the order of the configuration."""


@dataclass(eq=False, kw_only=True)
class EngineSession:
    """One engine with all its processes. An observer has one of its own, without memory; a guest's ends with its only
    connection.
    """

    number: int
    domain: Domain
    engine: str
    uid: int
    """The user's number; -1 for a guest."""
    is_observer: bool = False
    guest: Guest | None = None
    is_open: bool = True
    """Whether it is open. Otherwise it is quarantined: it gets nothing new, and keeps what it holds."""
    cache_session: SessionId | None = None
    """Number of the session in the cache. None: it is an observer's, or came before the memory did."""
    former_boot_id: int = 0
    former_cache_session: int = 0
    """Number of the engine's session in an old server's memory, which may be adopted; 0: it had none."""
    processes: dict[int, Process] = field(default_factory=dict)
    """Processes by lifeline."""
    only_pid: int = 0
    """The pid of the only process that it ever had, as the kernel names it; 0: it had others, too, or none."""
    joined: int = 0
    """Number of greetings of its processes so far."""
    parted: int = 0
    """Number of its processes that said farewell: they copy nothing any more, though they may live on."""
    connections: dict[bytes, Connection] = field(default_factory=dict)
    """Control connections by name. The one that was silent longest comes first."""
    registration: Registration | None = None

    @property
    def resume(self) -> int:
        """The number by which the engine names the session, to a later server too. Its lower half is the cache's own
        number, once there is one."""
        return (self.number >> CACHE_SESSION_BITS << CACHE_SESSION_BITS) + (self.cache_session or 0)

    @property
    def has_parted(self) -> bool:
        """Whether all its processes have said farewell and closed their lifelines, so that none can come back to it."""
        return not self.processes and self.joined == self.parted

    def note_process(self, pid: int) -> None:
        """Notes the process of one more greeting."""
        self.only_pid = pid if self.joined == 0 or self.only_pid == pid else 0
        self.joined += 1

    @property
    def owner(self) -> str:
        """Name of the user of this machine, or of the key, whose share of common limits it uses."""
        return f"user {self.uid}" if self.guest is None else f"guest {self.guest.name}"

    @property
    def key(self) -> tuple[str, int, str]:
        """Key of the engine: the same name means the same engine only for one user of one domain."""
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
