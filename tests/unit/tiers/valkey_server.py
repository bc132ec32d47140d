"""Real servers of Debian's package on loopback, for tests: one alone, or a cluster."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

DEBIAN = Path(sys.prefix) / "debian"
"""Where `make setup` unpacks it."""
LIBRARIES = DEBIAN / "usr/lib" / f"{os.uname().machine}-linux-gnu"
WAIT_S = 30.0
SLOTS = 16384


def find_program(name: str) -> str:
    own = DEBIAN / "usr/bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: Debian's redis-server could not be had by make setup")
    return found


def environment() -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": f"{LIBRARIES}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One process, which may be stopped and started again on its port. Nothing of it is kept on disk."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.folder = folder
        self.port = port or free_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [find_program("redis-server"), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        if "--tls-port" not in self._options:
            command += ["--port", str(self.port)]
        log = self.folder / f"{self.port}.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *self._options], env=environment(), stdout=output, stderr=output
            )
        end_s = time.monotonic() + WAIT_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < end_s
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def serve(folder: Path, *options: str, port: int = 0) -> Iterator[Server]:
    folder.mkdir(exist_ok=True)
    server = Server(folder, *options, port=port)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def ask(server: Server, *words: str) -> str:
    """By the server's own client."""
    command = [find_program("redis-cli"), "-p", str(server.port), *words]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def serve_cluster(folder: Path, *options: str, nodes: int = 3) -> Iterator[Sequence[Server]]:
    """So many nodes, each with its part of the slots."""
    with ExitStack() as stack:
        servers = []
        for at in range(nodes):
            place = folder / f"node{at}"
            place.mkdir(parents=True)
            cluster = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", str(free_port()))
            servers.append(stack.enter_context(serve(place, *cluster, *options)))
        for at, server in enumerate(servers):
            first, last = SLOTS * at // nodes, SLOTS * (at + 1) // nodes - 1
            ask(server, "cluster", "addslotsrange", str(first), str(last))
            ask(server, "cluster", "set-config-epoch", str(at + 1))
        for server in servers:
            bus = ask(server, "config", "get", "cluster-port").split()[-1]
            for other in servers:
                if other is not server:
                    ask(other, "cluster", "meet", "127.0.0.1", str(server.port), bus)
        end_s = time.monotonic() + WAIT_S
        for server in servers:
            while (
                f"cluster_known_nodes:{nodes}" not in (told := ask(server, "cluster", "info")) or "state:ok" not in told
            ):
                assert time.monotonic() < end_s, told
                time.sleep(0.05)
        yield servers
