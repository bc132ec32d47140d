"""Packets: whole, in order, with their descriptors; nothing is left open, whatever the other end does."""

from __future__ import annotations

import array
import errno
import fcntl
import gc
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import native
from kvoffload.errors import PacketError
from kvoffload.packets import (
    MAX_DESCRIPTORS,
    MAX_PACKET_BYTES,
    Credentials,
    Packet,
    PacketSocket,
    ReceivedDescriptor,
    accept_open,
    refuse_descriptors,
)
from tests.kit.crowded_kernel import Kernel


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Ends:
    """Both ends in this process, the second also as the plain socket that it is."""

    def __init__(self) -> None:
        first, self.raw = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.here = PacketSocket(first)
        self.there = PacketSocket(self.raw)

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    gc.collect()
    before = open_descriptors()
    ends = Ends()
    yield ends
    ends.close()
    gc.collect()
    assert open_descriptors() == before


def received(end: PacketSocket) -> Packet:
    packet = end.receive()
    assert packet is not None
    return packet


def test_packets_arrive_whole_and_in_order(ends: Ends) -> None:
    assert ends.there.receive() is None
    sent = [b"a", b"b" * MAX_PACKET_BYTES, b"\0"]
    for data in sent:
        assert ends.here.send(data)
        assert received(ends.there).data == data
    for data in (b"1", b"22", b"333"):
        assert ends.here.send(data)
    assert [received(ends.there).data for _ in range(3)] == [b"1", b"22", b"333"]
    assert ends.there.receive() is None


def test_descriptors_come_with_their_packet_and_close_with_a_program(ends: Ends) -> None:
    reading, writing = os.pipe()
    assert ends.here.send(b"pipe", [writing])
    os.close(writing)
    packet = received(ends.there)
    (taken,) = packet.take()
    assert fcntl.fcntl(taken, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.write(taken, b"through")
    os.close(taken)
    assert os.read(reading, 20) == b"through"
    assert os.read(reading, 20) == b""  # no other process has the other end open
    os.close(reading)


def test_what_is_not_taken_is_closed(ends: Ends) -> None:
    reading, writing = os.pipe()
    for use in ("with", "forgotten"):
        assert ends.here.send(b"x", [writing] * 5)
        before = open_descriptors()
        if use == "with":
            with received(ends.there) as packet:
                assert open_descriptors() == before + 5
                assert len(packet.descriptors) == 5
        else:
            received(ends.there)
            gc.collect()
        assert open_descriptors() == before
    os.close(reading)
    os.close(writing)


def test_as_many_descriptors_as_the_kernel_takes(ends: Ends) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    assert ends.here.send(b"many", [null] * MAX_DESCRIPTORS)
    with received(ends.there) as packet:
        assert len(packet.descriptors) == MAX_DESCRIPTORS
    os.close(null)


@pytest.mark.parametrize(("data", "count"), [(b"", 0), (b"x" * (MAX_PACKET_BYTES + 1), 0), (b"x", MAX_DESCRIPTORS + 1)])
def test_what_no_packet_may_be_is_not_sent(ends: Ends, data: bytes, count: int) -> None:
    with pytest.raises(ValueError, match="a packet has 1 to 65536 bytes and at most 253 descriptors"):
        ends.here.send(data, [0] * count)


def test_a_packet_that_is_too_long_is_a_fault_and_its_descriptors_are_closed(ends: Ends) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 0]))]
    before = open_descriptors()
    ends.raw.sendmsg([b"x" * (MAX_PACKET_BYTES + 1)], rights)
    with pytest.raises(PacketError, match="longer than 65536 bytes"):
        ends.here.receive()
    assert open_descriptors() == before


def test_more_descriptors_than_allowed_are_a_fault_and_closed(ends: Ends) -> None:
    before = open_descriptors()
    assert ends.there.send(b"x", [0, 0, 0])
    with pytest.raises(PacketError, match="has 3 descriptors, allowed are 2"):
        ends.here.receive(most_descriptors=2)
    assert open_descriptors() == before
    assert ends.there.send(b"y", [0, 0])
    with received(ends.here) as packet:
        assert packet.data == b"y"


def test_descriptors_that_this_process_has_no_room_for_are_told(ends: Ends) -> None:
    assert ends.there.send(b"x", [0] * 200)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 5, limits[1]))
    try:
        with pytest.raises(PacketError, match="descriptors were lost"):
            ends.here.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_descriptors() == before


def test_an_empty_packet_is_a_fault(ends: Ends) -> None:
    ends.raw.sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
    with pytest.raises(PacketError, match="no bytes"):
        ends.here.receive()


@pytest.mark.parametrize("packets", [[], [b""], [b"x"], [b"", b""], [b"", b"x"]])
@pytest.mark.parametrize("is_gone", [True, False])
def test_an_end_knows_whether_something_was_not_received(ends: Ends, packets: list[bytes], is_gone: bool) -> None:
    """A packet without bytes may have descriptors, too, and is not the end of the connection."""
    with socket.socket(fileno=os.dup(ends.here.fileno())) as sender:
        for packet in packets:
            sender.send(packet)
    if is_gone:
        ends.here.close()
    ends.there.shut()
    assert ends.there.is_empty() == (not packets)
    if not is_gone:
        with pytest.raises(PacketError):
            ends.here.send(b"late")


def test_descriptors_are_refused_where_nobody_wants_them(ends: Ends) -> None:
    if not refuse_descriptors(ends.raw):
        assert os.uname().release.split(".") < ["6", "16"]
        return
    with pytest.raises(PacketError, match="not permitted"):
        ends.here.send(b"x", [0])
    assert ends.here.send(b"x")


def test_an_end_that_is_gone_is_told_on_both_ways(ends: Ends) -> None:
    assert ends.there.send(b"last")
    ends.there.close()
    assert received(ends.here).data == b"last"
    with pytest.raises(PacketError, match="closed the connection"):
        ends.here.receive()
    with pytest.raises(PacketError, match="cannot be sent"):
        ends.here.send(b"x")


def test_a_reader_that_is_slow_is_waited_for_by_nobody(ends: Ends) -> None:
    sent = 0
    while ends.here.send(b"x" * 4096):
        sent += 1
        assert sent < 100_000
    assert sent > 0
    assert received(ends.there).data == b"x" * 4096
    while ends.there.receive() is not None:
        pass
    assert ends.here.send(b"again")


def test_the_other_end_is_who_the_kernel_says(ends: Ends) -> None:
    assert ends.here.credentials() == Credentials(os.getpid(), os.getuid(), os.getgid())
    pidfd = ends.here.open_pidfd()
    if pidfd is not None:  # Linux 6.5
        info = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        assert f"Pid:\t{os.getpid()}\n" in info
        os.close(pidfd)


def test_no_credentials_are_a_fault() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    closed = PacketSocket(one)
    closed.close()
    with pytest.raises(PacketError, match="credentials"):
        closed.credentials()
    other.close()


def test_descriptors_that_are_not_taken_were_never_here(ends: Ends, tmp_path: Path) -> None:
    script = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    path = tmp_path / "lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.lockf(lock, fcntl.LOCK_EX)
    before = open_descriptors()
    for most in (0, 1, 2):
        assert ends.here.send(b"x", [0] * most + [lock] * 5)
        assert ends.there.peek() == (b"x", True)
        packet = ends.there.receive(most, drops_rest=True)
        assert packet is not None
        with packet:
            assert (packet.data, len(packet.descriptors)) == (b"x", most)
        assert open_descriptors() == before
    other = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, check=False)
    assert other.returncode != 0
    os.close(lock)


def test_what_was_looked_at_stays(ends: Ends) -> None:
    assert ends.there.peek() is None
    assert ends.here.send(b"first", [0])
    assert ends.here.send(b"second")
    assert (ends.there.peek(), ends.there.peek()) == ((b"first", True), (b"first", True))
    with received(ends.there) as packet:
        assert (packet.data, len(packet.descriptors)) == (b"first", 1)
    assert received(ends.there).data == b"second"
    ends.here.close()
    assert ends.there.peek() == (b"", False)
    with pytest.raises(PacketError):
        ends.there.receive()


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.integers(0, 4)), max_size=20))
def test_any_packets_arrive_as_they_were(packets: list[tuple[bytes, int]]) -> None:
    before = open_descriptors()
    ends = Ends()
    for data, count in packets:
        assert ends.here.send(data, [0] * count)
    for data, count in packets:
        with received(ends.there) as packet:
            assert (packet.data, len(packet.descriptors)) == (data, count)
    ends.close()
    assert open_descriptors() == before


def test_what_is_unread_is_counted(ends: Ends) -> None:
    assert ends.here.count_unread_bytes() == 0
    assert ends.here.send(b"x" * 1000, [0])
    assert ends.here.send(b"y" * 1000)
    both = ends.here.count_unread_bytes()
    assert both >= 2000
    received(ends.there).close()
    assert 1000 <= ends.here.count_unread_bytes() < both
    received(ends.there).close()
    assert ends.here.count_unread_bytes() == 0


def test_too_many_under_way_is_no_want_of_room_here(ends: Ends) -> None:
    kernel = Kernel()
    there = kernel.wrap(ends.raw)
    while ends.here.send(b"x" * 1000):
        pass
    assert not ends.here.is_crowded
    assert not there.send(b"x", [0])
    assert there.is_crowded
    kernel.is_crowded = False
    assert there.send(b"x", [0])
    assert not there.is_crowded


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("ends_by", ["close", "forgetting"])
def test_a_received_descriptor_that_is_not_taken_is_closed(ends_by: str) -> None:
    number = os.open(os.devnull, os.O_RDONLY)
    received: ReceivedDescriptor | None = ReceivedDescriptor(number)
    if ends_by == "close":
        assert received is not None
        received.close()
        received.close()
    received = None
    assert not is_open(number)


def test_a_received_descriptor_that_is_taken_stays() -> None:
    number = os.open(os.devnull, os.O_RDONLY)
    received = ReceivedDescriptor(number)
    assert received.take() == number
    received.close()
    del received
    assert is_open(number)
    os.close(number)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as listening:
        listening.bind("")
        listening.listen()
        yield listening


def connect_to(listener: socket.socket) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.connect(listener.getsockname())
    return end


def test_connections_that_are_still_open_are_accepted(listener: socket.socket) -> None:
    assert accept_open(listener) is None
    for _ in range(3):
        connect_to(listener).close()
    with connect_to(listener) as end:
        accepted = accept_open(listener)
        assert accepted is not None
        with accepted:
            assert (accepted.family, accepted.type, accepted.gettimeout()) == (listener.family, listener.type, 0.0)
            end.send(b"x")
            assert accepted.recv(1) == b"x"
    assert accept_open(listener) is None


def test_without_descriptors_none_is_accepted(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "accept_open", lambda _: -errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        accept_open(listener)
