"""What a server needs of a cache. `LocalCache` has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import CacheGeometry, Departed, FoundEntries, SessionId
from kvoffload.peers.peer_access import PeerCache
from kvoffload.types import Fingerprint


class ServedCache(PeerCache, Protocol):
    """More than its peers need. The words are those of `LocalCache`, and their docstrings are the contract."""

    def open_namespace(self, fingerprint: Fingerprint, geometry: CacheGeometry) -> int: ...

    def forget_namespaces(self, kept: Iterable[int]) -> list[int]: ...

    def open_tenant(self, name: str, *, quota_bytes: int = 0) -> int: ...

    def quarantine_session(self, session: SessionId) -> bool: ...

    def reopen_session(self, session: SessionId) -> bool: ...

    def reclaim_ended(self) -> int: ...

    def find_used(self, name_space: int, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]: ...

    def find_departed(self, name_space: int, group: int, hashes: Buffer) -> list[Departed | None]: ...

    def find_stored(self, name_space: int, group: int, hashes: Buffer) -> list[int | None]: ...

    def survey(self, prefix: Buffer, *, limit: int) -> FoundEntries: ...

    def held_bytes(self, session: SessionId) -> int: ...

    def clear(self, name_space: int) -> int: ...

    @property
    def version(self) -> int: ...
