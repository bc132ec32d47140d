"""Real servers with slower tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvoffload.cache import CacheSettings, CacheStats
from kvoffload.client import Client, TierWait
from kvoffload.server import DomainSettings, TenantSettings
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.server.tiering.settings import TierPlan, TierSettings
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.tiers import TierState
from kvoffload.tiers.disk import DiskFolder, DiskSettings
from kvoffload.units import MIB

MEMORY = CacheSettings(memory_bytes=16 << 20, segment_bytes=8 << 20, extent_bytes=64 << 10)


WAIT_S = 30.0


FAR = TierWait(wait_s=20.0)


PAYING = (DomainSettings(name="", tenants=(TenantSettings(name="own"), TenantSettings(name="other"))),)


NAME = "one model"


def disk_below(folder: Path, **settings: Any) -> TierPlan:
    disk = DiskSettings(
        folders=[DiskFolder(path=folder, capacity_bytes=8 * MIB)], segment_bytes=MIB, record_limit_bytes=256 << 10
    )
    return TierPlan(place=disk, settings=TierSettings(**settings))


@contextmanager
def serving(socket: Path, memory: CacheSettings = MEMORY, **options: Any) -> Iterator[CacheServer]:
    """Its loop has a thread of its own. Disks are open: nothing is written to one that is not."""
    server = CacheServer(ServerPlan(socket=socket, memory={"": memory}, **options))
    is_ending = threading.Event()

    def run() -> None:
        while not is_ending.is_set():
            server.turn(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        chain = server.core.tiers.find_chain("")
        disks = [tier for tier in chain.tiers if tier.settings.name == "disk"] if chain is not None else []
        await_that(lambda: not any(one.state is TierState.OPENING for disk in disks for one in disk.health()))
        yield server
    finally:
        is_ending.set()
        thread.join()
        server.close()


def traffic_of(server: CacheServer, at: int = -1) -> TierTraffic:
    """Returns the traffic of the default domain with one of its tiers: the last, if no other is asked for."""
    chain = server.core.tiers.find_chain("")
    assert chain is not None
    return chain.tiers[at]


def counts_of(server: CacheServer) -> dict[str, int]:
    return asdict(traffic_of(server, 0).counts)


def await_that(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)


class Settled:
    """Counts are asked for when the traffic holds nothing itself."""

    def __init__(self, client: Client, server: CacheServer) -> None:
        self._client = client
        self._traffic = traffic_of(server, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def stats(self) -> CacheStats:
        self._client.stats()
        await_that(lambda: self._traffic.is_idle)
        return self._client.stats()
