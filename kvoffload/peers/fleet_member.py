"""The servers of a fleet, as all of them know each other, and which of them is the home of a record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.tiers.home_ring import HomeMember, HomeRing, Homes

MAX_MEMBERS = 64
"""Of a fleet. Each has some links to each, and a thread for each end of them."""
_RINGS = 16
"""Rings of different members that are kept: members come and go."""


@dataclass(frozen=True, kw_only=True)
class FleetMember:
    """All machines know it by the same name: its public key, or without keys its address."""

    address: TcpAddress
    key: str = ""

    @property
    def name(self) -> str:
        return self.key or str(self.address)


def choose_members(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the members of a fleet, sorted, out of the names of all servers that would be of it.

    Whoever reckons it names itself, too; then it is the same on every machine.
    """
    return tuple(sorted(set(names))[:MAX_MEMBERS])


def find_homes(members: tuple[str, ...], hashes: bytes) -> Homes:
    """Returns the place of each hash's home among the members, which are sorted. It is the same on every machine."""
    return _make_ring(members).homes(hashes)


@lru_cache(maxsize=_RINGS)
def _make_ring(members: tuple[str, ...]) -> HomeRing:
    return HomeRing(HomeMember(name=name) for name in members)
