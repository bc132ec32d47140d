"""Entries that anyone may have written to a fleet's registry: unsigned, and signed as only a member of the fleet
could."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.peers import announcement as announcements
from kvoffload.peers.announcement import Announcement, read_announcement
from kvoffload.peers.fleet_member import FleetMember

_FLEET, _SECRET = "blue", b"what only the fleet knows"


def make_seeds() -> Iterator[bytes]:
    for host in ("127.0.0.1", "::1", "host.example"):
        member = FleetMember(address=TcpAddress(host, 5000), key="k" * 40)
        for is_gone in (False, True):
            signed = Announcement(member=member, at_ms=1_700_000_000_000, order=1, is_gone=is_gone).sign(
                _FLEET, _SECRET
            )
            yield b"\0" + signed
            yield b"\1" + signed.rpartition(b" ")[0]


def run(data: bytes) -> None:
    text = data[1:]
    if data[:1] == b"\1":
        said = text.decode(errors="replace")
        text = f"{said} {announcements.sign_words(said, _FLEET, _SECRET)}".encode()
    found = read_announcement(text, _FLEET, _SECRET)
    if found is not None:
        assert read_announcement(found.sign(_FLEET, _SECRET), _FLEET, _SECRET) == found
