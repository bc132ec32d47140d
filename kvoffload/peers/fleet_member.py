"""The servers of a fleet, as all of them know each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvoffload.config.tcp_address import TcpAddress

MAX_MEMBERS = 64
"""The most members of a fleet. Each has some links to each, and a thread for each end of them."""


@dataclass(frozen=True, kw_only=True)
class FleetMember:
    """A server of a fleet, which all machines know by the same name: its public key."""

    address: TcpAddress
    key: str
    """Its public key."""

    @property
    def name(self) -> str:
        """The name by which all machines know it: its public key."""
        return self.key


def choose_members(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the members of a fleet, sorted, from the names of all servers that want to be in it.

    The caller's own name must be among them; then the result is the same on every machine.
    """
    return tuple(sorted(set(names))[:MAX_MEMBERS])
