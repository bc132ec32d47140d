from __future__ import annotations

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.peers.fleet_member import FleetMember


def test_a_member_is_called_by_its_key_or_by_its_address() -> None:
    address = TcpAddress("127.0.0.1", 5)
    assert FleetMember(address=address, key="k" * 40).name == "k" * 40
    assert FleetMember(address=address).name == "tcp://127.0.0.1:5"
