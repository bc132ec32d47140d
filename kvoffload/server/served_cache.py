"""What a server needs of a cache. `LocalCache` has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import CacheGeometry, Departed, FoundEntries, Reservation, SessionId
from kvoffload.cache.answers import Tickets
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

    def leave_reserve(
        self, session: SessionId, name_space: int, group: int, *, hashes: Buffer
    ) -> Callable[[], Reservation | None]: ...

    def leave_commit(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        tickets: Tickets,
        *,
        hashes: Buffer,
        parents: Buffer,
        digests: npt.NDArray[np.uint64],
        shard: int = 0,
    ) -> Callable[[], npt.NDArray[np.uint8] | None]: ...

    def leave_abort(self, session: SessionId, tickets: Tickets) -> None: ...

    def leave_invalidate(self, name_space: int, group: int, hashes: Buffer) -> None: ...

    def leave_evict(self, name_spaces: Iterable[int]) -> bool: ...

    def find_used(self, name_space: int, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]: ...

    def find_departed(self, name_space: int, group: int, hashes: Buffer) -> list[Departed | None]: ...

    def find_stored(self, name_space: int, group: int, hashes: Buffer) -> list[int | None]: ...

    def survey(self, prefix: Buffer, *, limit: int) -> FoundEntries: ...

    def held_bytes(self, session: SessionId) -> int: ...

    def clear(self, name_space: int) -> int: ...

    @property
    def version(self) -> int: ...
