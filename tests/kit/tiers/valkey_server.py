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

from kvoffload import native
from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.tiers.base import TierState
from kvoffload.tiers.record_coder import RecordCoder
from kvoffload.tiers.remote import RemoteTier, RemoteTierSettings
from kvoffload.tiers.valkey import ValkeySettings
from kvoffload.tiers.valkey_slots import SLOTS
from tests.kit.children import stop
from tests.kit.free_ports import free_port

DEBIAN = Path(sys.prefix) / "debian"
"""Where `make setup` unpacks it."""
LIBRARIES = DEBIAN / "usr/lib" / f"{os.uname().machine}-linux-gnu"
WAIT_S = 30.0


def find_program(name: str) -> str:
    own = DEBIAN / "usr/bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: Debian's redis-server could not be had by make setup")
    return found


def environment() -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": f"{LIBRARIES}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


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
        assert self._process is not None
        stop(self._process)

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
    """Asks by the server's own client."""
    command = [find_program("redis-cli"), "-p", str(server.port), *words]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def serve_cluster(folder: Path, *options: str, nodes: int = 3, replicas: int = 0) -> Iterator[Sequence[Server]]:
    """So many nodes, each with its part of the slots; then so many replicas, of the first ones."""
    with ExitStack() as stack:
        servers = []
        for at in range(nodes + replicas):
            place = folder / f"node{at}"
            place.mkdir(parents=True)
            cluster = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", str(free_port()))
            # A replica's first copy is not put off for others that might want one, too.
            cluster += ("--repl-diskless-sync-delay", "0")
            servers.append(stack.enter_context(serve(place, *cluster, *options)))
        for at, server in enumerate(servers[:nodes]):
            first, last = SLOTS * at // nodes, SLOTS * (at + 1) // nodes - 1
            ask(server, "cluster", "addslotsrange", str(first), str(last))
            ask(server, "cluster", "set-config-epoch", str(at + 1))
        for server in servers:
            bus = ask(server, "config", "get", "cluster-port").split()[-1]
            for other in servers:
                if other is not server:
                    ask(other, "cluster", "meet", "127.0.0.1", str(server.port), bus)
        for server in servers:
            await_told(server, f"cluster_known_nodes:{len(servers)}", "cluster", "info")
        for primary, replica in zip(servers, servers[nodes:], strict=False):
            ask(replica, "cluster", "replicate", ask(primary, "cluster", "myid"))
        for server in servers:
            await_told(server, "state:ok", "cluster", "info")
        for replica in servers[nodes:]:
            await_told(replica, "master_link_status:up", "info", "replication")
        yield servers


def await_told(server: Server, wanted: str, *words: str) -> None:
    """Waits until the answer has it."""
    end_s = time.monotonic() + WAIT_S
    while wanted not in (told := ask(server, *words)):
        assert time.monotonic() < end_s, told
        time.sleep(0.05)


def make_tier(
    settings: ValkeySettings, coder: RecordCoder | None = None, *, keys: native.SealKeys | None = None
) -> RemoteTier:
    """One that looks often whether the server is back. `keys`: seal its records."""
    coder = coder or RecordCoder(settings.compress)
    tier = RemoteTier(
        RemoteTierSettings(
            place=str(settings.address),
            open_store=settings.make_opener(coder),
            connections=2,
            coder=coder,
            first_probe_s=0.02,
            last_probe_s=0.05,
        )
    )
    if keys is not None:
        tier.seal_with(keys)
    assert tier.wait_open(WAIT_S)
    return tier


def settings_of(server: Server, *, user: str = "", has_tls: bool = False, **changes: object) -> ValkeySettings:
    address = ValkeyAddress(host="127.0.0.1", port=server.port, user=user, has_tls=has_tls)
    return ValkeySettings(address=address, **{"call_timeout_s": WAIT_S} | changes)  # type: ignore[arg-type]


def await_state(tier: RemoteTier, state: TierState) -> None:
    end_s = time.monotonic() + WAIT_S
    while tier.health()[0].state is not state:
        assert time.monotonic() < end_s, tier.health()
        time.sleep(0.005)


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


@contextmanager
def serve_tls(folder: Path, *options: str) -> Iterator[tuple[Server, Path]]:
    """Serves with the certificate that has to be trusted."""
    folder.mkdir(exist_ok=True)
    key, certificate = make_certificate(folder, "server")
    port = free_port()
    tls = ("--port", "0", "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    with serve(folder / "tls", *tls, "--tls-auth-clients", "no", *options, port=port) as server:
        yield server, certificate
