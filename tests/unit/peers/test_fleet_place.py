"""A server's picture of its fleet before and after its tier is open."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.peers import SpaceTable, fleet_place
from kvoffload.peers.fleet_member import MAX_MEMBERS, FleetMember
from kvoffload.peers.fleet_place import FleetPlace, FleetSettings
from kvoffload.peers.fleet_registry import RegistrySettings
from kvoffload.peers.fleet_tier import FleetTier
from kvoffload.tiers.base import TierState
from kvoffload.tiers.homes import find_homes
from kvoffload.tiers.valkey import ValkeySettings
from tests.kit.server.remote_client import make_keys
from tests.kit.server.tiers import await_that
from tests.kit.tiers.tier_contract import hashes_of

KEYS, PEER = make_keys(), make_keys()
OWN = FleetMember(address=TcpAddress("127.0.0.1", 5), key=KEYS.public.decode())
OTHER = FleetMember(address=TcpAddress("127.0.0.1", 1), key=PEER.public.decode())


def member(port: int, key: str) -> FleetMember:
    return FleetMember(address=TcpAddress("127.0.0.1", port), key=key)


def test_a_member_is_called_by_its_key() -> None:
    assert member(5, "k" * 40).name == "k" * 40


def test_before_it_is_open_everything_lives_here() -> None:
    place = FleetPlace(FleetSettings(own=OWN, others=[OTHER], keys=KEYS), SpaceTable(), find_homes)
    assert place.describe() == "1 peer"
    assert place.is_home(hashes_of(0, 30)).all()
    assert not place.lives_elsewhere(hashes_of(0, 30)).any()


class Told(FleetPlace):
    """One server of a fleet, whose tier asks no other server."""

    def __init__(self, own: FleetMember, *others: FleetMember, registry: RegistrySettings | None = None) -> None:
        self.admitted: list[FleetMember] = []
        super().__init__(
            FleetSettings(own=own, others=others, keys=KEYS, timeout_s=0.1, registry=registry),
            SpaceTable(),
            find_homes,
            on_members=lambda members: self.admitted.__setitem__(slice(None), members),
        )
        self.tier = self.open_tier()
        assert isinstance(self.tier, FleetTier)
        self.members: tuple[str, ...] = ()
        self.tier.set_members = self.take  # type: ignore[method-assign]

    def take(self, wanted: object, places: Mapping[str, str]) -> None:
        self.members = tuple(sorted([*places, self.settings.own.name]))

    def faults(self) -> list[str]:
        return [one.reason for one in self.tier.health() if one.name == "this server"]


@pytest.mark.parametrize("count", [2, MAX_MEMBERS - 1, MAX_MEMBERS, MAX_MEMBERS + 1, 70, 200])
def test_however_many_servers_there_are_all_members_agree_on_homes(count: int) -> None:
    servers = [member(port, f"{port * 7919 % 10007:040}") for port in range(100, 100 + count)]
    places = [Told(own) for own in servers]
    try:
        for at, place in enumerate(places):
            place.take_members([*servers[at + 1 :], *servers[:at]])
        fleet = sorted(one.name for one in servers)[:MAX_MEMBERS]
        hashes = hashes_of(0, 500)
        homes = np.array(fleet)[find_homes(tuple(fleet), hashes)]
        for place in places:
            if place.settings.own.name in fleet:
                assert (np.array(place.members)[find_homes(place.members, hashes)] == homes).all()
                assert [one.name for one in place.admitted] == [n for n in order(servers, place) if n in fleet]
                assert place.faults() == []
            else:
                assert place.members == (place.settings.own.name,)
                assert place.admitted == []
                (told,) = place.faults()
                assert told.startswith(f"the fleet has {count} servers, and its members are the first 64 by key")
    finally:
        for place in places:
            place.tier.close()


def order(servers: list[FleetMember], place: Told) -> list[str]:
    """Returns members as they were announced there."""
    at = servers.index(place.settings.own)
    return [one.name for one in (*servers[at + 1 :], *servers[:at])]


def test_a_server_for_which_there_is_room_again_is_a_member() -> None:
    servers = [member(port, f"{port:040}") for port in range(100, 101 + MAX_MEMBERS)]
    last = Told(servers[-1])
    last.take_members(servers[:-1])
    assert len(last.faults()) == 1
    last.take_members(servers[1:-1])
    assert last.faults() == []
    assert last.members == tuple(one.name for one in servers[1:])
    last.tier.close()


def test_members_that_are_named_count_as_those_that_were_announced() -> None:
    servers = [member(port, f"{port:040}") for port in range(100, 102 + MAX_MEMBERS)]
    first = Told(servers[0], servers[1])
    for announced in (servers[2:], servers[:1:-1]):
        first.take_members(announced)
        assert first.members == tuple(one.name for one in servers[:MAX_MEMBERS])
    first.tier.close()


def test_a_server_with_another_ones_key_is_told_where_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = SimpleNamespace(twin_at="", start=lambda: None, close=lambda: None)
    monkeypatch.setattr(fleet_place, "FleetRegistry", lambda *given: registry)
    valkey = ValkeySettings(address=ValkeyAddress(host="127.0.0.1", port=1))
    place = Told(member(5, "k" * 40), registry=RegistrySettings(valkey=valkey, fleet="blue", secret=b"the fleet's"))
    place.take_members([])
    assert place.faults() == []
    registry.twin_at = "tcp://10.0.0.2:5555"
    place.take_members([])
    (told,) = place.faults()
    assert told == (
        "another server, at tcp://10.0.0.2:5555, announces itself with this server's key; give each a key of its own"
    )
    place.tier.close()


def test_while_nobody_answers_everything_lives_here() -> None:
    """Port 1 of loopback has no listener."""
    place = FleetPlace(FleetSettings(own=OWN, others=[OTHER], keys=KEYS, timeout_s=0.1), SpaceTable(), find_homes)
    tier = place.open_tier()
    await_that(lambda: tier.health()[0].state is TierState.ABSENT)
    assert "the peer at tcp://127.0.0.1:1" in tier.health()[0].reason
    assert place.is_home(hashes_of(0, 30)).all()
    tier.close()
