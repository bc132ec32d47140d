"""`kvoffload serve`: serves, ends on a signal, leaves nothing behind."""

from __future__ import annotations

import grp
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffload.cli import serve as serve_module
from kvoffload.cli.serve import (
    check_memory,
    choose_memory,
    choose_memory_bytes,
    choose_remote,
    find_group,
    make_settings,
    plan_below,
    tell_starter,
)
from kvoffload.config.sources import TEST_VARIABLE, Settings, load_settings
from kvoffload.config.tcp_address import parse_tcp_address
from kvoffload.errors import CacheMemoryError, ConfigError
from kvoffload.file_lock import FileLock
from kvoffload.key_files import read_pair, read_public_key, write_new_pair
from kvoffload.protocol import Acquire, Closing, Counts, Drain, Draining, Error, ErrorCode, Release, Stats
from kvoffload.server import TcpSettings
from kvoffload.server.config import ServerConfig, read_server_config
from kvoffload.units import GIB, MIB
from tests.kit.cli.commands import run
from tests.kit.server.blocks import acquire, hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient
from tests.kit.server.remote_client import RemoteClient

SMALL = ("memory=128MiB", "segment_size=64MiB")


@contextmanager
def serving(path: Path, assignments: Sequence[str] = SMALL) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", "from kvoffload.cli.app import main; main()", "serve"]
    for assignment in (f"server={path}", *assignments):
        command += ["--set", assignment]
    command += ["--adopt-wait", "0"]
    size = assignments[0].removeprefix("memory=")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == f"kvoffload serves {size} on {path}, process {server.pid}\n"
            yield server
        finally:
            server.kill()


def test_memory_that_there_is_not_is_refused_before_anything_is_announced(tmp_path: Path) -> None:
    done = run("serve", "--set", f"server={tmp_path}/s", "--set", "memory=512TiB")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"kvoffload: 512TiB of memory are wanted, there are [0-9.]+[GT]iB in all; .*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["serve", "--memory=64GiB"], "say --set memory=64GiB"),
        (["serve", "--disk-size", "1TiB"], "say --set disk_size=VALUE"),
        (["top", "--server", "kv.sock"], "say --set server=VALUE"),
    ],
)
def test_a_setting_that_is_given_as_an_option_is_refused_with_the_words_that_were_meant(
    words: list[str], remedy: str
) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert remedy in done.stderr


def test_a_bucket_without_the_library_for_it_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs obstore, which is not installed; pip install obstore"):
        plan_below(load_settings(flags={"s3": "s3://cache/kv"}).settings, ServerConfig())


def test_a_folder_that_is_not_there_is_told_where_the_server_says_what_it_serves(tmp_path: Path) -> None:
    mistyped, command = tmp_path / "dsik", [sys.executable, "-m", "kvoffload", "serve"]
    settings = (f"server={tmp_path / 's'}", *SMALL, f"disk={mistyped}", "disk_size=1GiB")
    with subprocess.Popen(
        [*command, *(word for setting in settings for word in ("--set", setting))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("kvoffload serves 128MiB")
            assert server.stdout.readline().startswith(f"there is no folder {mistyped} yet")
        finally:
            server.kill()


@pytest.mark.parametrize("is_abstract", [False, True])
def test_it_says_once_that_it_is_ready_and_tells_the_service_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool
) -> None:
    address = f"kvoffload-test-{os.getpid()}" if is_abstract else f"{tmp_path}/notify"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{address}" if is_abstract else address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{address}" if is_abstract else address)
        manager.settimeout(60)
        with serving(tmp_path / "s") as server:
            assert manager.recv(100) == b"READY=1"
            server.send_signal(signal.SIGTERM)
            assert server.stdout is not None
            told = server.stdout.read()
            assert server.wait(60) == 0
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)
    assert re.fullmatch(r"ready: 128MiB of memory(, [0-9]+MiB of it so far)?\n", told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_asked_to_end(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "s"
    with serving(path) as server:
        client = RawClient(path, register_of())
        save(client, hashes_of(3), 5)
        counts = client.ask(Stats())
        assert isinstance(counts, Counts)
        assert (counts.capacity_bytes, counts.readable) == (128 * MIB, 3)
        client.close()
        server.send_signal(number)
        assert server.wait(60) == 0
        assert server.stderr is not None
        assert server.stderr.read() == ""
    assert list(tmp_path.iterdir()) == []


def test_what_is_leased_is_waited_for_after_the_signal(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(path) as server:
        client = RawClient(path, register_of())
        save(client, hashes_of(3), 5)
        leased = acquire(client, hashes_of(3))
        server.send_signal(signal.SIGTERM)
        assert isinstance(client.receive_event(), Closing)
        refused = client.ask(Acquire(name_space=client.name_space, chain=hashes_of(3)))
        assert isinstance(refused, Error)
        assert refused.code is ErrorCode.DRAINING
        assert server.poll() is None
        client.tell(Release(leases=leased.lease.to_bytes(8, "little")))
        assert server.wait(60) == 0
        client.close()


def test_a_sparse_pool_is_larger_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_VARIABLE, "1")
    path = tmp_path / "s"
    with serving(path, ["memory=512GiB", "sparse_memory=true"]):
        client = RawClient(path, register_of())
        save(client, hashes_of(3), 5)
        counts = client.ask(Stats())
        assert isinstance(counts, Counts)
        assert (counts.capacity_bytes, counts.readable) == (512 * GIB, 3)
        assert acquire(client, hashes_of(3)).boundary > 0
        client.close()


STRANGER = """
import os, sys
sys.path.insert(0, sys.argv[4])
from tests.kit.server.blocks import acquire, hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient
os.setgroups([int(group) for group in sys.argv[3].split()])
os.setgid(54320)
os.setuid(int(sys.argv[2]))
try:
    client = RawClient(sys.argv[1], register_of())
except PermissionError:
    print("may not")
else:
    save(client, hashes_of(3), 5)
    print("saves", acquire(client, hashes_of(3)).boundary)
"""
GROUP = 54321


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_group_may_open_the_sockets_and_a_stranger_may_not(open_folder: Path) -> None:
    path, root = open_folder / "s", Path(__file__).parents[3]
    command = [sys.executable, "-m", "kvoffload", "serve", "--adopt-wait", "0", "--set", f"server={path}"]
    command += ["--set", "memory=64MiB", "--set", "socket_mode=0660", "--set", f"socket_group={GROUP}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("kvoffload serves")
            # Another user's interpreter cannot read this one's packages, so who it is changes after the imports.
            for uid, groups, said in (
                (12345, str(GROUP), "saves 48"),
                (12346, f"{GROUP} 7", "saves 48"),
                (12345, "7", "may not"),
                (12347, "", "may not"),
            ):
                arguments = [sys.executable, "-c", STRANGER, str(path), str(uid), groups, str(root)]
                done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=root)
                assert (uid, done.stdout.strip(), done.stderr) == (uid, said, "")
            server.terminate()
            assert server.wait(60) == 0
        finally:
            server.kill()
    assert list(open_folder.iterdir()) == []


def test_a_group_by_name_or_number() -> None:
    first = grp.getgrall()[0]
    assert find_group("") is None
    assert find_group("54321") == 54321
    assert find_group(first.gr_name) == first.gr_gid
    with pytest.raises(ConfigError, match="'socket_group' = 'no such group': there is no such group here; name one"):
        find_group("no such group")


def test_who_started_a_server_is_told_and_its_lock_is_free(tmp_path: Path) -> None:
    lock = FileLock.take(tmp_path / "lock")
    assert lock is not None
    told, tell = os.pipe()
    tell_starter(lock, tell)
    assert os.read(told, 9) == b"1"
    os.close(told)
    taken = FileLock.take(tmp_path / "lock")
    assert taken is not None
    # It has died meanwhile: that is no fault.
    told, tell = os.pipe()
    os.close(told)
    tell_starter(taken, tell)


def test_too_much_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "memory_total_bytes", lambda: 100 * MIB)
    check_memory(100 * MIB)
    with pytest.raises(
        CacheMemoryError, match="128MiB of memory are wanted, there are 100MiB in all; set `memory` to less"
    ):
        check_memory(128 * MIB)


def test_without_a_socket_one_line_says_what_to_do() -> None:
    done = run("serve", "--set", "server=")
    assert done.returncode == 2
    assert done.stderr == "kvoffload: setting 'server' is empty: a private server; leave it out, or say a socket\n"


def test_a_socket_that_the_environment_says_is_every_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_SERVER", str(tmp_path / "s"))
    with subprocess.Popen(
        [sys.executable, "-m", "kvoffload", "serve", "--adopt-wait", "0", "--set", "memory=64MiB"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("kvoffload serves")
            assert run("top", "--once").returncode == run("inspect", "sessions").returncode == 0
            assert f"{tmp_path / 's'}: 0B of 64MiB used" in run("doctor").stdout
        finally:
            server.kill()


def test_a_path_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    done = run("serve", "--set", f"server={tmp_path}/none/s", "--set", "memory=64MiB")
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvoffload: socket {tmp_path}/none/s cannot be used: No such file")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("memory", "free", "engines", "expected"),
    [
        ("auto", 2000 * GIB, 0, 1000 * GIB),
        ("auto", 7 * GIB, 0, 3 * GIB),
        ("auto", GIB, 0, GIB),
        # 8 x H100 with 70B: 400 GiB of the engine's own.
        ("auto", 1800 * GIB, 400 * GIB, 900 * GIB),
        ("auto", 1800 * GIB, 50 * GIB, 200 * GIB),
        ("auto", 1800 * GIB, MIB, GIB),
        (10 * GIB + 5, 0, GIB, 10 * GIB),
        (64 * MIB, 0, 0, 64 * MIB),
    ],
)
def test_memory_is_whole_segments(
    monkeypatch: pytest.MonkeyPatch, memory: int | str, free: int, engines: int, expected: int
) -> None:
    monkeypatch.setattr(serve_module, "memory_headroom_bytes", lambda: free)
    settings = Settings(memory=memory)  # type: ignore[arg-type]
    chosen = choose_memory_bytes(settings, engine_bytes=engines)
    assert chosen == expected
    cache_settings = make_settings(settings, chosen)
    assert cache_settings.memory_bytes % cache_settings.segment_bytes == 0


CONFIG = """
memory = "128MiB"
segment_size = "64MiB"
listen = "tcp://127.0.0.1:0"
key_file = "{folder}/server.key"

[[domains]]
name = "chat"
memory = "128MiB"

[[domains]]
name = "research"
memory = "64MiB"

[[clients]]
key = "{client}"
domain = "research"
operator = true
"""


def test_a_file_says_who_may_connect_and_what_they_see(tmp_path: Path) -> None:
    (server_secret, _), (client_secret, client_public) = (write_new_pair(tmp_path / name) for name in ("server", "me"))
    file = tmp_path / "kvoffload.toml"
    file.write_text(CONFIG.format(folder=tmp_path, client=read_public_key(client_public)))
    assert load_settings(file=file).settings.memory == 128 * MIB
    command = [sys.executable, "-c", "from kvoffload.cli.app import main; main()", "serve", "--adopt-wait", "0"]
    command += ["--config", str(file), "--set", f"server={tmp_path}/s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline().split()
            assert said[:6] == ["kvoffload", "serves", "192MiB", "on", f"{tmp_path}/s", "and"]
            endpoint = said[6].rstrip(",")
            client = RemoteClient(endpoint, keys=read_pair(client_secret), server_key=read_pair(server_secret).public)
            assert client.hello().domain == "research"
            assert isinstance(client.ask(Drain()), Draining)
            client.close()
            server.wait(60)
            assert server.stderr is not None
            assert server.stderr.read() == ""
        finally:
            server.kill()
    assert server.returncode == 0


def test_a_server_that_is_not_refused_holds_no_test_up(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("serve", "--set", f"server={tmp_path}/s", "--set", "memory=64MiB", timeout_s=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "[::1]", "0.0.0.0", "10.1.2.3"])
@pytest.mark.parametrize("name", ["listen", "peer_listen"])
def test_without_keys_nothing_listens_over_tcp_on_loopback_either(tmp_path: Path, host: str, name: str) -> None:
    """A user whom the mode of the socket keeps out could connect there."""
    words = ["--set", f"server={tmp_path}/s", "--set", f"listen=tcp://{host}:5555"]
    words += ["--set", f"peer_listen=tcp://{host}:5556"] if name == "peer_listen" else []
    done = run("serve", *words)
    assert (done.returncode, done.stdout) == (2, "")
    port = 5555 if name == "listen" else 5556
    assert done.stderr == (
        f"kvoffload: setting '{name}' = 'tcp://{host}:{port}' without key_file: everyone who reaches that address "
        "could connect, other users of this machine included; make keys with `kvoffload keys new NAME`, and set "
        "key_file to NAME.key\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_names_are_not_looked_up() -> None:
    with pytest.raises(
        ConfigError, match="setting 'listen' = 'tcp://localhost:1' in a flag: not an address with its p"
    ):
        load_settings(flags={"listen": "tcp://localhost:1"})


def test_each_domain_has_whole_segments_of_its_own() -> None:
    tables = {"domains": [{"name": "a", "memory": "3GiB"}, {"name": "b", "memory": "100MiB"}]}
    chosen = choose_memory(Settings(), read_server_config(tables, origin="file"))
    sizes = {
        name: (cache_settings.memory_bytes, cache_settings.segment_bytes) for name, cache_settings in chosen.items()
    }
    assert sizes == {"a": (3 * GIB, GIB), "b": (100 * MIB, 100 * MIB)}


def test_who_comes_over_tcp_is_known_by_key(tmp_path: Path) -> None:
    secret, public = write_new_pair(tmp_path / "k")
    address = "tcp://127.0.0.1:5555"
    keyed = Settings(listen=address, key_file=str(secret))
    clients = read_server_config({"clients": [{"key": read_public_key(public)}]}, origin="file")
    assert choose_remote(Settings(), clients) is None
    assert choose_remote(keyed, clients) == TcpSettings(
        address=parse_tcp_address(address), keys=read_pair(secret), guests=clients.make_guests()
    )
    for config in (clients, ServerConfig()):
        with pytest.raises(
            ConfigError, match=r"setting 'listen' = 'tcp://127.0.0.1:5555' without key_file: .* keys new"
        ):
            choose_remote(Settings(listen=address), config)
    with pytest.raises(
        ConfigError, match=r"no client may connect to .*; name clients with their keys in \[\[clients\]\]"
    ):
        choose_remote(keyed, ServerConfig())


def test_it_says_what_lies_below(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    command = [sys.executable, "-c", "from kvoffload.cli.app import main; main()", "serve"]
    for setting in (f"server={tmp_path / 's'}", "memory=64MiB", f"disk={tmp_path / 'disk'}", "disk_size=1GiB"):
        command += ["--set", setting]
    command += ["--adopt-wait", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().endswith(
            f"process {server.pid}, 1GiB of disk in {tmp_path / 'disk'} behind it\n"
        )
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 2), (8, 8), (96, 8)])
def test_memory_is_taken_by_as_many_threads_as_there_are_processors_within_a_bound(
    monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int
) -> None:
    monkeypatch.setattr("kvoffload.cli.serve.count_cpus", lambda: cpus)
    assert make_settings(Settings(), 64 * MIB).threads == threads
