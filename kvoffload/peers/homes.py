"""Where records live in a fleet of given members."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from kvoffload.peers.fleet_member import MAX_MEMBERS
from kvoffload.tiers.home_ring import HomeMember, HomeRing, Homes

_RINGS = 16
"""Of different members, that are kept: members come and go."""


def choose_members(names: Iterable[str]) -> tuple[str, ...]:
    """Of all servers that would be of a fleet, by name: its members, sorted. Whoever reckons it names itself, too; then
    it is the same on every machine."""
    return tuple(sorted(set(names))[:MAX_MEMBERS])


def find_homes(members: tuple[str, ...], hashes: bytes) -> Homes:
    """Of each hash, the place of its home among the members, which are sorted. The same on every machine."""
    return _make_ring(members).homes(hashes)


@lru_cache(maxsize=_RINGS)
def _make_ring(members: tuple[str, ...]) -> HomeRing:
    return HomeRing(HomeMember(name=name) for name in members)
