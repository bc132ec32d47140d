"""A real Mooncake master and a store on loopback, for tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoffload import native
from kvoffload.config.mooncake_address import MooncakeAddress
from kvoffload.tiers.base import TierState
from kvoffload.tiers.mooncake import MooncakeSettings
from kvoffload.tiers.record_coder import RecordCoder
from kvoffload.tiers.remote import RemoteTier, RemoteTierSettings
from tests.kit.children import stop
from tests.kit.free_ports import free_port
from tests.kit.tiers.valkey_server import LIBRARIES

WAIT_S = 60.0
_STORE = """
import socket, sys, time
from mooncake.store import MooncakeDistributedStore
host, port, segment_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
end_s = time.monotonic() + 60
while socket.socket().connect_ex((host, port)):
    assert time.monotonic() < end_s
    time.sleep(0.02)
store = MooncakeDistributedStore()
print(store.setup(host, "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", f"{host}:{port}"), flush=True)
sys.stdin.read()
"""


def add_libraries(patch: pytest.MonkeyPatch) -> None:
    """Adds libraries for all processes that are started."""
    patch.setenv("LD_LIBRARY_PATH", f"{LIBRARIES}:{os.environ.get('LD_LIBRARY_PATH', '')}")


class Master:
    """One process, and one that has memory for records."""

    def __init__(
        self, folder: Path, segment_bytes: int, *, host: str = "127.0.0.1", port: int = 0, enter: Sequence[str] = ()
    ) -> None:
        """`enter` begins their command lines: where they run."""
        own = Path(sys.executable).with_name("mooncake_master")
        found = str(own) if own.exists() else shutil.which("mooncake_master")
        if found is None:
            pytest.skip("mooncake_master is missing: mooncake-transfer-engine-non-cuda is not installed")
        self.address = MooncakeAddress(host=host, port=port or free_port())
        command = [*enter, found, f"--rpc_address={host}", f"--rpc_port={self.address.port}"]
        command += [f"--metrics_host={host}", f"--metrics_port={free_port()}"]
        with (folder / "master.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        command = [*enter, sys.executable, "-c", _STORE, host, str(self.address.port), str(segment_bytes)]
        with (folder / "store.log").open("wb") as log:
            self.store = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert self.store.stdout is not None
        if self.store.stdout.readline().strip() != b"0":
            self.kill()
            said = "\n".join((folder / name).read_text()[-500:] for name in ("master.log", "store.log"))
            if "shared libraries" in said:
                pytest.skip(f"Mooncake's libraries are missing: {said}")
            raise AssertionError(said)

    def pause(self) -> None:
        stop(self.process)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill_store(self) -> None:
        self.store.kill()
        self.store.wait()

    def kill(self) -> None:
        for process in (self.store, self.process):
            process.kill()
            process.communicate()


@contextmanager
def serve_mooncake(folder: Path, segment_bytes: int = 128 << 20, **place: Any) -> Iterator[Master]:
    master = Master(folder, segment_bytes, **place)
    try:
        yield master
    finally:
        master.kill()


def make_tier(
    settings: MooncakeSettings, coder: RecordCoder | None = None, *, keys: native.SealKeys | None = None
) -> RemoteTier:
    """One that looks often whether the master is back. `keys`: seal its records."""
    coder = coder or RecordCoder(settings.compress)
    tier = RemoteTier(
        RemoteTierSettings(
            place=str(settings.address),
            open_store=partial(settings.open_store, coder),
            connections=1,
            first_probe_s=0.05,
            last_probe_s=0.5,
            coder=coder,
        )
    )
    if keys is not None:
        tier.seal_with(keys)
    assert tier.wait_open(WAIT_S)
    return tier


def await_state(tier: RemoteTier, state: TierState) -> None:
    end_s = time.monotonic() + WAIT_S
    while tier.health()[0].state is not state:
        assert time.monotonic() < end_s, tier.health()
        time.sleep(0.01)
