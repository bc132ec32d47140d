"""Descriptors under way: a share for each user, and who does not read them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvoffload.packets import PacketSocket
from kvoffload.server.channels import unread_descriptors
from kvoffload.server.channels.unread_descriptors import UnreadDescriptors

FIRST, SECOND = 1001, 1002


class Line:
    """Both ends of a connection."""

    def __init__(self, number: int, unread: UnreadDescriptors, uid: int) -> None:
        self.number, self.uid, self._unread = number, uid, unread
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.here, self.there = map(PacketSocket, pair)

    def send(self, count: int = 2) -> bool:
        if not self._unread.may_send(self.uid, count):
            return False
        assert self.here.send(b"x", [0] * count)
        self._unread.note_sent(self.number, self.uid, self.here, count)
        return True

    def send_all(self, count: int = 2) -> int:
        """Sends as many as may be, and returns how many descriptors that were."""
        sent = 0
        while self.send(count):
            sent += count
        return sent

    def read(self) -> None:
        packet = self.there.receive()
        assert packet is not None
        packet.close()

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> UnreadDescriptors:
    monkeypatch.setattr(unread_descriptors, "count_allowed", lambda: 64)
    return UnreadDescriptors()


@pytest.fixture
def lines(unread: UnreadDescriptors) -> Iterator[list[Line]]:
    before = len(os.listdir("/proc/self/fd"))
    made = [Line(number, unread, uid) for number, uid in enumerate((FIRST, FIRST, SECOND))]
    yield made
    for line in made:
        line.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_user_has_all_under_way(lines: list[Line], unread: UnreadDescriptors) -> None:
    first, again, second = lines
    assert first.send_all() == 48
    assert again.send_all() == 0
    assert second.send_all() == 12
    assert len(unread) == 60


def test_what_was_read_makes_room(lines: list[Line], unread: UnreadDescriptors) -> None:
    first, again, _ = lines
    sent = first.send_all()
    for _ in range(sent // 2 - 1):
        first.read()
    assert not again.send()
    first.read()
    assert again.send()
    assert len(unread) == 2


def test_the_end_of_a_line_makes_room(lines: list[Line], unread: UnreadDescriptors) -> None:
    first, again, _ = lines
    first.send_all()
    unread.forget(first.number)
    assert again.send()
    unread.forget(77)


def test_one_packet_goes_whatever_it_has(lines: list[Line]) -> None:
    assert lines[0].send(100)
    assert not lines[1].send(1)
    assert lines[2].send(100)


def test_who_reads_nothing_for_long_is_found_by_who_has_most(lines: list[Line], unread: UnreadDescriptors) -> None:
    first, again, second = lines
    assert unread.find_silent(0, silence_s=10) is None
    again.send()
    first.send_all()
    second.send_all()
    assert unread.find_silent(100, silence_s=10) is None
    assert unread.find_silent(109, silence_s=10) is None
    assert unread.find_silent(110, silence_s=10) == first.number
    first.read()
    assert unread.find_silent(111, silence_s=10) == again.number
    again.read()
    assert unread.find_silent(112, silence_s=10) == second.number
    assert unread.find_silent(121, silence_s=10) == first.number
