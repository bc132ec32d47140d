"""The domains' memories: begun on another thread or adopted from an old server, and grown while they serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType

from kvoffload import native
from kvoffload.cache import CacheFiles, CacheOwner, CacheSettings, LocalCache
from kvoffload.errors import CacheMemoryError
from kvoffload.packets import close_all
from kvoffload.protocol import AdoptVerdict
from kvoffload.server.common.worker_thread import start_worker
from kvoffload.server.sessions.memory_guard import CALM_S, MemoryGuard
from kvoffload.server.sessions.memory_watch import MemoryWatch
from kvoffload.server.sessions.pool_growth import PoolGrowth

logger = logging.getLogger(__name__)


class Pools:
    """Belongs to the thread of the event loop."""

    def __init__(
        self,
        wanted: Mapping[str, CacheSettings],
        owners: Mapping[str, CacheOwner] = MappingProxyType({}),
        tenants: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
        *,
        clock: Callable[[], float] | None = None,
        calm_s: float = CALM_S,
    ) -> None:
        """Takes by domain the settings of its memory, its owner, and the quotas of its tenants. Pools give memory
        back while it is short, and grow again when it has not been short for `calm_s`; without `clock`, which gives
        seconds, they do not. Starts the thread that takes memory; ConfigError: it
        cannot be started."""
        self.caches: dict[str, LocalCache] = {}
        self._wanted = wanted
        self._owners = owners
        self._tenants = tenants
        self._taking: dict[str, Future[LocalCache]] = {}
        self._pool = start_worker("kvoffload-memory")
        self._growths: dict[str, PoolGrowth] = {}
        self._former_bytes: dict[str, int] = {}
        self._guard = (
            None if clock is None else MemoryGuard(MemoryWatch(clock), self._list_guarded, clock, calm_s=calm_s)
        )

    def begin(self) -> None:
        """Takes the first memory for each domain that has none: some milliseconds, on another thread."""
        for name, settings in self._wanted.items():
            if name not in self.caches and name not in self._taking:
                self._taking[name] = self._pool.submit(LocalCache.begin, settings, self._owner_of(name))

    def take_ready(self) -> list[str]:
        """Returns domains whose first memory has come, and starts to grow it. CacheMemoryError: it could not be
        taken."""
        ready = []
        for name, taking in list(self._taking.items()):
            if not taking.done():
                continue
            del self._taking[name]
            cache = taking.result()
            if name in self.caches:
                cache.close()
            else:
                self._keep(name, cache)
                ready.append(name)
        return ready

    def adopt(self, domain: str, files: list[int], former_boot_id: int) -> AdoptVerdict | None:
        """Adopts a memory. Returns None if it is the domain's from here on, else why not. Takes the descriptors."""
        lock, index, *segments = files
        try:
            verdict = AdoptVerdict.OWNER_LIVES if native.find_lock_owner(lock) else None
        except RuntimeError:
            verdict = AdoptVerdict.NOT_USABLE
        if verdict is not None:
            close_all(files)
            return verdict
        try:
            cache = LocalCache.adopt(
                CacheFiles(lock=lock, index=index, segments=tuple(segments)),
                self._wanted[domain],
                owner=self._owner_of(domain),
                former_boot_id=former_boot_id,
                tenants=self._tenants.get(domain),
            )
        except CacheMemoryError as fault:
            logger.warning("memory of an old server was not adopted: %s", fault)
            return AdoptVerdict.NOT_USABLE
        logger.info("adopted the memory of server %x: %s", former_boot_id, cache.adoption)
        self._keep(domain, cache)
        return None

    def memory_id(self, domain: str) -> int:
        """Returns the number by which engines name the domain's memory; 0: it has none."""
        cache = self.caches.get(domain)
        return 0 if cache is None else os.fstat(cache.files.index).st_ino

    def limit(self, domain: str, former_bytes: int) -> None:
        """Takes `former_bytes` less than the domain's full size for now, because its engines still have so much memory
        of former servers."""
        self._former_bytes[domain] = former_bytes
        if domain in self._growths:
            self._growths[domain].limit(former_bytes)

    def tick(self) -> None:
        """Starts the growth of pools that could not get a thread for it before, and the watch on memory likewise. To be
        called now and then."""
        if self._guard is not None and self._list_guarded():
            self._guard.start()
        for growth in self._growths.values():
            growth.start()

    def stop_growing(self) -> None:
        """Stops the growth of all pools. They keep the memory that they have by now."""
        for growth in self._growths.values():
            growth.stop()

    def stop(self) -> None:
        """Takes no memory any more, and waits for what is under way."""
        self._pool.shutdown()
        if self._guard is not None:
            self._guard.close()
        for growth in self._growths.values():
            growth.close()
        for taking in self._taking.values():
            if taking.exception() is None:
                taking.result().close()

    def close(self) -> None:
        """Closes all memories. They stay for as long as engines have them mapped."""
        for cache in self.caches.values():
            cache.close()

    def _owner_of(self, domain: str) -> CacheOwner:
        return self._owners.get(domain) or CacheOwner(domain=domain)

    def _list_guarded(self) -> list[PoolGrowth]:
        """Lists the pools that give memory back. From the guard's thread."""
        return [growth for name, growth in list(self._growths.items()) if not self._wanted[name].is_sparse]

    def _keep(self, domain: str, cache: LocalCache) -> None:
        self.caches[domain] = cache
        for name, quota_bytes in self._tenants.get(domain, {}).items():
            # No other thread or process writes to the memory yet, so this does not wait for one.
            cache.open_tenant(name, quota_bytes=quota_bytes)
        wanted = self._wanted[domain]
        growth = PoolGrowth(
            cache,
            name=domain,
            step_bytes=wanted.step_bytes,
            segment_bytes=os.fstat(cache.files.segments[0]).st_size,
            floor_bytes=wanted.floor_bytes,
        )
        growth.limit(self._former_bytes.get(domain, 0))
        growth.start()
        self._growths[domain] = growth
