"""Only a server that knows the fleet's secret can announce a member, and only as it was signed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.peers.announcement import Announcement, read_announcement, sign_words
from kvoffload.peers.fleet_member import FleetMember
from tests.kit.server.remote_client import make_keys

SECRET = b"what only the fleet knows"
ANNOUNCEMENT = Announcement(
    member=FleetMember(address=TcpAddress("10.0.0.1", 5555), key=make_keys().public.decode()),
    at_ms=1_700_000_000_000,
    order=1_700_000_000_001,
)


def test_an_announcement_is_read_as_it_was_signed() -> None:
    assert read_announcement(ANNOUNCEMENT.sign("blue", SECRET), "blue", SECRET) == ANNOUNCEMENT
    farewell = Announcement(member=ANNOUNCEMENT.member, at_ms=5, order=1, is_gone=True)
    assert read_announcement(farewell.sign("blue", SECRET), "blue", SECRET) == farewell
    six = Announcement(member=FleetMember(address=TcpAddress("::1", 5), key=ANNOUNCEMENT.member.key), at_ms=0, order=1)
    assert read_announcement(six.sign("blue", SECRET), "blue", SECRET) == six


def test_of_another_fleet_or_secret_nothing_is_read() -> None:
    assert read_announcement(ANNOUNCEMENT.sign("red", SECRET), "blue", SECRET) is None
    assert read_announcement(ANNOUNCEMENT.sign("blue", b"guessed"), "blue", SECRET) is None


@pytest.mark.parametrize("word", range(6))
def test_nothing_of_it_can_be_changed(word: int) -> None:
    words = ANNOUNCEMENT.sign("blue", SECRET).split(b" ")
    changed = words[word][:-1] + (b"1" if words[word][-1:] != b"1" else b"2")
    text = b" ".join([*words[:word], changed, *words[word + 1 :]])
    assert read_announcement(text, "blue", SECRET) is None


@pytest.mark.parametrize("number", ["\u00b2", "\u0665", "-5", "5_0", "", "1.5"])
def test_numbers_are_in_plain_digits(number: str) -> None:
    """Some digits of other scripts are digits to Python, and no numbers."""
    for numbers in (f"{number} 1", f"1 {number}"):
        said = f"{numbers} {ANNOUNCEMENT.member.address} {ANNOUNCEMENT.member.key} here"
        assert read_announcement(f"{said} {sign_words(said, 'blue', SECRET)}".encode(), "blue", SECRET) is None


@given(st.binary(max_size=600))
def test_whatever_is_written_is_an_announcement_or_nothing(text: bytes) -> None:
    assert read_announcement(text, "blue", SECRET) is None
