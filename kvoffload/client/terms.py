"""What a client is told: who it is, where its server is, and how long anything may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvoffload.client.joining import Member
from kvoffload.protocol import Register


class LinkState(Enum):
    """How a client stands with its server."""

    DOWN = "down"
    JOINING = "joining"
    SERVING = "serving"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class LinkTerms:
    """Times in seconds."""

    acquire_deadline_s: float = 0.05
    call_deadline_s: float = 5.0
    """Of whatever is asked beside an engine's steps: counts, slots, administration."""
    join_deadline_s: float = 2.0
    """For each answer on the way to being served; memory that is being taken is waited for without one."""
    rejoin_after_s: float = 30.0
    """A server that has not answered for so long is greeted anew."""
    first_backoff_s: float = 0.02
    last_backoff_s: float = 2.0
    stock_slots: tuple[int, ...] = ()
    """How many slots of each group are held ready, as far as a share of the pool goes. Groups beyond it: none."""


@dataclass(frozen=True, kw_only=True)
class ClientTerms:
    """Of one process."""

    socket: Path | Callable[[bool], Path]
    """A shared server's, or what finds or starts a private one; it hears whether an old server's memory is held here,
    may take seconds, and is asked again before every attempt to join."""
    member: Member
    register: Register | None = None
    """None: an observer's."""
    step_budget_s: float = 0.001
    """What all calls between two `begin_step` may wait together."""
    link: LinkTerms = field(default_factory=LinkTerms)
