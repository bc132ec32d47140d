"""What a server of a fleet writes to the registry that all of them read: where it is, and since when.

Anyone who may write to the registry could announce somebody. So an announcement is signed with the fleet's secret, and
is good for a short while by the registry's own clock.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from kvoffload.config.tcp_address import parse_tcp_address
from kvoffload.key_files import is_public_key
from kvoffload.peers.fleet_member import FleetMember

_TEXT_BYTES = 512
_WORDS = 5
_HERE, _GONE = "here", "gone"


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """`at_ms`: by the registry's clock."""

    member: FleetMember
    at_ms: int
    is_gone: bool = False
    """It says farewell."""

    def sign(self, fleet: str, secret: bytes) -> bytes:
        """Returns it as it is written, with the fleet's signature."""
        said = f"{self.at_ms} {self.member.address} {self.member.key} {_GONE if self.is_gone else _HERE}"
        return f"{said} {sign_words(said, fleet, secret)}".encode()


def read_announcement(text: bytes, fleet: str, secret: bytes) -> Announcement | None:
    """Reads an announcement. None: nobody of this fleet has signed it."""
    words = text[:_TEXT_BYTES].decode(errors="replace").split(" ")
    if len(words) != _WORDS or not (words[0].isascii() and words[0].isdigit()):
        return None
    said = " ".join(words[:-1])
    if not hmac.compare_digest(words[-1].encode(), sign_words(said, fleet, secret).encode()):
        return None
    try:
        address = parse_tcp_address(words[1])
    except ValueError:
        return None
    if not is_public_key(words[2]) or words[3] not in (_HERE, _GONE):
        return None
    member = FleetMember(address=address, key=words[2])
    return Announcement(member=member, at_ms=int(words[0]), is_gone=words[3] == _GONE)


def sign_words(said: str, fleet: str, secret: bytes) -> str:
    return hmac.new(secret, f"kvoffload fleet {fleet}: {said}".encode(), hashlib.sha256).hexdigest()
