"""Servers with a disk for engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvoffload.cache import CacheStats
from kvoffload.client import Client
from kvoffload.errors import ServerError
from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer, count
from tests.vllm.engine import Engine
from tests.vllm.pool_probe import unhurried

WAIT_S = 60.0


@contextmanager
def disk_server(room: Path, **settings: str) -> Iterator[SharedServer]:
    """Its disk is open: nothing is found on one that is not, and nothing written to it."""
    settings = {"disk": str(room / "disk"), "disk_size": "1GiB", "promote_deadline": "30s", **settings}
    with SharedServer(room, **settings) as server:
        server.start()
        end_s = time.monotonic() + WAIT_S
        while not is_open(server):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        yield server


def is_open(server: SharedServer) -> bool:
    """The server has memory, and all that lies below it."""
    with suppress(ServerError):  # its memory is not there yet
        return {place.state for place in count(server).places} == {"ready"}
    return False


def stats_of(engine: Engine) -> CacheStats:
    """The engine's client would wait for them no longer than its step permits."""
    connector: Any = probe.scheduler_connector(engine)
    client: Client = connector.scheduler_side.parts.cache
    with unhurried(client):
        return client.stats()


def await_written(engine: Engine, tier: str = "disk") -> int:
    """Waits until the tier has all that memory has, and returns how many blocks that is."""
    end_s = time.monotonic() + WAIT_S
    while True:
        stats = stats_of(engine)
        if stats.traffic[tier]["written"] == stats.readable > 0:
            return stats.readable
        assert time.monotonic() < end_s, stats
        time.sleep(0.02)
