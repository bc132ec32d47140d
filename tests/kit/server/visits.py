"""Visits of an engine: it joins, saves blocks, acquires them, asks, and leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvoffload.protocol import Counts, Explain, Explained, Query, Stats
from kvoffload.protocol.survey import BlocksFound, FindBlocks
from kvoffload.types import AcquireOutcome
from tests.kit.server.blocks import acquire, hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient


def be_served(client: RawClient, seed: int) -> None:
    """An engine saves blocks and acquires them, and what takes long is answered."""
    save(client, hashes_of(3, seed), 7)
    assert acquire(client, hashes_of(3, seed)).outcome is AcquireOutcome.HIT
    query = Query(asked=16, promised=0, missing=hashes_of(1, seed=99))
    assert isinstance(client.ask(Explain(queries=(query,))), Explained)
    assert isinstance(client.ask(FindBlocks()), BlocksFound)
    assert isinstance(client.ask(Stats()), Counts)


@contextmanager
def joined(path: Path, engine: str) -> Iterator[RawClient]:
    client = RawClient(path, register_of(), engine=engine)
    try:
        yield client
    finally:
        client.close()
