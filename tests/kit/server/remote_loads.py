"""Loads of guests over TCP."""

from __future__ import annotations

from kvoffload.cache import Ask
from kvoffload.client import AsyncClient
from tests.kit.cache.offload_contract import (
    CHAIN,
    has_patterns,
    names_of,
)
from tests.kit.server.tiers import FAR


async def load(client: AsyncClient) -> int:
    """The boundary of a hit, of which every byte was looked at."""
    found = await client.acquire(Ask(CHAIN), far=FAR)
    if found.lease is None:
        return 0
    for group, leased in enumerate(found.groups):
        names = names_of(group, CHAIN)[32 * leased.first :]
        assert has_patterns(client, found.lease.memory_id, group, leased.addresses, names)
    client.release(found.lease)
    return found.boundary
