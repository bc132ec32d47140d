"""A real `kvoffload serve` for one round, with its domains, store and limits, and a `kvoffload web` that asks it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from kvoffload.key_files import read_pair, write_new_pair
from kvoffload.protocol import CODEC, Answer, Hello, HelloAccepted
from tests.hostile.stores import MODES
from tests.hostile.user import Place
from tests.kit.free_ports import free_ports
from tests.kit.server.remote_client import RemoteClient, make_keys

SERVER, HONEST, HOSTILE = 62_001, 62_002, 62_003
"""Users that run nothing else."""
DOMAINS = ("two domains", "one domain")
STORES = ("", "full disk", *(f"{kind}: {mode}" for kind, modes in MODES.items() for mode in modes))
LIMITS = ("", "256 files", "64 threads")
DISK_BYTES = 24 << 20
MEMORY_LIMIT_BYTES = 4 << 30
"""A server that has more than this is killed, so that the machine lives."""
START_S, ANSWER_S, LOOK_S, ASK_S = 120.0, 5.0, 0.05, 0.25
_S3_KEYS = "[default]\naws_access_key_id = a\naws_secret_access_key = b\n"
# The server's user may read all files, and has no other right of root's: Python may be root's alone.
_SERVE = """
import ctypes, os, resource, sys
user, files, threads = map(int, sys.argv[1:4])
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
if threads:
    resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
libc, reads_all, ambient = ctypes.CDLL(None), 2, 47
libc.prctl(8, 1, 0, 0, 0)
os.setgroups([])
os.setgid(user)
os.setuid(user)
rights = [1 << reads_all] * 3 + [0] * 3
libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*rights))
libc.prctl(ambient, 2, reads_all, 0, 0)
sys.argv[1:4] = []
from kvoffload.cli.app import main
main()
"""
_RED = 'name = "red", memory = "64MiB", users'
_BLUE = _RED.replace("red", "blue")
_TENANTS = '[{{name = "kept", quota = "8MiB", users = [{0}]}}, {{name = "stream", quota = "16MiB", users = [{0}]}}]'
_DOMAINS = {
    "two domains": f"domains = [{{{{{_RED} = [{{0}}, 0]}}}}, {{{{{_BLUE} = [{{1}}]}}}}]\n",
    # As long as the honest user's tenants are within their quotas, others cannot evict their blocks.
    "one domain": f"domains = [{{{{{_RED} = [{{0}}, {{1}}, 0], tenants = {_TENANTS}}}}}]\n",
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the server of one round is set up."""

    domains: str = DOMAINS[0]
    store: str = ""
    """The slower tier, and how it lies. Only a server of one domain can have one."""
    limit: str = ""


@dataclass
class Watched:
    """Facts about the server that others can see: the kernel tells them, or an answer shows them."""

    start_bytes: int = 0
    peak_bytes: int = 0
    """Memory of its own, without what is shared."""
    ends: list[tuple[float, str]] = field(default_factory=list)
    asked: list[tuple[float, str, float]] = field(default_factory=list)
    """When the web `page` or the TCP `gate` was asked, how it refused (`gate: no answer`), and how many milliseconds it
    took."""


class Ground:
    """The server is started again when it has ended. Everything else belongs to the thread that has opened it."""

    def __init__(self, folder: Path, setup: Setup, seed: int, running: ExitStack) -> None:
        self._folder, self._setup, self._seed, self._running = folder, setup, seed, running
        self.watched = Watched()
        self._is_over = threading.Event()
        tcp, peers, http_port, no_peer = free_ports(4)
        keys, _ = write_new_pair(folder / "server")
        self._known, has_peers = make_keys(), setup.domains == "one domain"
        self.place = Place(
            socket=f"{folder}/s",
            tcp=tcp,
            peers=peers if has_peers else 0,
            web=http_port,
            server_key=read_pair(keys).public.decode(),
        )
        os.chown(keys, SERVER, SERVER)
        self._settings = [f"server={folder}/s", f"key_file={keys}", f"listen=tcp://127.0.0.1:{tcp}"]
        self._settings += ["segment_size=64MiB", "socket_mode=0666", "promote_deadline=1s"]
        tables = _DOMAINS[setup.domains].format(HONEST, HOSTILE)
        tables += f'clients = [{{key = "{self._known.public.decode()}", domain = "red"}}]\n'
        if has_peers:
            self._settings.append(f"peer_listen=tcp://127.0.0.1:{peers}")
            peer = make_keys().public.decode()
            tables += f'peers = [{{address = "tcp://127.0.0.1:{no_peer}", key = "{peer}"}}]\n'
        (folder / "server.toml").write_text(tables)

    def start(self) -> None:
        self._start_server(self._open_store())
        web = [f"server={self._folder}/s", f"http=tcp://127.0.0.1:{self.place.web}"]
        process = self._running.enter_context(started(["-m", "kvoffload", "web", *as_options(web)]))
        assert read_line(process, START_S).startswith("kvoffload tells")
        self.watched.start_bytes = self._measure_bytes()
        for act in (self._watch, self._ask_page, self._ask_gate):
            thread = threading.Thread(target=act, daemon=True)
            thread.start()
            self._running.callback(thread.join, 2 * ANSWER_S)
        self._running.callback(self._is_over.set)

    def read_log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def _open_store(self) -> list[str]:
        """Settings of the slower tier."""
        kind, _, mode = self._setup.store.partition(": ")
        if not kind:
            return []
        if kind == "full disk":
            disk = self._folder / "disk"
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)], check=True)
            self._running.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
            os.chown(disk, SERVER, SERVER)
            disk.chmod(0o700)
            return [f"disk={disk}", "disk_size=1GiB"]
        store = self._running.enter_context(started(["-m", "tests.hostile.stores", kind, mode, str(self._seed)]))
        port = int(read_line(store, START_S))
        if kind == "valkey":
            return [f"valkey=valkey://127.0.0.1:{port}"]
        keys = self._folder / "s3"
        keys.write_text(_S3_KEYS)
        keys.chmod(0o600)
        os.chown(keys, SERVER, SERVER)
        return ["s3=s3://bucket/records", f"s3_endpoint=http://127.0.0.1:{port}", f"s3_credentials_file={keys}"]

    def _start_server(self, store: list[str]) -> None:
        limit = self._setup.limit.split()
        files, threads = (limit[0] if limit[1:] == [what] else "0" for what in ("files", "threads"))
        command = ["-c", _SERVE, str(SERVER), files, threads, "serve", "--config", f"{self._folder}/server.toml"]
        with (self._folder / "log").open("a") as log:
            self._server = self._running.enter_context(started([*command, *as_options(self._settings + store)], log))
        said = [read_line(self._server, START_S) for _ in range(2)]
        assert said[1].startswith("ready"), (said, self.read_log()[-2000:])

    def _measure_bytes(self) -> int:
        with contextlib.suppress(OSError, IndexError):
            pages = Path(f"/proc/{self._server.pid}/statm").read_text().split()
            return (int(pages[1]) - int(pages[2])) * resource.getpagesize()
        return 0

    def _watch(self) -> None:
        """Measures the server's memory, and starts it again when it has ended: without the store that ended it."""
        while not self._is_over.wait(LOOK_S):
            found = self._measure_bytes()
            self.watched.peak_bytes = max(self.watched.peak_bytes, found)
            if found > MEMORY_LIMIT_BYTES:
                self._server.kill()
                self._server.wait()
            code = self._server.poll()
            if code is not None:
                why = signal.Signals(-code).name if code < 0 else f"exit {code}"
                more = f", as it had {found >> 20} MiB" if found > MEMORY_LIMIT_BYTES else ""
                self.watched.ends.append((time.monotonic(), why + more))
                with contextlib.suppress(AssertionError):
                    self._start_server([])
                if self._is_over.is_set():
                    kill_all(self._server)

    def _ask_page(self) -> None:
        while not self._is_over.wait(ASK_S):
            begun = time.monotonic()
            with closing(http.client.HTTPConnection("127.0.0.1", self.place.web, timeout=ANSWER_S)) as asked:
                try:
                    asked.request("GET", "/metrics")
                    said = f"status {asked.getresponse().status}"
                except (OSError, http.client.HTTPException) as fault:
                    said = type(fault).__name__
            self._note("page", begun, said, is_right=said == "status 200")

    def _ask_gate(self) -> None:
        hello = CODEC.encode_call(Hello(protocol_min=1, protocol_max=1, domain="red"), number=1, session=0)
        while not self._is_over.wait(ASK_S):
            begun, server_key = time.monotonic(), self.place.server_key.encode()
            client = RemoteClient(f"tcp://127.0.0.1:{self.place.tcp}", keys=self._known, server_key=server_key)
            client.socket.send(hello)
            said = CODEC.decode_answer(client.socket.recv()) if client.socket.poll(int(ANSWER_S * 1000)) else None
            is_right = isinstance(said, Answer) and isinstance(said.message, HelloAccepted)
            self._note("gate", begun, str(said or "no answer"), is_right=is_right)
            client.close()

    def _note(self, what: str, begun: float, said: str, *, is_right: bool) -> None:
        took_ms = (time.monotonic() - begun) * 1000
        self.watched.asked.append((begun, f"{what}: {'' if is_right else said[:100]}", took_ms))


@contextmanager
def open_ground(folder: Path, setup: Setup, seed: int) -> Iterator[Ground]:
    with ExitStack() as running:
        folder.chmod(0o755)
        os.chown(folder, SERVER, SERVER)
        ground = Ground(folder, setup, seed, running)
        ground.start()
        yield ground


@contextmanager
def started(arguments: Sequence[str], errors: IO[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A Python process. It is killed on the way out, with all processes that it has started."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors or subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    with process:
        try:
            yield process
        finally:
            kill_all(process)


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kills a process of `started`, and those that it has started: they may hold its output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_line(process: subprocess.Popen[str], wait_s: float) -> str:
    """A line of its output. If none comes in time, the process is killed, and the line is empty."""
    timer = threading.Timer(max(0.0, wait_s), kill_all, [process])
    timer.start()
    try:
        assert process.stdout is not None
        return process.stdout.readline()
    finally:
        timer.cancel()


def read_json(process: subprocess.Popen[str], wait_s: float) -> Any:
    """The last whole line of JSON that it prints until it ends. None: there is none."""
    last, end = None, time.monotonic() + wait_s
    while line := read_line(process, end - time.monotonic()):
        with contextlib.suppress(ValueError):
            last = json.loads(line)
    return last


def as_options(settings: Sequence[str]) -> list[str]:
    return [word for one in settings for word in ("--set", one)]


def describe(setup: Setup) -> str:
    return ", ".join(filter(None, asdict(setup).values()))
