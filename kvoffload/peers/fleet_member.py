"""A server of a fleet, as the others know it."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.config.tcp_address import TcpAddress

MAX_MEMBERS = 64
"""Of a fleet. Each has some links to each, and a thread for each end of them."""


@dataclass(frozen=True, kw_only=True)
class FleetMember:
    """All machines know it by the same name: its public key, or without keys its address."""

    address: TcpAddress
    key: str = ""

    @property
    def name(self) -> str:
        return self.key or str(self.address)
