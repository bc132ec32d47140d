"""The example of a tier from outside of the tree, 11_custom_tier/memory_tier.py, is a tier like those of the tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from serving import serve

from kvoffload.cache import AcquireOutcome, Ask
from kvoffload.cli.below import choose_tiers
from kvoffload.client import Client, ClientSettings, Member
from kvoffload.config.sources import load_settings
from kvoffload.errors import ConfigError, ServerError
from kvoffload.protocol import Role
from kvoffload.server.config import ServerConfig
from kvoffload.server.tiering.settings import TierPlan
from kvoffload.tiers.base import Tier
from kvoffload.tiers.remote import RemotePlace
from tests.examples.serve import EXAMPLES
from tests.kit.cache.offload_contract import CHAIN, TOKENS, save
from tests.kit.server.remote_loads import load_when_there
from tests.kit.server.tiers import NAME, WAIT_S, await_that, counts_of, serving
from tests.kit.tiers.tier_contract import TIMEOUT_S, TierContract
from tests.unit.client.conftest import make_settings

FOLDER = EXAMPLES / "11_custom_tier"
SETTINGS = {"custom_tier": "memory_tier:MemoryPlace", "custom_tier_place": "16MiB"}


@pytest.fixture(autouse=True)
def _can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))


def plan_tier(**more: str) -> TierPlan:
    [plan] = choose_tiers(load_settings(flags={**SETTINGS, **more}).settings, ServerConfig())[""]
    return plan


def open_tier(**more: str) -> Iterator[Tier]:
    place = plan_tier(**more).place
    assert isinstance(place, RemotePlace)
    tier = place.open_tier()
    assert tier.wait_open(TIMEOUT_S)
    yield tier
    tier.close()


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        yield from open_tier()


class TestMemoryTierOfCodedRecords(TierContract):
    has_numbers = True

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        yield from open_tier(remote_compress="on")


def test_the_example_is_short() -> None:
    assert (FOLDER / "memory_tier.py").read_text().count("\n") <= 150


def test_what_one_server_writes_to_it_another_one_finds(tmp_path: Path) -> None:
    plan = plan_tier()
    with serving(tmp_path / "one", tiers={"": [plan]}) as one, serving(tmp_path / "two", tiers={"": [plan]}):
        with Client(make_settings(tmp_path / "one", name=NAME)) as client:
            assert client.wait_until_served(WAIT_S)
            save(client)
            await_that(lambda: counts_of(one)["written"] == 28)
        with Client(make_settings(tmp_path / "two", name=NAME)) as client:
            assert client.wait_until_served(WAIT_S)
            assert client.acquire(Ask(CHAIN)).outcome is AcquireOutcome.MISS
            assert load_when_there(client) == TOKENS
            assert client.stats().traffic["custom"]["promoted"] > 0


def read_places(client: Client) -> list[tuple[str, str, str, int]]:
    """Reads the server's slower tiers. There are none until it has its memory."""
    with suppress(ServerError):
        return [(one.tier, one.state, one.name, one.capacity_bytes) for one in client.stats().places]
    return []


def test_a_server_loads_it_by_its_path() -> None:
    with serve(memory="64MiB", **SETTINGS) as socket:
        member = Member(engine="test", role=Role.OBSERVER)
        with Client(ClientSettings(socket=socket, member=member)) as client:
            assert client.wait_until_served(60)
            is_there = [("custom", "ready", "16MiB of the server's own memory", 16 << 20)]
            await_that(lambda: read_places(client) == is_there)


def test_a_place_that_it_cannot_read_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"setting 'custom_tier_place' = 'much': .*; allowed is what memory_tier"):
        plan_tier(custom_tier_place="much")
