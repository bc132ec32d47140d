"""A shared cache server for engines, which a test kills, stops and starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvoffload.cache import CacheStats
from kvoffload.client import Client, ClientSettings, Member
from kvoffload.protocol import Role
from tests.kit.children import stop

if TYPE_CHECKING:
    from tests.vllm.engine import Engine

ADOPT_WAIT_S = 60
JOIN_WAIT_S = 30.0
LOOKS = 3000
LOOK_S = 0.02


class SharedServer:
    """`kvoffload serve` on one socket: at most one process at a time, none at first."""

    def __init__(self, folder: Path, *, tables: str = "", enter: Sequence[str] = (), **settings: str) -> None:
        """Takes its settings. `tables`: what its configuration file says. `enter` begins its command line: where it
        runs."""
        self._enter = tuple(enter)
        self.socket = folder / "s"
        self._config = folder / "server.toml"
        self._config.write_text(tables)
        self._settings: Mapping[str, str] = {"memory": "512MiB", "segment_size": "64MiB", **settings}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts it, and waits until it listens. It does not wait for old memory, but takes over memory that is offered
        before it has its own."""
        self._start(adopt_wait_s=0)

    def succeed(self) -> None:
        """The same, but it waits until the memory of the one before is offered."""
        self._start(adopt_wait_s=ADOPT_WAIT_S)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """It has no time for a last word."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def stop(self) -> None:
        """It does nothing until it goes on; its connections stay open."""
        assert self._process is not None
        stop(self._process)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _start(self, *, adopt_wait_s: int) -> None:
        assert self._process is None
        command = [*self._enter, sys.executable, "-P", "-m", "kvoffload", "serve", "--adopt-wait", str(adopt_wait_s)]
        command += ["--config", str(self._config)]
        for name, value in {"server": str(self.socket), **self._settings}.items():
            command += ["--set", f"{name}={value}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("kvoffload serves")


def await_served(engine: Engine) -> None:
    """Waits until both sides of an engine in this process are served by the present server."""
    from tests.vllm import connector_probe as probe

    connector: Any = probe.scheduler_connector(engine)
    worker: Any = probe.worker_side()
    clients = (connector.scheduler_side.parts.cache, worker.cache)
    for _ in range(LOOKS):
        if all(client.wait_until_served(LOOK_S) for client in clients) and len({c.link.boot_id for c in clients}) == 1:
            return
    raise AssertionError(f"not served again: {[client.fault for client in clients]}")


def count(server: SharedServer) -> CacheStats:
    """Returns a server's counts, with all that it has been told before."""
    member = Member(engine="an onlooker", role=Role.OBSERVER, rank=0, pid=os.getpid(), uid=os.getuid())
    with Client(ClientSettings(socket=server.socket, member=member)) as client:
        assert client.wait_until_served(JOIN_WAIT_S)
        return client.stats()
