"""A connection's end: what was told arrives, and nothing stays open."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kvoffload.cache import Ask
from kvoffload.client import Client
from kvoffload.protocol import Role
from tests.kit.cache.offload_contract import CHAIN, save
from tests.kit.client.served import WAIT_S
from tests.unit.client.conftest import make_settings


def test_what_was_told_last_arrives(socket_path: Path) -> None:
    observer = Client(make_settings(socket_path, role=Role.OBSERVER))
    client = Client(make_settings(socket_path)).start()
    assert client.wait_until_served(WAIT_S)
    with observer:
        assert observer.wait_until_served(WAIT_S)
        save(client)
        assert client.acquire(Ask(CHAIN)).is_hit
        slots = client.reserve(0, count=5)
        assert (observer.stats().leases, observer.stats().reserved) == (1, 5)
        client.abort(slots)
        client.close()
        assert (observer.stats().leases, observer.stats().reserved) == (0, 0)


def count_open() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_the_end_leaves_nothing_open(socket_path: Path) -> None:
    before = count_open()
    for _ in range(3):
        client = Client(make_settings(socket_path)).start()
        assert client.wait_until_served(WAIT_S), client.fault
        client.close()
        client.close()
    assert count_open() == before
