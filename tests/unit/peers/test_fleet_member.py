from __future__ import annotations

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.peers.fleet_member import MAX_MEMBERS, FleetMember, choose_members


def test_a_member_is_called_by_its_key() -> None:
    assert FleetMember(address=TcpAddress("127.0.0.1", 5), key="k" * 40).name == "k" * 40


def test_a_fleet_has_the_first_members_by_name() -> None:
    names = [f"key-{at:03}" for at in range(MAX_MEMBERS + 6)]
    assert choose_members([*reversed(names), names[3]]) == tuple(names[:MAX_MEMBERS])
