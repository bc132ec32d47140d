"""A client's settings: who it is, where its server is, how long anything may take, and what its blocks are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from kvoffload.cache import CacheGeometry
from kvoffload.client.joining import Member
from kvoffload.protocol import IdentityField, Register
from kvoffload.protocol.limits import MAX_REPORT
from kvoffload.types import Fingerprint

SECOND_NS = 1_000_000_000


class LinkState(Enum):
    """How a client stands with its server."""

    DOWN = "down"
    JOINING = "joining"
    SERVING = "serving"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """Times in seconds."""

    acquire_deadline_s: float = 0.05
    call_deadline_s: float = 5.0
    """Deadline of calls outside an engine's steps: counts, slots, administration."""
    join_deadline_s: float = 2.0
    """Deadline of each answer while joining. Waiting for memory that is being taken has no deadline."""
    rejoin_after_s: float = 30.0
    """A server that has not answered for so long is greeted again on a new connection."""
    first_backoff_s: float = 0.02
    last_backoff_s: float = 2.0
    stock_slots: tuple[int, ...] = ()
    """Number of slots of each group that are held ready, up to a share of the pool. Groups beyond its end have none."""

    @property
    def acquire_ns(self) -> int:
        """The acquire deadline in nanoseconds."""
        return int(self.acquire_deadline_s * SECOND_NS)

    @property
    def call_ns(self) -> int:
        """The deadline of other calls in nanoseconds."""
        return int(self.call_deadline_s * SECOND_NS)


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """The settings with which a process becomes a client."""

    socket: Path | Callable[[bool], Path]
    """The socket of a shared server, or a function that finds or starts a private one. The function is told whether an
    old server's memory is held here, may take seconds, and is called again before every attempt to join."""
    member: Member
    register: Register | None = None
    """The description of the engine's blocks, or None for an observer."""
    step_budget_s: float = 0.001
    """The most time that all calls between two `begin_step` may wait together."""
    link: LinkSettings = field(default_factory=LinkSettings)


def describe_blocks(
    fingerprint: Fingerprint,
    geometry: CacheGeometry,
    *,
    hash_algorithm: str,
    hash_seed: bytes = b"",
    rank: int = 0,
    ranks: int = 1,
    tenant: str = "",
    identity: tuple[IdentityField, ...] = (),
) -> Register:
    """Makes an engine's description of its blocks. `hash_seed` is the digest of the seed, never the seed itself."""
    return Register(
        fingerprint=fingerprint,
        hash_algorithm=hash_algorithm,
        hash_seed=hash_seed,
        hash_block_size=geometry.hash_block_size,
        groups=geometry.group_settings(),
        rank=rank,
        ranks=ranks,
        tenant=tenant,
        identity=identity,
    )


def add_report_text(register: Register, report: str) -> Register:
    """Adds what this process registered, for operators to read: as many of its lines as fit."""
    text = report.encode()
    if len(text) > MAX_REPORT:
        text = text[: text.rfind(b"\n", 0, MAX_REPORT) + 1]
    return replace(register, report=text)
