"""Announcements in the registry that all servers of a fleet read: where a server is, and since when.

Anyone who may write to the registry could announce a server. So an announcement is signed with the fleet's secret, and
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from kvoffload.config.tcp_address import parse_tcp_address
from kvoffload.key_files import is_public_key
from kvoffload.peers.fleet_member import FleetMember

_TEXT_BYTES = 512
_WORDS = 6
_HERE, _GONE = "here", "gone"


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A server's announcement, made at `at_ms` by the registry's clock."""

    member: FleetMember
    at_ms: int
    order: int
    """A number that rises with each announcement of one server, whatever the registry's clock says."""
    is_gone: bool = False
    """Whether the server says farewell."""

    def sign(self, fleet: str, secret: bytes) -> bytes:
        """Returns the announcement as it is written, with the fleet's signature."""
        state = _GONE if self.is_gone else _HERE
        said = f"{self.at_ms} {self.order} {self.member.address} {self.member.key} {state}"
        return f"{said} {sign_words(said, fleet, secret)}".encode()


def read_announcement(text: bytes, fleet: str, secret: bytes) -> Announcement | None:
    """Reads an announcement. None: it is not signed with this fleet's secret, or is not valid."""
    words = text[:_TEXT_BYTES].decode(errors="replace").split(" ")
    if len(words) != _WORDS or not all(word.isascii() and word.isdigit() for word in words[:2]):
        return None
    said = " ".join(words[:-1])
    if not hmac.compare_digest(words[-1].encode(), sign_words(said, fleet, secret).encode()):
        return None
    try:
        address = parse_tcp_address(words[2])
    except ValueError:
        return None
    if not is_public_key(words[3]) or words[4] not in (_HERE, _GONE):
        return None
    member = FleetMember(address=address, key=words[3])
    return Announcement(member=member, at_ms=int(words[0]), order=int(words[1]), is_gone=words[4] == _GONE)


def sign_words(said: str, fleet: str, secret: bytes) -> str:
    return hmac.new(secret, f"kvoffload fleet {fleet}: {said}".encode(), hashlib.sha256).hexdigest()
