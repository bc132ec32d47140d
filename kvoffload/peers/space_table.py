"""The identities of a domain whose blocks its server and its peers can move."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvoffload.cache import CacheGeometry, CacheGroup


@dataclass(frozen=True, kw_only=True)
class PeerSpace:
    """One identity. Its number is this server's own; the rest is the same everywhere."""

    number: int
    fingerprint: bytes
    geometry: CacheGeometry

    def find_group(self, group: int, record_bytes: int) -> CacheGroup | None:
        """Returns a group. None: there is none of this number with records of so many bytes."""
        if not 0 <= group < len(self.geometry.groups):
            return None
        found = self.geometry.groups[group]
        return found if found.record_bytes == record_bytes else None


class SpaceTable:
    """The identities by fingerprint, as many as the server has namespaces. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spaces: dict[bytes, PeerSpace] = {}
        self._uses: Counter[bytes] = Counter()

    def learn(self, name_space: int, fingerprint: bytes, geometry: CacheGeometry) -> None:
        """Adds an identity that an engine of this machine, or a peer, has named. Adding it again has no effect."""
        with self._lock:
            space = PeerSpace(number=name_space, fingerprint=fingerprint, geometry=geometry)
            self._spaces.setdefault(fingerprint, space)

    def find(self, fingerprint: bytes) -> PeerSpace | None:
        with self._lock:
            return self._spaces.get(fingerprint)

    @contextmanager
    def use(self, fingerprint: bytes) -> Iterator[bool]:
        """Yields whether an identity is known. If so, it is not forgotten before the end."""
        with self._lock:
            is_known = fingerprint in self._spaces
            self._uses[fingerprint] += is_known
        try:
            yield is_known
        finally:
            with self._lock:
                self._uses[fingerprint] -= is_known
                if not self._uses[fingerprint]:
                    del self._uses[fingerprint]

    def forget(self, fingerprint: bytes) -> bool:
        """Forgets an identity that this machine does not use any more. False: a request still uses it, and it stays."""
        with self._lock:
            is_used = self._uses[fingerprint] > 0
            if not is_used:
                self._spaces.pop(fingerprint, None)
            return not is_used
