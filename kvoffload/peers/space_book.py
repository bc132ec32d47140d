"""The identities of a domain whose blocks its server and its peers can move."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvoffload.cache import CacheGeometry, CacheGroup


@dataclass(frozen=True, kw_only=True)
class PeerSpace:
    """One identity: its number is this server's own, the rest is the same everywhere."""

    number: int
    fingerprint: bytes
    geometry: CacheGeometry

    def find_group(self, group: int, record_bytes: int) -> CacheGroup | None:
        """None: there is none of this number with records of so many bytes."""
        if not 0 <= group < len(self.geometry.groups):
            return None
        found = self.geometry.groups[group]
        return found if found.record_bytes == record_bytes else None


class SpaceBook:
    """Safe to use from any thread. As many as the server has namespaces."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spaces: dict[bytes, PeerSpace] = {}

    def learn(self, name_space: int, fingerprint: bytes, geometry: CacheGeometry) -> None:
        """An engine of this machine, or a peer, has named it. Once more changes nothing."""
        with self._lock:
            space = PeerSpace(number=name_space, fingerprint=fingerprint, geometry=geometry)
            self._spaces.setdefault(fingerprint, space)

    def find(self, fingerprint: bytes) -> PeerSpace | None:
        with self._lock:
            return self._spaces.get(fingerprint)
