"""What a server knows of its fleet before and after its tier is open."""

from __future__ import annotations

from kvoffload.peers import SpaceBook
from kvoffload.peers.fleet_member import MAX_MEMBERS, FleetMember
from kvoffload.peers.fleet_place import FleetPlace, FleetTerms
from kvoffload.peers.fleet_tier import FleetTier
from kvoffload.peers.homes import find_homes
from kvoffload.tcp_address import TcpAddress
from kvoffload.tiers.base import TierState
from tests.unit.daemon.test_server_tiers import await_that
from tests.unit.tiers.tier_contract import hashes_of


def member(port: int, key: str = "") -> FleetMember:
    return FleetMember(address=TcpAddress("127.0.0.1", port), key=key)


def test_a_member_is_called_by_its_key_or_by_its_address() -> None:
    assert member(5, "k" * 40).name == "k" * 40
    assert member(5).name == "tcp://127.0.0.1:5"


def test_before_it_is_open_everything_lives_here() -> None:
    place = FleetPlace(FleetTerms(own=member(5), others=[member(1)]), SpaceBook(), find_homes)
    assert place.describe() == "1 peer"
    assert place.is_home(hashes_of(0, 30)).all()
    assert not place.lives_elsewhere(hashes_of(0, 30)).any()


def test_of_too_many_members_all_machines_choose_the_same() -> None:
    place = FleetPlace(FleetTerms(own=member(5), others=[member(1)], timeout_s=0.1), SpaceBook(), find_homes)
    tier = place.open_tier()
    assert isinstance(tier, FleetTier)
    asked: list[list[str]] = []
    tier.set_members = lambda wanted, places: asked.append(list(wanted))  # type: ignore[method-assign]
    announced = [member(port, f"{port:040}") for port in range(100, 100 + MAX_MEMBERS)]
    for order in (announced, announced[::-1]):
        place._take_members(order)
    assert asked[0] == asked[1] == [one.name for one in announced[: MAX_MEMBERS - 1]]
    tier.close()


def test_while_nobody_answers_everything_lives_here() -> None:
    """Port 1 of loopback has no listener."""
    place = FleetPlace(FleetTerms(own=member(5), others=[member(1)], timeout_s=0.1), SpaceBook(), find_homes)
    tier = place.open_tier()
    await_that(lambda: tier.health()[0].state is TierState.ABSENT)
    assert "the peer at tcp://127.0.0.1:1" in tier.health()[0].reason
    assert place.is_home(hashes_of(0, 30)).all()
    tier.close()
