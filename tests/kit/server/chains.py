"""Chains of blocks that a server serves."""

from __future__ import annotations

from typing import Any

from kvoffload.cache import LocalCache
from kvoffload.protocol import (
    Credits,
    CreditsGranted,
    Publish,
)
from tests.kit.cache.cache_model import (
    HYBRID,
    block_hashes,
    write_record,
)
from tests.kit.server.harness import Client, numbers


def save_chain(cache: LocalCache, engine: Client, chain: bytes, geometry: Any = HYBRID, *, tenant: int = 0) -> None:
    """Saves a chain, as an engine does after a prefill: credits for what is missing, the bytes, and a publish for every
    shard."""
    for group, rules in enumerate(geometry.groups):
        names = block_hashes(chain, geometry, group)
        granted = engine.ask(Credits(name_space=engine.name_space, group=group, hashes=b"".join(names)))
        assert isinstance(granted, CreditsGranted)
        tickets, addresses = numbers(granted.tickets), numbers(granted.addresses)
        written = [at for at in range(len(tickets)) if tickets[at]]
        for shard in range(rules.shards):
            for at in written:
                write_record(cache, geometry, (engine.name_space, group), names[at], int(addresses[at]), shard)
            parents = [bytes(32), *names] if group == 0 else names
            message = Publish(
                name_space=engine.name_space,
                group=group,
                shard=shard,
                tickets=tickets[written].tobytes(),
                hashes=b"".join(names[at] for at in written),
                parents=b"".join(parents[at] for at in written),
                tenant=tenant,
            )
            assert engine.tell(message) is None
