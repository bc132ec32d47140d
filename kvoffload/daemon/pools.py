"""The domains' memories: taken beside the loop, or adopted from an old server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kvoffload import native
from kvoffload.cache import CacheFiles, CacheTerms, LocalCache
from kvoffload.errors import CacheMemoryError
from kvoffload.packets import close_all, spare_file
from kvoffload.protocol import AdoptVerdict

logger = logging.getLogger(__name__)


class _NotWantedError(Exception):
    """Memory is being taken that nobody needs any more."""


class Pools:
    """Belongs to the thread of the event loop."""

    def __init__(self, wanted: Mapping[str, CacheTerms]) -> None:
        """By domain."""
        self.caches: dict[str, LocalCache] = {}
        self._wanted = wanted
        self._taking: dict[str, Future[LocalCache]] = {}
        self._pool = ThreadPoolExecutor(1, "kvoffload-memory")
        self._is_closing = False

    def begin(self) -> None:
        """Takes memory for each domain that has none: half a second per GiB, on another thread."""
        for name, terms in self._wanted.items():
            if name not in self.caches and name not in self._taking:
                progress = partial(self._check_wanted, name)
                self._taking[name] = self._pool.submit(LocalCache.create, terms, progress=progress)

    def take_ready(self) -> list[str]:
        """Domains whose memory has come. CacheMemoryError: there is none."""
        ready = []
        for name, taking in list(self._taking.items()):
            if not taking.done():
                continue
            del self._taking[name]
            try:
                cache = taking.result()
            except _NotWantedError:
                continue
            if name in self.caches:
                cache.close()
            else:
                self._keep(name, cache)
                ready.append(name)
        return ready

    def adopt(self, domain: str, files: list[int], former_boot_id: int) -> AdoptVerdict | None:
        """None: this is the domain's memory from here on. Takes the descriptors."""
        lock, index, *segments = files
        try:
            verdict = AdoptVerdict.OWNER_LIVES if native.find_lock_owner(lock) else None
        except RuntimeError:
            verdict = AdoptVerdict.NOT_USABLE
        if verdict is not None:
            close_all(files)
            return verdict
        try:
            cache = LocalCache.adopt(CacheFiles(lock=lock, index=index, segments=tuple(segments)), self._wanted[domain])
        except CacheMemoryError as fault:
            logger.warning("memory of an old server was not adopted: %s", fault)
            return AdoptVerdict.NOT_USABLE
        logger.info("adopted the memory of server %x: %s", former_boot_id, cache.adoption)
        self._keep(domain, cache)
        return None

    def stop(self) -> None:
        """What is being taken is not wanted any more; waits for that."""
        self._is_closing = True
        self._pool.shutdown()
        for taking in self._taking.values():
            if taking.exception() is None:
                taking.result().close()

    def close(self) -> None:
        """Memory stays for as long as engines have it mapped."""
        for cache in self.caches.values():
            cache.close()

    def _keep(self, domain: str, cache: LocalCache) -> None:
        self.caches[domain] = cache
        spare_file(cache.files.lock)

    def _check_wanted(self, domain: str, _done_bytes: int, _total_bytes: int) -> None:
        """An old server's memory may have come, or the end."""
        if self._is_closing or domain in self.caches:
            raise _NotWantedError
