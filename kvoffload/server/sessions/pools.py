"""The domains' memories: begun beside the loop, or adopted from an old server, and grown while they serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType

from kvoffload import native
from kvoffload.cache import CacheFiles, CacheOwner, CacheTerms, LocalCache
from kvoffload.errors import CacheMemoryError
from kvoffload.packets import close_all
from kvoffload.protocol import AdoptVerdict
from kvoffload.server.sessions.pool_growth import PoolGrowth

logger = logging.getLogger(__name__)


class Pools:
    """Belongs to the thread of the event loop."""

    def __init__(
        self,
        wanted: Mapping[str, CacheTerms],
        owners: Mapping[str, CacheOwner] = MappingProxyType({}),
        tenants: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    ) -> None:
        """Takes by domain: its memory, whose that is, and the quotas of those who share it."""
        self.caches: dict[str, LocalCache] = {}
        self._wanted = wanted
        self._owners = owners
        self._tenants = tenants
        self._taking: dict[str, Future[LocalCache]] = {}
        self._pool = ThreadPoolExecutor(1, "kvoffload-memory")
        self._growths: dict[str, PoolGrowth] = {}
        self._former_bytes: dict[str, int] = {}

    def begin(self) -> None:
        """Takes the first memory for each domain that has none: some milliseconds, on another thread."""
        for name, terms in self._wanted.items():
            if name not in self.caches and name not in self._taking:
                self._taking[name] = self._pool.submit(LocalCache.begin, terms, self._owner_of(name))

    def take_ready(self) -> list[str]:
        """Domains whose first memory has come; it grows from now on. CacheMemoryError: there is none."""
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
        """Adopts a memory. None: it is the domain's from here on; else why not. Takes the descriptors."""
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
        """So much less than all of the domain's memory is taken for now: its engines still have it of former ones."""
        self._former_bytes[domain] = former_bytes
        if domain in self._growths:
            self._growths[domain].limit(former_bytes)

    def stop_growing(self) -> None:
        """Stops growing: what there is by now is enough."""
        for growth in self._growths.values():
            growth.stop()

    def stop(self) -> None:
        """Takes no memory any more, and waits for what is under way."""
        self._pool.shutdown()
        for growth in self._growths.values():
            growth.close()
        for taking in self._taking.values():
            if taking.exception() is None:
                taking.result().close()

    def close(self) -> None:
        """Memory stays for as long as engines have it mapped."""
        for cache in self.caches.values():
            cache.close()

    def _owner_of(self, domain: str) -> CacheOwner:
        return self._owners.get(domain) or CacheOwner(domain=domain)

    def _keep(self, domain: str, cache: LocalCache) -> None:
        self.caches[domain] = cache
        for name, quota_bytes in self._tenants.get(domain, {}).items():
            # While nobody else is there to be waited for.
            cache.open_tenant(name, quota_bytes=quota_bytes)
        growth = PoolGrowth(cache, name=domain, step_bytes=self._wanted[domain].step_bytes)
        growth.limit(self._former_bytes.get(domain, 0))
        growth.start()
        self._growths[domain] = growth
