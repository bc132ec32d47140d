"""What a server is started with, and how much of everything it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.key_files import KeyPair
from kvoffload.peers.fleet_member import MAX_MEMBERS
from kvoffload.protocol import ServerTerms
from kvoffload.server.sessions.session import Guest


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """At each of them the newcomer is refused with BUSY, unless it says something else."""

    sessions: int = 2048
    """Open and quarantined ones, observers among them; no user and no domain gets all. The native core has room for
    4096."""
    session_processes: int = 60
    """Lifelines of one session. The native core watches 63 processes each."""
    session_connections: int = 240
    """Control connections of one session. Beyond it the one that was silent longest has to say hello again."""
    guests: int = 2 * MAX_MEMBERS
    """Observers over TCP, peers among them. Beyond it the one that was silent longest has to say hello again."""
    namespaces: int = 4096
    """Identities of a domain. Beyond it those give way, with their blocks, that nobody has registered for longest."""
    user_namespaces: int = 1024
    """Of them, those that engines of one user brought; likewise of that user's."""
    record_sizes: int = 4096
    """Of all identities of a domain: the native core has room for 4096. Beyond it identities give way likewise."""
    user_record_sizes: int = 1024
    """Of those identities that engines of one user brought; likewise of that user's."""
    subscribers: int = 96
    """No user and no domain gets all."""
    queued_events: int = 1024
    """Of one subscriber. Beyond it events are dropped, and counted in an `events_lost`."""
    queued_hashes: int = 1 << 18
    """In the events of one subscriber; likewise."""
    swept_blocks: int = 4096
    """Of those that left a domain's memory, how many are told of at once; and of those on its disks, how many a tick
    looks at."""
    watched_blocks: int = 1 << 20
    """On a domain's disks, of which subscribers were told. Those beyond are not told."""
    listed_blocks: int = 4096
    """In one answer to `list_blocks`."""


@dataclass(frozen=True, kw_only=True)
class CoreTerms:
    """What belongs to this run of a server."""

    boot_id: int
    handshake: ServerTerms
    """Its domain is replaced by that of each session."""
    control: str
    """ZeroMQ endpoint, as it is told to engines."""
    pid: int = 0
    uid: int = 0
    operator_uids: frozenset[int] = frozenset()
    """Who may drain by credentials alone."""
    operator_token: str = ""
    """Who knows it may drain; empty: nobody by a token."""
    successor_after_ms: int = 1000
    """When engines of a drained server should look for the next one."""
    limits: ServerLimits = field(default_factory=ServerLimits)


@dataclass(frozen=True, kw_only=True)
class RemoteTerms:
    """Where TCP connections come in, and who they are."""

    address: TcpAddress
    keys: KeyPair | None = None
    """The server's own. None: for loopback alone, and without an allow-list."""
    guests: Mapping[str, Guest] = field(default_factory=dict)
    """Who is let in, by public key."""
    stranger: Guest | None = None
    """Who comes without a key, where there are none."""
    handshake_ms: int = 5000
    """Until then a connection must have said who it is."""
