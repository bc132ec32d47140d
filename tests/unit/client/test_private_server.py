"""The private server of real engines: one for all who look, and nothing is left of it, however they end."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvoffload.client.private_server import find_or_start, is_listening
from kvoffload.config.sources import TEST_VARIABLE, Settings, load_settings
from kvoffload.errors import ConfigError, PrivateServerError
from kvoffload.protocol import Counts, Stats
from kvoffload.units import GIB
from tests.kit.campaign import is_campaign
from tests.kit.children import child
from tests.kit.client.private_engine import Group, Nursery, nursery
from tests.kit.server.blocks import acquire, hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient

TIMEOUT_MS = 60_000
AT_ONCE = 3
CAMPAIGN_ROUNDS = 10
SETTINGS = Settings(memory="64MiB")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engines() -> Iterator[Nursery]:
    with nursery() as found:
        yield found


class Watched:
    """A server whose parent has ended, watched while it lives on."""

    def __init__(self, pid: int, memory: Sequence[int]) -> None:
        self._memory = frozenset(memory)
        self._pidfd = os.pidfd_open(pid)
        self.pid = pid
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        assert "memfd:" in maps or not memory
        assert "/dev/shm/" not in maps

    def is_gone(self, timeout_ms: int = TIMEOUT_MS) -> bool:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(timeout_ms))

    def assert_nothing_is_left(self, room: Path) -> None:
        assert self.is_gone()
        assert list(room.iterdir()) == []
        assert find_memory(self._memory) == []

    def close(self) -> None:
        if not self.is_gone(0):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)


@contextmanager
def running(engines: Nursery, room: Path, *, workers: int = 1, linger: str = "0s") -> Iterator[tuple[Group, Watched]]:
    group = engines.start(room, workers=workers, linger=linger)
    server = Watched(group.workers[0].server, group.workers[0].memory)
    try:
        yield group, server
    finally:
        group.kill()
        server.close()


def watch_of_log(path: Path) -> Watched:
    found = re.search(r"process (\d+)", path.with_name(path.name + ".log").read_text())
    assert found is not None
    return Watched(int(found[1]), ())


def watch(client: RawClient) -> Watched:
    assert client.joining.welcome is not None
    return Watched(client.joining.welcome.pid, ())


def family_of(pid: int) -> Iterator[int]:
    """Yields a process, and all that descend from it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child_pid in (task / "children").read_text().split():
            yield from family_of(int(child_pid))


def find_memory(inodes: Set[int]) -> list[str]:
    """Processes that have memory of these inodes mapped, or open."""
    assert inodes
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = [line for line in (process / "maps").read_text().splitlines() if "memfd:" in line]
            mapped = {int(line.split()[4]) for line in lines}
            files = [file for file in (process / "fd").iterdir() if "memfd:" in os.readlink(file)]
            opened = {os.stat(file).st_ino for file in files}
        except OSError:
            continue
        if (mapped | opened) & inodes:
            found.append(process.name)
    return found


def end_in_order(group: Group) -> None:
    group.end()


def terminate(group: Group) -> None:
    for worker in group.workers:
        os.kill(worker.pid, signal.SIGTERM)


def kill(group: Group) -> None:
    for worker in group.workers:
        os.kill(worker.pid, signal.SIGKILL)


def kill_group(group: Group) -> None:
    os.killpg(group.leader, signal.SIGKILL)


def interrupt_group(group: Group) -> None:
    os.killpg(group.leader, signal.SIGINT)


@pytest.mark.parametrize(
    ("workers", "end"),
    [(2, end_in_order), (2, terminate), (1, kill), (3, kill_group), (3, interrupt_group)],
    ids=["in order", "SIGTERM", "kill -9", "kill -9 of the group", "Ctrl-C"],
)
def test_nothing_is_left_however_an_engine_ends(
    engines: Nursery, tmp_path: Path, workers: int, end: Callable[[Group], None]
) -> None:
    def run_round(number: int) -> None:
        room = tmp_path / str(number)
        room.mkdir()
        with running(engines, room, workers=workers) as (group, server), ExitStack() as watched:
            assert {worker.server for worker in group.workers} == {server.pid}
            assert str(server.pid) in find_memory(set(group.workers[0].memory))
            processes = [watched.enter_context(closing(Watched(worker.pid, ()))) for worker in group.workers]
            end(group)
            assert all(process.is_gone() for process in processes), "the engine itself has not ended"
            server.assert_nothing_is_left(room)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run_round, range(CAMPAIGN_ROUNDS if is_campaign() else AT_ONCE)))


def test_engines_that_start_at_once_have_one_server(engines: Nursery, tmp_path: Path) -> None:
    """It ends with the last of them."""
    with ThreadPoolExecutor(8) as pool:
        groups = list(pool.map(lambda _: engines.start(tmp_path), range(8)))
    server = Watched(groups[0].workers[0].server, groups[0].workers[0].memory)
    try:
        assert {group.workers[0].server for group in groups} == {server.pid}
        log = Path(groups[0].workers[0].socket + ".log").read_text()
        assert log.count("kvoffload serves 64MiB") == 1
        for group in groups[:7]:
            group.end()
        assert is_listening(Path(groups[0].workers[0].socket))
        groups[7].kill()
        server.assert_nothing_is_left(tmp_path)
    finally:
        for group in groups:
            group.kill()
        server.close()


def test_engines_come_while_a_server_ends(engines: Nursery, tmp_path: Path) -> None:
    """At any moment of its last quarter of a second: each is served, by this server or by the next."""
    for delay_ms in range(0, 300, 15):
        engines.start(tmp_path, delay_ms=delay_ms).kill()
    with running(engines, tmp_path) as (group, server):
        group.end()
        server.assert_nothing_is_left(tmp_path)


def test_an_engine_that_comes_back_in_time_finds_its_cache(engines: Nursery, tmp_path: Path) -> None:
    """SIGTERM ends a server that lingers."""
    with running(engines, tmp_path, linger="10min") as (group, server):
        assert group.workers[0].found == 0
        group.kill()
        again = engines.start(tmp_path, linger="10min")
        again.kill()
        assert (again.workers[0].server, again.workers[0].found) == (server.pid, 64)
        assert is_listening(Path(group.workers[0].socket))
        os.kill(server.pid, signal.SIGTERM)
        server.assert_nothing_is_left(tmp_path)


def test_different_settings_and_keys_are_different_servers(tmp_path: Path) -> None:
    wanted = [(SETTINGS, ""), (SETTINGS, "a"), (SETTINGS.model_copy(update={"verify": "always"}), "")]
    servers = {path: watch_of_log(path) for path in (find_or_start(one, tmp_path, key=key) for one, key in wanted)}
    try:
        assert len({server.pid for server in servers.values()}) == 3
        assert {path.parent.name for path in servers} == {f"kvoffload-{os.getuid()}"}
        assert find_or_start(SETTINGS.model_copy(update={"log_level": "error"}), tmp_path) in servers
        for server in servers.values():
            os.kill(server.pid, signal.SIGTERM)
        assert all(server.is_gone() for server in servers.values())
        assert list(tmp_path.iterdir()) == []
    finally:
        for server in servers.values():
            server.close()


NOT_SERVED = {
    # Of a shared server's doors, keys and fleet.
    *(
        "server",
        "listen",
        "key_file",
        "peer_listen",
        "peer_link",
        "peer_compress",
        "fleet_registry",
        "fleet_name",
        "fleet_secret_file",
    ),
    *("http", "http_token_file", "computing_price", "memory_price", "tier_price", "socket_mode", "socket_group"),
    # Of the engine's own processes.
    *(
        "promote_deadline",
        "arrival_deadline",
        "events_interval",
        "save_policy",
        "load_policy",
        "whole_prompts",
        "shared_shapes",
        "self_test",
        "acquire_deadline",
        "step_budget",
    ),
    *("copy_threads", "log_level"),
}
CHANGED: dict[str, object] = {
    "memory": "128MiB",
    "memory_floor": "50",
    "linger": "3s",
    "segment_size": "64MiB",
    "disk": "/a,/b",
    "disk_size": "3GiB",
    "disk_write": "second_use",
    "disk_queue": "5s",
    "disk_daily": "1GiB",
    "disk_compress": "auto",
    "valkey": "valkey://10.0.0.1:1",
    "valkey_ttl": "1h",
    "s3": "s3://bucket/x",
    "s3_endpoint": "http://10.0.0.1:9000",
    "s3_region": "eu-1",
    "mooncake": "mooncake://10.0.0.1:1",
    "mooncake_protocol": "rdma",
    "mooncake_device": "mlx5_0",
    "mooncake_metadata": "etcd://a",
    "mooncake_host": "10.0.0.2",
    "custom_tier": "package.module:Tier",
    "custom_tier_place": "somewhere",
    "remote_write": "write_back",
    "remote_queue": "7s",
    "remote_timeout": "9s",
    "hand_over": "6s",
    "remote_connections": "7",
    "remote_compress": "on",
    "verify": "always",
    "sparse_memory": "true",
    **{name: "/f" for name in Settings.model_fields if name.endswith("_file") and name not in NOT_SERVED},
}


@dataclass(frozen=True)
class Started:
    """A server that was to be started."""

    command: list[str]
    settings: dict[str, object]


def note_starts(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """Returns the servers that are started from here on: none of them runs, and each says that it does."""
    started: list[Started] = []

    def note(command: list[str], *, input: bytes, pass_fds: tuple[int, int], **_: object) -> None:
        started.append(Started(command, json.loads(input)))
        os.write(pass_fds[1], b"+")

    monkeypatch.setattr(subprocess, "run", note)
    return started


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_each_setting_that_a_private_server_can_have_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A new setting stands in one of the two lists above, or this fails."""
    monkeypatch.setenv(TEST_VARIABLE, "1")
    started = note_starts(monkeypatch)
    if name in NOT_SERVED:
        find_or_start(SETTINGS, tmp_path)
        assert name not in started[0].settings or name == "log_level"
        return
    settings = load_settings(flags={name: CHANGED[name]}).settings
    assert getattr(settings, name) != getattr(Settings(), name)
    first, second = find_or_start(Settings(), tmp_path), find_or_start(settings, tmp_path)
    assert first != second
    assert getattr(load_settings(flags=started[1].settings).settings, name) == getattr(settings, name)
    assert not [word for word in started[1].command if word.startswith(f"{name}=")], "others can read a command line"


def test_what_engines_cache_themselves_is_told_and_names_no_other_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = note_starts(monkeypatch)
    assert find_or_start(SETTINGS, tmp_path, engine_bytes=5 * GIB) == find_or_start(SETTINGS, tmp_path)
    assert f"--engine-cache={5 * GIB}" in started[0].command
    assert not [option for option in started[1].command if "engine-cache" in option]


def test_the_environment_has_settings_for_the_engine_and_not_for_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_LINGER", "not a duration")
    with closing(watch_of_log(find_or_start(SETTINGS, tmp_path, first_engine_s=0.1))) as server:
        assert server.is_gone()


def test_no_secret_of_a_setting_is_on_a_command_line(tmp_path: Path) -> None:
    """Neither of the server, nor of a process that it starts for its store; other users can read command lines."""
    with socket.create_server(("127.0.0.1", 0)) as master:
        address = f"mooncake://127.0.0.1:{master.getsockname()[1]}"
        where = {"mooncake": address, "mooncake_metadata": "etcd://user:s3cret-word@host"}
        settings = load_settings(flags={"memory": "64MiB", **where}).settings
        with closing(watch_of_log(find_or_start(settings, tmp_path, first_engine_s=60))) as server:
            # The server has read its settings when it tries to reach its store.
            master.accept()[0].close()
            lines = [Path(f"/proc/{pid}/cmdline") for pid in family_of(server.pid)]
            assert lines
            for line in lines:
                assert b"s3cret-word" not in line.read_bytes()
            # Other users cannot read the environment of a process, nor what it has read.
            os.kill(server.pid, signal.SIGTERM)
            assert server.is_gone()


def test_a_private_server_may_be_sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_VARIABLE, "1")
    wanted = Settings(memory="512GiB", sparse_memory=True)  # type: ignore[arg-type]
    path = find_or_start(wanted, tmp_path)
    with closing(watch_of_log(path)) as server, closing(RawClient(path, register_of())) as client:
        save(client, hashes_of(3), 5)
        counts = client.ask(Stats())
        assert isinstance(counts, Counts)
        assert counts.capacity_bytes == 512 * GIB
        client.close()
        os.kill(server.pid, signal.SIGTERM)
        assert server.is_gone()


STARTER = """
import subprocess, sys
from pathlib import Path
from kvoffload.client import private_server
from kvoffload.config.sources import Settings

def stop(*_, **__):
    print("stops", flush=True)
    sys.stdin.read()

if sys.argv[2] == "before":
    subprocess.run = stop
elif sys.argv[2] == "after":
    private_server._read = stop
print(private_server.find_or_start(Settings(memory="64MiB"), Path(sys.argv[1]), first_engine_s=float(sys.argv[3])))
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_starter_may_be_killed_at_any_moment(engines: Nursery, tmp_path: Path, moment: str) -> None:
    with child(["-c", STARTER, str(tmp_path), moment, "60"], says="stops") as starter:
        starter.kill()
        starter.wait()
    with running(engines, tmp_path) as (group, server):
        log = Path(group.workers[0].socket + ".log").read_text()
        assert log.count("kvoffload serves 64MiB") == 1
        group.kill()
        server.assert_nothing_is_left(tmp_path)


def start_by_another(room: Path, first_engine_s: float) -> Path:
    """Starts a server by a process that is gone then. Were its pipes left with the server, this would wait for that."""
    command = [sys.executable, "-c", STARTER, str(room), "never", str(first_engine_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return Path(done.stdout.strip())


def test_it_is_on_its_own(tmp_path: Path) -> None:
    server = watch_of_log(start_by_another(tmp_path, 60))
    try:
        assert os.getpgid(server.pid) == server.pid
        assert os.readlink(f"/proc/{server.pid}/cwd") == "/"
        os.kill(server.pid, signal.SIGTERM)
        assert server.is_gone()
    finally:
        server.close()
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_nobody_comes_to_ends(tmp_path: Path) -> None:
    start_by_another(tmp_path, 0.1)
    end = time.monotonic() + TIMEOUT_MS / 1000
    while list(tmp_path.iterdir()):
        assert time.monotonic() < end
        select.select([], [], [], 0.01)


def test_a_new_server_adopts_what_a_killed_one_left(engines: Nursery, tmp_path: Path) -> None:
    path = find_or_start(SETTINGS, tmp_path)
    client = RawClient(path, register_of())
    save(client, hashes_of(3), 5)
    servers = [watch(client)]
    try:
        os.kill(servers[0].pid, signal.SIGKILL)
        assert servers[0].is_gone()
        assert find_or_start(SETTINGS, tmp_path, holds_memory=True) == path
        again = RawClient(path, register_of(), former=client.held)
        servers.append(watch(again))
        assert again.joining.keeps_former
        assert acquire(again, hashes_of(3)).boundary == 48
        again.close()
        client.close()
    finally:
        for server in servers:
            server.close()


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ("exit 0", "it ended without a word"),
        ("echo; echo no memory >&2; exit 3", "no memory"),
        ("exec sleep 600", "it is not there in time; look at .*log"),
        (None, "cannot be run: No such file"),
    ],
)
def test_why_there_is_no_server_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str | None, reason: str
) -> None:
    program, room = tmp_path / "python", tmp_path / "room"
    room.mkdir()
    if python is not None:
        program.write_text(f"#!/bin/sh\n{python}\n")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    is_late = python == "exec sleep 600"
    with pytest.raises(PrivateServerError, match=f"the private server did not start: .*{reason}") as caught:
        find_or_start(SETTINGS, room, timeout_s=0.5 if is_late else 60)
    assert "\n" not in str(caught.value)
    assert is_late or list(room.iterdir()) == []


def test_the_reason_is_the_servers_own(tmp_path: Path) -> None:
    much = Settings(memory="1024TiB")  # type: ignore[arg-type]
    with pytest.raises(PrivateServerError, match=r"did not start: 1024TiB of memory are wanted, .* to auto"):
        find_or_start(much, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / f"kvoffload-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="has mode 0755, allowed is 0700"):
        find_or_start(SETTINGS, tmp_path)


def test_who_holds_the_start_lock_is_waited_for_and_no_longer_than_said(tmp_path: Path) -> None:
    with (
        child(["-c", STARTER, str(tmp_path), "before", "60"], says="stops"),
        pytest.raises(PrivateServerError, match="started or ended by another process"),
    ):
        find_or_start(SETTINGS, tmp_path, timeout_s=0.1)


def test_a_full_or_a_silent_server_is_there(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        assert [is_listening(tmp_path / "s") for _ in range(3)] == [True] * 3
    assert not is_listening(tmp_path / "s")
    assert not is_listening(tmp_path / "none")
