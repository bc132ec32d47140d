"""The server's loop never waits for those who write to a domain's memory, whatever it is asked for meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffload.protocol import (
    Clear,
    ClearedBlocks,
    Counts,
    Done,
    Explain,
    Explained,
    Insight,
    Inspect,
    Mark,
    Query,
    SetQuota,
    Stats,
    Subscribe,
    Subscribed,
)
from kvoffload.protocol.survey import BlockPlaces, FollowBlock, Joined, ListJoined
from kvoffload.server import DomainSettings, TenantSettings
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.units import MIB
from tests.kit.server.blocks import MEMORY, acquire, connect, hashes_of, register_of, save
from tests.kit.server.held_writer import held_writer
from tests.kit.server.raw_client import RawClient

DOMAIN = DomainSettings(name="", tenants=(TenantSettings(name="team", quota_bytes=32 * MIB),))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}, domains=(DOMAIN,)))
    yield server
    server.close()


@pytest.fixture
def engine(server: CacheServer, tmp_path: Path) -> Iterator[RawClient]:
    engine = connect(server, tmp_path)
    save(engine, hashes_of(4), 7)
    yield engine
    engine.close()


def test_engines_join_and_are_answered_while_another_thread_writes(
    server: CacheServer, engine: RawClient, tmp_path: Path
) -> None:
    with held_writer(server.pools.caches[""].core):
        assert isinstance(engine.ask(Stats()), Counts)
        assert isinstance(engine.ask(Inspect()), Insight)
        assert engine.ask(SetQuota(tenant="team", quota_bytes=16 * MIB)) == Done()
        assert isinstance(engine.ask(Subscribe()), Subscribed)
        assert engine.ask(Mark()) == Done()
        other = connect(server, tmp_path, register_of(2, record_bytes=8192), engine="other")
        assert isinstance(other.ask(ListJoined()), Joined)
        assert acquire(engine, hashes_of(4)).lease
        other.close()
        for _ in range(4):
            server.core.tick()
    counts = engine.ask(Stats())
    assert isinstance(counts, Counts)
    assert [tenant.quota_bytes for tenant in counts.tenants if tenant.name == "team"] == [16 * MIB]


def test_questions_that_take_a_writers_word_keep_nobody_else(
    server: CacheServer, engine: RawClient, tmp_path: Path
) -> None:
    """They are answered once it has been had, and everybody else at once."""
    asks = connect(server, tmp_path, engine="asks")
    query = Query(asked=16, promised=0, group=0, missing=hashes_of(1, seed=9))
    with held_writer(server.pools.caches[""].core):
        asks.send(Explain(queries=(query,)), 101)
        asks.send(FollowBlock(name_space=asks.name_space, block_hash=hashes_of(1)), 102)
        asks.send(Clear(), 103)
        for _ in range(8):
            assert isinstance(engine.ask(Stats()), Counts)
        assert asks.receive_control() is None
    assert isinstance(asks.receive(101), Explained)
    places = asks.receive(102)
    assert isinstance(places, BlockPlaces)
    assert any(places.in_memory)
    cleared = asks.receive(103)
    assert cleared == ClearedBlocks(blocks=4)
    asks.close()


def test_the_test_would_find_who_waits(server: CacheServer, engine: RawClient) -> None:
    """A call that does wait is still waiting when the lock is given back."""
    cache = server.pools.caches[""]
    waits = threading.Thread(target=cache.invalidate, args=(engine.name_space, 0, hashes_of(4)))
    with held_writer(cache.core):
        waits.start()
        assert cache.lookup(engine.name_space, 0, hashes_of(4)).all()
        assert waits.is_alive()
    waits.join()
    assert not np.any(cache.lookup(engine.name_space, 0, hashes_of(4)))
