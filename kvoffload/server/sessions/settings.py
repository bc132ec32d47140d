"""The settings with which a server is started, and the limits of everything it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.key_files import KeyPair
from kvoffload.peers.fleet_member import MAX_MEMBERS
from kvoffload.protocol import HandshakeSettings
from kvoffload.server.sessions.session import Guest


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds of everything that a server keeps. A request beyond one of them is refused with BUSY, unless its text says
    something else."""

    sessions: int = 2048
    """Number of open and quarantined sessions, including observers; no user and no domain can take all of them. The
    native core has room for 4096."""
    session_processes: int = 60
    """Number of lifelines of one session. The native core watches 63 processes for each."""
    session_connections: int = 240
    """Number of control connections of one session. Beyond it the one that was silent longest has to say hello
    again."""
    guests: int = 2 * MAX_MEMBERS
    """Number of observers over TCP, including peers. Beyond it the one that was silent longest has to say hello
    again."""
    namespaces: int = 4096
    """Number of identities of a domain. Beyond it those that no session has registered for longest give way, with their
    blocks."""
    user_namespaces: int = 1024
    """Number of a domain's identities that engines of one user brought. Beyond it those of this user give way."""
    record_sizes: int = 4096
    """Number of different record sizes of a domain's identities; the native core has room for 4096. Beyond it
    identities give way, as at `namespaces`."""
    user_record_sizes: int = 1024
    """Number of different record sizes of the identities that engines of one user brought. Beyond it identities of this
    user give way."""
    subscribers: int = 96
    """Number of subscribers to events. No user and no domain can take all of them."""
    queued_events: int = 1024
    """Number of events queued for one subscriber. Further ones are dropped, and counted in an `events_lost`."""
    queued_hashes: int = 1 << 18
    """Number of hashes in the events queued for one subscriber. Events beyond it are dropped and counted likewise."""
    swept_blocks: int = 4096
    """Number of blocks per step: of those that left a domain's memory, how many are told at once, and of those on its
    disks, how many one tick looks up."""
    watched_blocks: int = 1 << 20
    """Number of blocks on a domain's disks that subscribers are told of. Further ones are not told."""
    listed_blocks: int = 4096
    """Number of blocks in one answer to `list_blocks`."""


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """The settings of one run of a server."""

    boot_id: int
    handshake: HandshakeSettings
    """The settings of the handshake; each session sees them with its own domain."""
    control: str
    """ZeroMQ endpoint of the control channel, as engines are told."""
    pid: int = 0
    uid: int = 0
    operator_uids: frozenset[int] = frozenset()
    """Users that are operators by their credentials alone."""
    operator_token: str = ""
    """Token that makes any caller an operator, or empty if there is none."""
    successor_after_ms: int = 1000
    """Milliseconds after which engines of a drained server should look for the next one."""
    limits: ServerLimits = field(default_factory=ServerLimits)


@dataclass(frozen=True, kw_only=True)
class TcpSettings:
    """The address for TCP connections, and who may connect there. It needs keys: TCP does not show who connects."""

    address: TcpAddress
    keys: KeyPair
    """The server's own keys."""
    guests: Mapping[str, Guest]
    """Clients and peers that may connect, by public key."""
    handshake_ms: int = 5000
    """Milliseconds within which a connection must have shown its key."""
