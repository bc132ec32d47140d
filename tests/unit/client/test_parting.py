"""The last messages arrive."""

from __future__ import annotations

from pathlib import Path

from kvoffload.client import Client
from kvoffload.protocol import Role
from tests.unit.cache.offload_contract import CHAIN, AsAwaited, save
from tests.unit.client.conftest import make_terms
from tests.unit.client.test_client import WAIT_S


async def test_what_was_told_last_arrives(socket_path: Path) -> None:
    observer = Client(make_terms(socket_path, role=Role.OBSERVER))
    client = Client(make_terms(socket_path)).start()
    assert client.wait_until_served(WAIT_S)
    with observer:
        assert observer.wait_until_served(WAIT_S)
        await save(AsAwaited(client))
        assert client.acquire(CHAIN).is_hit
        slots = client.reserve(0, count=5)
        assert (observer.stats().leases, observer.stats().reserved) == (1, 5)
        client.abort(slots)
        client.close()
        assert (observer.stats().leases, observer.stats().reserved) == (0, 0)
