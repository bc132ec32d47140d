from __future__ import annotations

import numpy as np

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.peers.fleet_member import FleetMember, find_homes
from kvoffload.tiers.home_ring import HomeMember, HomeRing
from tests.kit.tiers.tier_contract import hashes_of


def test_a_member_is_called_by_its_key() -> None:
    assert FleetMember(address=TcpAddress("127.0.0.1", 5), key="k" * 40).name == "k" * 40


# ---- where records live ----


NAMES = tuple(f"tcp://10.0.0.{at}:5555" for at in range(5))


def test_homes_are_those_of_the_ring() -> None:
    hashes = hashes_of(0, 500)
    ring = HomeRing(HomeMember(name=name) for name in reversed(NAMES))
    names = [ring.members[at].name for at in ring.homes(hashes)]
    assert [NAMES[at] for at in find_homes(NAMES, hashes)] == names


def test_only_records_of_a_member_that_goes_move() -> None:
    hashes = hashes_of(0, 500)
    before = np.array(NAMES)[find_homes(NAMES, hashes)]
    left = NAMES[:2] + NAMES[3:]
    after = np.array(left)[find_homes(left, hashes)]
    stays = before != NAMES[2]
    assert (before[stays] == after[stays]).all()
    assert not stays.all()


def test_nothing_has_no_home() -> None:
    assert find_homes(NAMES, b"").tolist() == []
