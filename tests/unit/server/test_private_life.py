"""How a private server ends: alone, with the start lock, and when all that had come is served."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.file_lock import FileLock
from kvoffload.packets import PacketSocket
from kvoffload.private_files import PrivateFiles
from kvoffload.protocol import CODEC, Channel, Greeting, Role
from kvoffload.server.channels.foreign_files import ForeignFiles
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.server.private_life import LOG_BYTES, Ending, EndingSettings, PrivateLife, PrivateSettings
from tests.kit.server.blocks import MEMORY, register_of
from tests.kit.server.raw_client import RawClient

S = 1_000_000_000
WAIT_S = 60.0


@pytest.fixture
def files(tmp_path: Path) -> PrivateFiles:
    files = PrivateFiles.named(tmp_path)
    files.make_folder()
    files.log.write_text("the log\n")
    return files


class Clock:
    """It stands still until it is set."""

    now_s = 0.0

    def read_ns(self) -> int:
        return int(self.now_s * S)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(files: PrivateFiles, clock: Clock) -> Iterator[CacheServer]:
    settings = PrivateSettings(files=files, ending=EndingSettings(linger_s=10, first_engine_s=60))
    plan = ServerPlan(socket=files.socket, memory={"": MEMORY}, private=settings)
    server = CacheServer(plan, clock_ns=clock.read_ns)
    yield server
    server.close()


def greet(path: Path, role: Role = Role.WORKER) -> PacketSocket:
    """A process that is on its way: it has connected and greeted, and the server has seen neither."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connected.connect(str(path))
    end = PacketSocket(connected)
    pidfd = os.pidfd_open(os.getpid())
    greeting = Greeting(protocol_min=1, protocol_max=1, engine="late", role=role, rank=0)
    assert end.send(CODEC.encode_call(greeting, number=1, channel=Channel.LIFELINE), [pidfd])
    os.close(pidfd)
    return end


def test_it_ends_when_nobody_comes_and_leaves_nothing(server: CacheServer, clock: Clock, tmp_path: Path) -> None:
    clock.now_s = 59.9
    assert server.turn(0)
    clock.now_s = 60
    assert not server.turn(0)
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_it_does_not_end_while_somebody_is_about_to_start_one(
    server: CacheServer, clock: Clock, files: PrivateFiles
) -> None:
    starter = FileLock.take(files.start_lock)
    assert starter is not None
    clock.now_s = 60
    assert server.turn(0)
    starter.close()
    assert not server.turn(0)
    # From here on no other server may start, until all of this one is gone.
    assert FileLock.take(files.start_lock) is None
    server.close()
    assert not files.folder.exists()


def test_who_came_in_the_last_moment_is_served(
    server: CacheServer, clock: Clock, files: PrivateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_start, do = PrivateLife.hold_start, ForeignFiles.do
    came: list[PacketSocket] = []
    is_held = threading.Event()

    def hold(life: PrivateLife) -> bool:
        if not came:
            came.append(greet(files.socket))
        return hold_start(life)

    def do_late(jobs: ForeignFiles, uid: int, act: Callable[[], object], **others: Any) -> None:
        do(jobs, uid, lambda: is_held.wait(WAIT_S) and act(), **others)

    monkeypatch.setattr(PrivateLife, "hold_start", hold)
    monkeypatch.setattr(ForeignFiles, "do", do_late)
    clock.now_s = 60
    # Another thread receives the greeting, because a descriptor comes with it, and has not finished yet.
    assert all(server.turn(0) for _ in range(3))
    is_held.set()
    while came[0].receive() is None:
        assert server.turn(0.001)
    starter = FileLock.take(files.start_lock)
    assert starter is not None
    starter.close()
    # It is used from now on, for as long as that process lives, with its lifeline or without.
    came[0].close()
    clock.now_s = 600
    assert server.turn(0)


def test_an_observer_does_not_keep_it(server: CacheServer, clock: Clock, files: PrivateFiles) -> None:
    observer = greet(files.socket, Role.OBSERVER)
    while observer.receive() is None:
        assert server.turn(0.001)
    clock.now_s = 60
    assert not server.turn(0)
    observer.close()


def test_a_server_that_is_used_stays(server: CacheServer, clock: Clock, files: PrivateFiles) -> None:
    client = RawClient(files.socket, register_of(), turn=lambda: server.turn(0.001))
    clock.now_s = 10_000
    assert server.turn(0)
    client.close()


def test_its_end_leaves_what_a_starter_is_busy_with(server: CacheServer, files: PrivateFiles) -> None:
    server.stop()
    while server.turn(0.001):
        pass
    starter = FileLock.take(files.start_lock)
    assert starter is not None
    server.close()
    assert sorted(files.folder.iterdir()) == [files.log, files.start_lock]
    assert FileLock.take(files.start_lock) is None
    starter.close()


def test_the_log_of_a_fault_stays(server: CacheServer, files: PrivateFiles) -> None:
    server.turn(0)
    server.close()
    assert sorted(files.folder.iterdir()) == [files.log]


def test_without_its_folder_it_ends(server: CacheServer, clock: Clock, files: PrivateFiles, tmp_path: Path) -> None:
    for file in files.folder.iterdir():
        file.unlink()
    files.folder.rmdir()
    clock.now_s = 60
    assert not server.turn(0)
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_the_log_is_bounded(files: PrivateFiles) -> None:
    life = PrivateLife(PrivateSettings(files=files, ending=EndingSettings(linger_s=0, first_engine_s=60)), 0)
    life.bound_log()
    assert files.log.read_text() == "the log\n"
    with files.log.open("a") as log:
        log.write("x" * LOG_BYTES)
        log.flush()
        life.bound_log()
        assert files.log.read_text() == ""
        log.write("goes on\n")
    assert files.log.read_text() == "goes on\n"
    files.log.unlink()
    life.bound_log()


# ---- when it ends ----


@pytest.mark.parametrize(
    ("linger_s", "looks", "due"),
    [
        # No engine comes: the server waits for a first engine, and no longer.
        (0, [(0, False), (59, False), (60, False)], [False, False, True]),
        (600, [(0, False), (60, False)], [False, True]),
        # It is used for longer than it would wait for an engine.
        (0, [(1, True), (100, True), (101, False)], [False, False, True]),
        # It lingers, from the last one's end on.
        (10, [(1, True), (100, False), (109, False), (110, False)], [False, False, False, True]),
        # A new engine stops that, and it starts again after that engine's end.
        (
            10,
            [(1, True), (2, False), (11, True), (500, True), (501, False), (510, False), (511, False)],
            [False, False, False, False, False, False, True],
        ),
        # It was due and could not end yet, and a new engine came.
        (0, [(1, True), (2, False), (3, True), (4, False)], [False, True, False, True]),
    ],
)
def test_the_servers_end_is_due_by_its_settings(
    linger_s: float, looks: list[tuple[int, bool]], due: list[bool]
) -> None:
    ending = Ending(EndingSettings(linger_s=linger_s, first_engine_s=60), 0)
    assert [ending.is_due(now * S, is_used=is_used) for now, is_used in looks] == due


def test_the_wait_begins_with_the_start() -> None:
    ending = Ending(EndingSettings(linger_s=0, first_engine_s=5), 100 * S)
    assert not ending.is_due(104 * S, is_used=False)
    assert ending.is_due(105 * S, is_used=False)
