"""A real server over a real folder: what was saved is there again after a restart, and a bad folder is no fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cache import AcquireOutcome, Ask
from kvoffload.client import Client
from kvoffload.server.loop import CacheServer
from tests.kit.cache.offload_contract import (
    CHAIN,
    TOKENS,
    OffloadCacheContract,
    has_patterns,
    names_of,
    save,
)
from tests.kit.open_files import count_open_files
from tests.kit.server.tiers import FAR, NAME, PAYING, WAIT_S, Settled, await_that, counts_of, disk_below, serving
from tests.unit.client.conftest import make_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    return folder


def save_below(client: Client, server: CacheServer) -> None:
    """Saves blocks, and waits until the disk has them, too."""
    save(client)
    await_that(lambda: counts_of(server)["written"] == 16 + 8 + 4)


def until_open(client: Client) -> None:
    """A disk knows nothing of what it has while it opens."""
    await_that(lambda: [place.state for place in client.stats().places] == ["ready"])


def test_a_prompt_is_there_again_after_a_restart(tmp_path: Path, folder: Path) -> None:
    with (
        serving(tmp_path / "s", tiers={"": [disk_below(folder)]}) as first,
        Client(make_settings(tmp_path / "s", name=NAME)) as client,
    ):
        assert client.wait_until_served(WAIT_S)
        assert client.has_tiers
        save_below(client, first)
    with serving(tmp_path / "s", tiers={"": [disk_below(folder)]}) as server:
        with Client(make_settings(tmp_path / "s", name=NAME)) as client:
            assert client.wait_until_served(WAIT_S)
            until_open(client)
            assert client.acquire(Ask(CHAIN)).outcome is AcquireOutcome.MISS
            found = client.acquire(Ask(CHAIN), far=FAR)
            assert found.boundary == TOKENS
            assert found.lease is not None
            for group, leased in enumerate(found.groups):
                names = names_of(group, CHAIN)[32 * leased.first :]
                assert has_patterns(client, found.lease.memory_id, group, leased.addresses, names)
            client.release(found.lease)
        with Client(make_settings(tmp_path / "s", name=NAME)) as client:
            assert client.wait_until_served(WAIT_S)
            found = client.acquire(Ask(CHAIN), far=FAR)
            assert found.boundary == TOKENS
            assert client.acquire(Ask(bytes(32 * 8)), far=FAR).outcome is AcquireOutcome.MISS
            # Of a window and a state only what the boundary needs; and it was read once.
            assert counts_of(server)["promoted"] == 16 + 2 + 1
    del first, server

    def is_closed() -> bool:
        count_open_files()  # a thread may have held what is collected now
        return not [file for file in Path("/proc/self/fd").iterdir() if str(folder) in str(file.resolve())]

    await_that(is_closed)


def test_a_prefetch_is_enough_for_the_next_look_up(tmp_path: Path, folder: Path) -> None:
    with (
        serving(tmp_path / "s", tiers={"": [disk_below(folder)]}) as server,
        Client(make_settings(tmp_path / "s", name=NAME)) as client,
    ):
        assert client.wait_until_served(WAIT_S)
        save_below(client, server)
    with (
        serving(tmp_path / "s", tiers={"": [disk_below(folder)]}),
        Client(make_settings(tmp_path / "s", name=NAME)) as client,
    ):
        assert client.wait_until_served(WAIT_S)
        await_that(lambda: [place.state for place in client.stats().places] == ["ready"])
        client.prefetch(Ask(CHAIN))
        await_that(lambda: client.find_boundary(Ask(CHAIN)) == TOKENS)


def test_what_is_invalidated_does_not_come_back(tmp_path: Path, folder: Path) -> None:
    with (
        serving(tmp_path / "s", tiers={"": [disk_below(folder)]}) as server,
        Client(make_settings(tmp_path / "s", name=NAME)) as client,
    ):
        assert client.wait_until_served(WAIT_S)
        save(client)
        await_that(lambda: counts_of(server)["written"] == 16 + 8 + 4)
        stats = client.stats()
        assert stats.traffic["disk"]["written"] == 28
        # The disk counts its files after the server has counted the blocks.
        while (place := stats.places[0]).records < 28 + 16:
            time.sleep(0.01)
            stats = client.stats()
        assert (place.tier, place.name, place.state, place.records) == ("disk", str(folder), "ready", 28 + 16)
        client.invalidate(0, CHAIN[:32])
        client.stats()
        assert client.acquire(Ask(CHAIN), far=FAR).outcome is AcquireOutcome.MISS
    with (
        serving(tmp_path / "s", tiers={"": [disk_below(folder)]}),
        Client(make_settings(tmp_path / "s", name=NAME)) as client,
    ):
        assert client.wait_until_served(WAIT_S)
        assert client.acquire(Ask(CHAIN), far=FAR).outcome is AcquireOutcome.MISS


def test_a_folder_that_cannot_be_had_is_memory_alone_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path / "s", tiers={"": [disk_below(tmp_path / "not there")]}) as server:
        with Client(make_settings(tmp_path / "s", name=NAME)) as client:
            assert client.wait_until_served(WAIT_S)
            save(client)
            assert client.acquire(Ask(CHAIN), far=FAR).boundary == TOKENS
            assert client.acquire(Ask(bytes(32 * 8)), far=FAR).outcome is AcquireOutcome.MISS
        await_that(lambda: counts_of(server)["failed"] > 0)
        time.sleep(0.6)
    said = [record for record in caplog.records if record.message.startswith("disk tier")]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert "not there is absent: " in said[0].message


def test_without_a_tier_nobody_asks_for_one(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as server, Client(make_settings(tmp_path / "s", name=NAME)) as client:
        assert client.wait_until_served(WAIT_S)
        assert not client.has_tiers
        assert client.acquire(Ask(CHAIN), far=FAR).outcome is AcquireOutcome.MISS
        client.prefetch(Ask(CHAIN))
        assert client.stats().leases == 0
        assert server.core.tiers.files() == []


class TestClientOverDisk(OffloadCacheContract):
    """With a tier below, nothing is another for an engine."""

    @pytest.fixture
    def cache(self, tmp_path: Path, folder: Path) -> Iterator[Any]:
        with (
            serving(tmp_path / "s", tiers={"": [disk_below(folder)]}, domains=PAYING) as server,
            Client(make_settings(tmp_path / "s")) as client,
        ):
            assert client.wait_until_served(WAIT_S)
            yield Settled(client, server)
