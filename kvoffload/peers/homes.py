"""Where records live in a fleet of given members."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvoffload.types import HASH_BYTES

_POINTS = 256
"""Of each member on the circle."""
_RINGS = 16
"""Of different members, that are kept: members come and go."""


def find_homes(members: tuple[str, ...], hashes: bytes) -> npt.NDArray[np.intp]:
    """Of each hash, the place of its home among the members. The same on every machine and in every version."""
    points, owners = _make_ring(members)
    rows = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
    found = np.searchsorted(points, np.ascontiguousarray(rows[:, :8]).view(">u8").ravel().astype(np.uint64))
    return owners[found % len(points)]


@lru_cache(maxsize=_RINGS)
def _make_ring(members: tuple[str, ...]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
    """Points in their order, and whose they are."""
    made = [
        (hashlib.sha256(f"kvoffload home: {point} of {name}".encode()).digest(), at)
        for at, name in enumerate(members)
        for point in range(_POINTS)
    ]
    made.sort()
    return (
        np.array([int.from_bytes(digest[:8], "big") for digest, _ in made], np.uint64),
        np.array([at for _, at in made], np.intp),
    )
