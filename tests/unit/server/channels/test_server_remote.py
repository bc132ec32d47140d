"""Servers over a store that they share, a real one of each kind: what one of them was given, the other one has."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.remote_loads import load, load_when_there

pytest.importorskip("obstore", reason="obstore is not installed")

from kvoffload.cache import AcquireOutcome, Ask
from kvoffload.client import Client
from kvoffload.tiers import TierState
from tests.kit.cache.offload_contract import (
    CHAIN,
    TOKENS,
    OffloadCacheContract,
    save,
)
from tests.kit.server.shared_stores import SHARED, SharedStore
from tests.kit.server.tiers import (
    FAR,
    NAME,
    PAYING,
    WAIT_S,
    Settled,
    await_that,
    counts_of,
    disk_below,
    serving,
    traffic_of,
)
from tests.unit.client.conftest import make_settings

BLOCKS = 16 + 8 + 4
RECORDS = BLOCKS + 16
"""Blocks of attention have two shards."""


@pytest.fixture(scope="module", params=SHARED)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStore]:
    with SHARED[request.param](tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture(autouse=True)
def _nothing_is_there_at_first(store: SharedStore) -> None:
    store.flush()


def make_client(socket: Path) -> Client:
    return Client(make_settings(socket, name=NAME))


def test_what_one_machine_has_computed_another_one_has(tmp_path: Path, store: SharedStore) -> None:
    with (
        serving(tmp_path / "one", tiers={"": [store.below()]}) as one,
        serving(tmp_path / "two", tiers={"": [store.below()]}) as two,
    ):
        with make_client(tmp_path / "one") as client:
            assert client.wait_until_served(WAIT_S)
            save(client)
            await_that(lambda: counts_of(one)["written"] == BLOCKS)
        assert store.count() == RECORDS
        with make_client(tmp_path / "two") as client:
            assert client.wait_until_served(WAIT_S)
            assert client.acquire(Ask(CHAIN)).outcome is AcquireOutcome.MISS
            assert load_when_there(client) == TOKENS
            # One of its connections may bring records while others are still being opened.
            await_that(lambda: {one.state for one in traffic_of(two).health()} == {TierState.READY})
            stats = client.stats()
        assert stats.traffic[store.kind]["promoted"] == 16 + 2 + 1
        assert [(place.tier, place.state) for place in stats.places] == [(store.kind, "ready")]
        assert counts_of(two)["written"] == 0, "what comes from there is not written there again"


def test_a_near_disk_takes_what_came_from_afar(tmp_path: Path, store: SharedStore) -> None:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    with serving(tmp_path / "one", tiers={"": [store.below()]}) as one, make_client(tmp_path / "one") as client:
        assert client.wait_until_served(WAIT_S)
        save(client)
        await_that(lambda: counts_of(one)["written"] == BLOCKS)
    with (
        serving(tmp_path / "two", tiers={"": [disk_below(folder), store.below()]}) as two,
        make_client(tmp_path / "two") as client,
    ):
        assert client.wait_until_served(WAIT_S)
        assert load_when_there(client) == TOKENS
        await_that(lambda: counts_of(two)["written"] == 16 + 2 + 1)
    store.flush()
    with (
        serving(tmp_path / "two", tiers={"": [disk_below(folder), store.below()]}),
        make_client(tmp_path / "two") as client,
    ):
        assert client.wait_until_served(WAIT_S)
        assert load(client) == TOKENS


def test_a_store_that_is_not_there_is_memory_alone_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, store: SharedStore
) -> None:
    plan = replace(store.below(), place=store.nowhere)
    with serving(tmp_path / "s", tiers={"": [plan]}) as server:
        with make_client(tmp_path / "s") as client:
            assert client.wait_until_served(WAIT_S)
            save(client)
            assert load(client) == TOKENS
            assert client.acquire(Ask(bytes(32 * 8)), far=FAR).outcome is AcquireOutcome.MISS
        await_that(lambda: counts_of(server)["failed"] > 0)
        await_that(lambda: any(f"{store.kind} tier" in record.message for record in caplog.records))
    said = [record for record in caplog.records if f"{store.kind} tier" in record.message]
    # One line for each reason: the first may be that the client's process has not started in time.
    assert {record.levelno for record in said} == {logging.WARNING}
    assert len({record.message for record in said}) == len(said) <= 2
    assert all(f"{store.nowhere.describe()} is absent: " in record.message for record in said)


def test_what_is_invalidated_is_gone_for_all(tmp_path: Path, store: SharedStore) -> None:
    with (
        serving(tmp_path / "one", tiers={"": [store.below()]}) as one,
        serving(tmp_path / "two", tiers={"": [store.below()]}),
    ):
        with make_client(tmp_path / "one") as client:
            assert client.wait_until_served(WAIT_S)
            save(client)
            await_that(lambda: counts_of(one)["written"] == BLOCKS)
            client.invalidate(0, CHAIN[:32])
            client.stats()
            await_that(lambda: store.count() == RECORDS - 2)
        with make_client(tmp_path / "two") as client:
            assert client.wait_until_served(WAIT_S)
            assert load(client) == 0


class TestClientOverAStore(OffloadCacheContract):
    """With a store below, nothing is another for an engine."""

    @pytest.fixture
    def cache(self, tmp_path: Path, store: SharedStore) -> Iterator[Any]:
        with (
            serving(tmp_path / "s", tiers={"": [store.below()]}, domains=PAYING) as server,
            Client(make_settings(tmp_path / "s")) as client,
        ):
            assert client.wait_until_served(WAIT_S)
            yield Settled(client, server)
