"""Loads of guests over TCP."""

from __future__ import annotations

import time

from kvoffload.cache import Ask
from kvoffload.client import Client
from tests.kit.cache.offload_contract import (
    CHAIN,
    has_patterns,
    names_of,
)
from tests.kit.server.tiers import FAR, WAIT_S


def load(client: Client) -> int:
    """The boundary of a hit, of which every byte was looked at."""
    found = client.acquire(Ask(CHAIN), far=FAR)
    if found.lease is None:
        return 0
    for group, leased in enumerate(found.groups):
        names = names_of(group, CHAIN)[32 * leased.first :]
        assert has_patterns(client, found.lease.memory_id, group, leased.addresses, names)
    client.release(found.lease)
    return found.boundary


def load_when_there(client: Client) -> int:
    """Loads again until something is found. A server that has just started has not reached its remote store yet."""
    end = time.monotonic() + WAIT_S
    while not (boundary := load(client)) and time.monotonic() < end:
        time.sleep(0.05)
    return boundary
