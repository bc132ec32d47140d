"""Where the master of a Mooncake store is, as users write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

MOONCAKE_FORM: Final = "mooncake://host:port of its master"


@dataclass(frozen=True, kw_only=True)
class MooncakeAddress:
    """The address of a master, which `parse_mooncake_address` reads and `str` writes out again."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """The address as Mooncake writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"mooncake://{self.endpoint}"


def parse_mooncake_address(text: str) -> MooncakeAddress:
    """Reads an address. ValueError: it is wrong; the error says why."""
    parts = urlsplit(text)
    if parts.scheme != "mooncake" or not parts.hostname or not parts.port:
        raise ValueError("no scheme, host and port")
    if parts.username or parts.password or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError("more than a host and a port")
    return MooncakeAddress(host=parts.hostname, port=parts.port)
