"""Where a server listens over TCP: `tcp://127.0.0.1:5555`, `tcp://[::1]:5555`.

Names are not accepted: the address that a name stands for may change, and with it who can reach the server.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

TCP_FORM = "an address with its port such as tcp://127.0.0.1:5555 or tcp://[::1]:5555; names are not looked up"

_PARTS = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})", re.ASCII)
_LOOPBACK_4 = ipaddress.IPv4Network("127.0.0.0/8")
_LOOPBACK_6 = ipaddress.IPv6Address("::1")


@dataclass(frozen=True)
class TcpAddress:
    """One address of this machine, or all of one family: 0.0.0.0 or [::]."""

    host: str
    port: int
    """0: one that is free."""

    @property
    def is_version_6(self) -> bool:
        return ":" in self.host

    @property
    def is_loopback(self) -> bool:
        """Other machines cannot reach it. `::ffff:127.0.0.1` and the like are not taken for loopback."""
        address = ipaddress.ip_address(self.host)
        if isinstance(address, ipaddress.IPv4Address):
            return address in _LOOPBACK_4
        return address == _LOOPBACK_6

    @property
    def is_any(self) -> bool:
        """It stands for all addresses of one family, and is none that others could name."""
        return ipaddress.ip_address(self.host).is_unspecified

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if self.is_version_6 else f"tcp://{self.host}:{self.port}"


def parse_tcp_address(text: str) -> TcpAddress:
    """ValueError says what is wrong."""
    match = _PARTS.fullmatch(text)
    if match is None:
        raise ValueError("not an address with its port")
    host, port = match.group(1) or match.group(2), int(match.group(3))
    try:
        address = ipaddress.IPv6Address(host) if match.group(1) else ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError(f"{host} is no address") from None
    if port > 65535:
        raise ValueError(f"there is no port {port}")
    return TcpAddress(str(address), port)
