"""Where a Valkey or Redis server is, as users write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote, urlsplit

VALKEY_FORM: Final = "valkey://[user@]host[:port][/database], or valkeys:// for TLS"
_PORT = 6379


@dataclass(frozen=True, kw_only=True)
class ValkeyAddress:
    """The address of a server, which `parse_valkey_address` reads and `str` writes out again. It has no secrets."""

    host: str
    port: int = _PORT
    database: int = 0
    user: str = ""
    has_tls: bool = False

    def __str__(self) -> str:
        user = f"{quote(self.user, safe='')}@" if self.user else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"valkey{'s' if self.has_tls else ''}://{user}{host}:{self.port}/{self.database}"


def parse_valkey_address(text: str) -> ValkeyAddress:
    """Reads an address. ValueError: it is wrong; the error says why. Any node of a cluster is an address of it."""
    parts = urlsplit(text)
    database = parts.path.strip("/") or "0"
    if parts.scheme not in ("valkey", "valkeys") or not parts.hostname:
        raise ValueError("no scheme and host")
    if parts.password is not None:
        raise ValueError("a password has a file of its own, valkey_password_file")
    if parts.query or parts.fragment or not (database.isascii() and database.isdigit()):
        raise ValueError("more than a number behind the host")
    return ValkeyAddress(
        host=parts.hostname,
        port=parts.port or _PORT,
        database=int(database),
        user=unquote(parts.username or ""),
        has_tls=parts.scheme == "valkeys",
    )
