"""What a server needs of a cache. `LocalCache` has it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import NO_LIMIT, Acquired, CacheGeometry, CacheStats, LeaseId, Reservation, SessionId
from kvoffload.types import Fingerprint


class ServedCache(Protocol):
    """The words are those of `LocalCache`, and their docstrings are the contract."""

    def open_namespace(self, fingerprint: Fingerprint, geometry: CacheGeometry) -> int: ...

    def open_tenant(self, name: str, *, quota_bytes: int = 0) -> int: ...

    def open_session(self, *, held_limit_bytes: int = NO_LIMIT) -> SessionId: ...

    def add_process(self, session: SessionId, *, pidfd: int) -> None: ...

    def quarantine_session(self, session: SessionId) -> bool: ...

    def reopen_session(self, session: SessionId) -> bool: ...

    def reclaim_ended(self) -> int: ...

    def lookup(self, name_space: int, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]: ...

    def acquire(
        self,
        session: SessionId,
        name_space: int,
        chain: Buffer,
        *,
        local: int = 0,
        limit: int = NO_LIMIT,
        alignment: int = 1,
        shard: int = 0,
    ) -> Acquired: ...

    def acquire_entries(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        hashes: Buffer,
        *,
        shard: int = 0,
        is_use: bool = True,
    ) -> Acquired: ...

    def find_used(self, name_space: int, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]: ...

    def pointers(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]: ...

    def release(self, session: SessionId, lease: LeaseId) -> bool: ...

    def reserve(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        *,
        count: int = 0,
        hashes: Buffer | None = None,
        tenant: int = 0,
    ) -> Reservation: ...

    def commit(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        tickets: npt.NDArray[np.uint64],
        *,
        hashes: Buffer,
        parents: Buffer | None = None,
        digests: npt.NDArray[np.uint64] | None = None,
        shard: int = 0,
        tenant: int | None = None,
    ) -> npt.NDArray[np.uint8]: ...

    def abort(self, session: SessionId, tickets: npt.NDArray[np.uint64]) -> int: ...

    def invalidate(self, name_space: int, group: int, hashes: Buffer) -> int: ...

    def clear(self, name_space: int) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def stats(self) -> CacheStats: ...
