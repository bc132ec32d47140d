"""The control channel: bounded frames, bytes and connections, and readers that are never waited for."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from kvoffload import native
from kvoffload.errors import ConfigError
from kvoffload.packets import Credentials, PacketSocket
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.server.channels import control as control_module
from kvoffload.server.channels.control import FRAMES_AT_ONCE, QUEUED_FRAMES, READS_AT_ONCE, ControlLimits, ControlSocket
from kvoffload.server.channels.foreign_files import ForeignFiles
from kvoffload.units import KIB, MIB
from kvoffload.zmtp import pack_head
from tests.kit.lingering import lingering
from tests.kit.server.hostile_user import HELLO_GREETING

TIMEOUT_S = 30.0
HELLO = ControlLimits(hello_bytes=FRAME_BYTES)
SMALL = ControlLimits(connection_bytes=4 * MIB, user_bytes=6 * MIB, all_bytes=9 * MIB, hello_bytes=FRAME_BYTES)


class Setting:
    """The socket with a clock that a test turns, and connections of users that it names."""

    def __init__(self, path: Path, limits: ControlLimits) -> None:
        self.now_s = 0.0
        self.limits = limits
        self.files = ForeignFiles()
        self.control = ControlSocket(
            path, files=self.files, mode=0o660, group=os.getgid(), limits=limits, clock_s=lambda: self.now_s
        )
        self.path = path
        self.opened: list[socket.socket] = []

    def connect(self, said: bytes = b"") -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.opened.append(end)
        end.connect(str(self.path))
        end.sendall(said)
        end.setblocking(False)
        return end

    def join(
        self, *, uid: int | None = None, monkeypatch: pytest.MonkeyPatch | None = None
    ) -> tuple[bytes, socket.socket]:
        """A connection that has said something, by its key."""
        if monkeypatch is not None and uid is not None:
            monkeypatch.setattr(PacketSocket, "credentials", lambda _: Credentials(1, uid, uid))
        end = self.connect(HELLO_GREETING + pack_head(5) + b"hello")
        key, frame = receive(self.control)
        assert frame == b"hello"
        return key, end

    def let_in(self) -> list[tuple[bytes, bytes]]:
        """Lets connections in until nothing more comes."""
        came = []
        while select.select([self.control], [], [], 0)[0]:
            received = self.control.receive()
            if received is not None:
                came.append(received)
        return came

    def close(self) -> None:
        self.control.close()
        self.files.close()
        for end in self.opened:
            end.close()


@pytest.fixture
def limits() -> ControlLimits:
    return HELLO


@pytest.fixture
def setting(tmp_path: Path, limits: ControlLimits) -> Iterator[Setting]:
    made = Setting(tmp_path / "c", limits)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def control(setting: Setting) -> ControlSocket:
    return setting.control


@pytest.fixture
def client(control: ControlSocket) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(control.endpoint)
        yield client


def receive(control: ControlSocket) -> tuple[bytes, bytes]:
    end = time.monotonic() + TIMEOUT_S
    while True:
        received = control.receive()
        if received is not None:
            return received
        assert time.monotonic() < end
        select.select([control], [], [], 0.01)


def is_let_go(end: socket.socket) -> bool:
    try:
        while end.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_frames_go_both_ways(control: ControlSocket, client: zmq.Socket[bytes], tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o660
    assert control.receive() is None
    for size in (0, 1, 255, 256, 70_000, FRAME_BYTES):
        client.send(b"a" * size)
        connection, frame = receive(control)
        assert frame == b"a" * size
        assert control.find_user(connection) == os.getuid()
        assert control.send(connection, b"b" * size)
        end = time.monotonic() + TIMEOUT_S
        while not client.poll(0):
            # The control channel keeps sending what the client has not read yet.
            assert control.receive() is None
            assert time.monotonic() < end
        assert client.recv() == b"b" * size
    assert control.held_bytes == 0


def test_a_message_of_several_parts_is_one_without_bytes(control: ControlSocket, client: zmq.Socket[bytes]) -> None:
    client.send_multipart([b"one", b"two"])
    assert receive(control)[1] == b""


def test_a_frame_that_is_too_long_never_arrives(control: ControlSocket, client: zmq.Socket[bytes]) -> None:
    client.send(b"x" * (FRAME_BYTES + 1))
    client.send(b"x" * FRAME_BYTES)
    assert len(receive(control)[1]) == FRAME_BYTES


def test_who_is_gone_and_who_does_not_read_is_told(control: ControlSocket, client: zmq.Socket[bytes]) -> None:
    assert not control.send(b"nobody", b"x")
    client.send(b"here")
    connection, _ = receive(control)
    sent = 0
    while control.send(connection, b"x" * 1024):
        sent += 1
        assert sent < 100 * QUEUED_FRAMES
    assert sent >= QUEUED_FRAMES
    assert control.take_ended() == [connection]
    assert control.find_user(connection) == 2**32 - 1


def test_a_path_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / ("x" * 120), tmp_path / "none" / "c", tmp_path / "file"):
        with closing(ForeignFiles()) as files, pytest.raises(ConfigError, match="cannot be used"):
            ControlSocket(path, files=files)


def test_a_dead_servers_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "c"))
    with closing(ForeignFiles()) as files:
        ControlSocket(tmp_path / "c", files=files).close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_said_before_the_end_is_served(setting: Setting) -> None:
    said = b"".join(pack_head(1) + bytes((at,)) for at in range(3))
    setting.connect(HELLO_GREETING + said).close()
    assert [receive(setting.control)[1] for _ in range(3)] == [b"\0", b"\1", b"\2"]
    setting.let_in()
    assert len(setting.control.take_ended()) == 1
    assert len(setting.control) == 0


def test_whoever_says_much_is_served_a_part_and_then_the_others(setting: Setting) -> None:
    many = [setting.connect(HELLO_GREETING + (pack_head(1) + b"m") * 500) for _ in range(2)]
    other = setting.connect(HELLO_GREETING + pack_head(1) + b"o")
    came: list[bytes] = []
    while b"o" not in came:
        came.append(receive(setting.control)[1])
    assert len(came) < 3 * FRAMES_AT_ONCE
    setting.control.leave()
    assert len(came) + len(setting.let_in()) == 1001
    del many, other


def test_a_burst_of_one_user_keeps_no_other_waiting(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them find room in the backlog, and one look lets in the user who came last."""
    users = iter([*[1] * 200, 2])
    monkeypatch.setattr(PacketSocket, "credentials", lambda _: Credentials(1, uid := next(users), uid))
    for _ in range(201):
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        setting.opened.append(end)
        end.connect(str(setting.path))
    setting.control.look()
    assert len(setting.control) == setting.limits.unknown + 1


def test_connections_of_one_user_hide_none_of_another(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look reads all that the second user has sent, however many connections of the first one are ready before."""
    many = [setting.join(uid=1, monkeypatch=monkeypatch)[1] for _ in range(3 * READS_AT_ONCE)]
    key, end = setting.join(uid=2, monkeypatch=monkeypatch)
    setting.let_in()
    for one in (*many, end):
        one.sendall(pack_head(4) + b"more")
    setting.control.look()
    came = dict(filter(None, (setting.control.receive() for _ in range(3))))
    assert came.get(key) == b"more"


def test_users_take_turns_however_many_connections_one_has(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two frames of one user, who sends one at a time, there is one frame of another who sends many."""
    many = [setting.join(uid=1, monkeypatch=monkeypatch) for _ in range(20)]
    key, end = setting.join(uid=2, monkeypatch=monkeypatch)
    for _, other in many:
        other.sendall((pack_head(1) + b"m") * 50)
    for _ in range(3):
        end.sendall(pack_head(1) + b"o")
        before = 0
        # As a turn of the loop does.
        setting.control.look()
        setting.control.look()
        while receive(setting.control)[0] != key:
            before += 1
        assert before <= 1


def test_nothing_is_taken_from_a_connection_that_is_held(setting: Setting) -> None:
    (key, end), (other_key, other) = setting.join(), setting.join()
    setting.control.hold(key)
    end.sendall((pack_head(1) + b"h") * 3)
    other.sendall(pack_head(1) + b"o")
    assert setting.let_in() == [(other_key, b"o")]
    setting.control.resume(key)
    assert [receive(setting.control) for _ in range(3)] == [(key, b"h")] * 3


def test_what_a_connection_said_before_it_was_held_waits_and_so_does_its_end(setting: Setting) -> None:
    key, end = setting.join()
    end.sendall((pack_head(1) + b"h") * 3)
    assert receive(setting.control) == (key, b"h")
    setting.control.hold(key)
    end.close()
    assert setting.let_in() == []
    assert setting.control.take_ended() == []
    setting.control.resume(key)
    assert [receive(setting.control) for _ in range(2)] == [(key, b"h")] * 2
    assert setting.control.receive() is None
    assert setting.control.take_ended() == [key]


def test_to_hold_a_connection_that_is_gone_has_no_effect(setting: Setting) -> None:
    setting.control.hold(b"gone")
    setting.control.resume(b"gone")
    assert setting.control.receive() is None


class TestMemory:
    @pytest.fixture
    def limits(self) -> ControlLimits:
        return SMALL

    def test_what_a_connection_does_not_read_is_bounded_in_bytes(self, setting: Setting) -> None:
        key, end = setting.join()
        sent = 0
        while setting.control.send(key, bytes(512 * KIB)):
            sent += 512 * KIB
            assert sent <= 6 * MIB
        assert sent >= 3 * MIB
        assert setting.control.held_bytes == 0
        assert is_let_go(end)

    def test_a_users_connections_share_one_bound_and_the_largest_goes(self, setting: Setting) -> None:
        joined = [setting.join() for _ in range(3)]
        for at, (key, _) in enumerate(joined):
            for _ in range(4 if at == 0 else 3):
                setting.control.send(key, bytes(MIB))
        assert setting.control.held_bytes <= SMALL.user_bytes
        assert setting.control.take_ended() == [joined[0][0]]

    def test_frames_that_are_not_whole_count(self, setting: Setting) -> None:
        half = HELLO_GREETING + pack_head(4 * MIB)
        ends = [setting.connect(half) for _ in range(3)]
        left = dict.fromkeys(ends, 4 * MIB - 1)
        while left and len(setting.control.take_ended()) == 0:
            for end in list(left):
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    left[end] -= end.send(bytes(min(left[end], 64 * KIB)))
                if not left[end]:
                    del left[end]
            assert setting.let_in() == []
            assert setting.control.held_bytes <= SMALL.user_bytes
        assert sum(map(is_let_go, ends)) == 1

    def test_where_all_have_too_much_whoever_has_most_goes(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = {}
        for uid, count in ((1, 3), (2, 5), (3, 2)):
            keys[uid], _ = setting.join(uid=uid, monkeypatch=monkeypatch)
            for _ in range(count):
                setting.control.send(keys[uid], bytes(900 * KIB))
        assert setting.control.held_bytes <= SMALL.all_bytes
        assert keys[3] not in setting.control.take_ended()


class TestStrangers:
    @pytest.fixture
    def limits(self) -> ControlLimits:
        return ControlLimits(connections=16, unknown=4, hello_s=10, hello_bytes=1000)

    def test_until_hello_frames_are_small(self, setting: Setting) -> None:
        key, end = setting.join()
        assert setting.control.is_unknown(key)
        end.sendall(pack_head(1001))
        assert setting.let_in() == []
        assert is_let_go(end)
        key, end = setting.join()
        setting.control.trust(key)
        assert not setting.control.is_unknown(key)
        end.sendall(pack_head(1001) + bytes(1001))
        assert receive(setting.control) == (key, bytes(1001))

    def test_whose_hello_does_not_come_in_time_is_let_go(self, setting: Setting) -> None:
        known, end = setting.join()
        setting.control.trust(known)
        silent = [setting.connect(said) for said in (b"", HELLO_GREETING[:20], HELLO_GREETING)]
        setting.let_in()
        setting.now_s = 9.9
        setting.control.tick()
        assert not any(map(is_let_go, silent))
        setting.now_s = 10.0
        setting.control.tick()
        assert all(map(is_let_go, silent))
        assert not is_let_go(end)

    def test_who_has_gone_before_he_was_let_in_takes_nobodys_place(self, setting: Setting) -> None:
        silent = setting.connect()
        for _ in range(setting.limits.unknown):
            setting.connect().close()
        setting.let_in()
        assert not is_let_go(silent)
        assert len(setting.control) == 1

    def test_of_those_who_say_nothing_the_oldest_of_their_user_goes(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, other = setting.join(uid=7, monkeypatch=monkeypatch)
        monkeypatch.setattr(PacketSocket, "credentials", lambda _: Credentials(1, 8, 8))
        silent = [setting.connect() for _ in range(9)]
        setting.let_in()
        assert list(map(is_let_go, silent)) == [True] * 5 + [False] * 4
        assert not is_let_go(other)

    def test_no_user_gets_all_connections(self, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PacketSocket, "credentials", lambda _: Credentials(1, 8, 8))
        ends = []
        for _ in range(20):
            ends.append(setting.connect(HELLO_GREETING + pack_head(1) + b"x"))
            for key, _ in setting.let_in():
                setting.control.trust(key)
        assert len(setting.control) == 12
        key, _ = setting.join(uid=7, monkeypatch=monkeypatch)
        assert setting.control.find_user(key) == 7
        ends[0].close()
        setting.let_in()
        monkeypatch.setattr(PacketSocket, "credentials", lambda _: Credentials(1, 8, 8))
        setting.connect()
        setting.let_in()
        assert len(setting.control) == 13

    def test_the_last_descriptors_are_kept_for_others(self, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control_module, "is_of_reserve", lambda _: True)
        end = setting.connect()
        setting.let_in()
        assert is_let_go(end)
        monkeypatch.undo()
        setting.join()

    def test_where_there_is_no_descriptor_nobody_is_let_in_for_a_moment(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        end = setting.connect(HELLO_GREETING + pack_head(1) + b"x")
        with monkeypatch.context() as full:
            full.setattr(native, "accept_open", lambda _: -errno.EMFILE)
            assert setting.let_in() == []
        setting.control.tick()
        assert [frame for _, frame in setting.let_in()] == [b"x"]
        assert not is_let_go(end)


def test_a_chunk_is_less_than_may_lie_here() -> None:
    assert control_module.CHUNK_BYTES < ControlLimits().connection_bytes <= ControlLimits().user_bytes


@pytest.mark.parametrize("is_refused", [True, False], ids=["as the kernel can", "before Linux 6.16"])
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
def test_a_descriptor_that_cannot_be_closed_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool, is_read: bool
) -> None:
    if not is_refused:
        monkeypatch.setattr(control_module, "refuse_descriptors", lambda _: False)
    setting = Setting(tmp_path / "c", HELLO)
    with lingering() as held:
        key, end = setting.join()
        said = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, held.fileno()]))
        with contextlib.suppress(PermissionError):
            end.sendmsg([pack_head(5) + b"again"], [said])
            held.part()
        if is_read:
            setting.let_in()
        else:
            setting.control.send(key, bytes(64 * MIB))
        assert is_refused or is_let_go(end)
        setting.join()
        setting.close()
        assert setting.files.count(os.getuid(), "control") == (not is_refused)


def test_who_waits_to_be_let_in_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "refuse_descriptors", lambda _: False)
    setting = Setting(tmp_path / "c", HELLO)
    with lingering() as held, socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(str(tmp_path / "c"))
        said = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [held.fileno()]))
        waiting.sendmsg([b"hello"], [said])
        held.part()
        waiting.close()
        setting.close()
