"""Where records live in a fleet of given members."""

from __future__ import annotations

from functools import lru_cache

from kvoffload.tiers.home_ring import HomeMember, HomeRing, Homes

_RINGS = 16
"""Of different members, that are kept: members come and go."""


def find_homes(members: tuple[str, ...], hashes: bytes) -> Homes:
    """Of each hash, the place of its home among the members, which are sorted. The same on every machine."""
    return _make_ring(members).homes(hashes)


@lru_cache(maxsize=_RINGS)
def _make_ring(members: tuple[str, ...]) -> HomeRing:
    return HomeRing(HomeMember(name=name) for name in members)
