"""A real Mooncake master and a store on loopback, for tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffload.mooncake_address import MooncakeAddress
from kvoffload.tiers.base import TierState
from kvoffload.tiers.mooncake import MooncakeTerms
from kvoffload.tiers.remote import RemoteTier, RemoteTierTerms
from tests.unit.tiers.valkey_server import LIBRARIES, free_port

WAIT_S = 60.0
_STORE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]), flush=True)
sys.stdin.read()
"""


def add_libraries(patch: pytest.MonkeyPatch) -> None:
    """For all processes that are started."""
    patch.setenv("LD_LIBRARY_PATH", f"{LIBRARIES}:{os.environ.get('LD_LIBRARY_PATH', '')}")


class Master:
    """One process, and one that has memory for records."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        own = Path(sys.executable).with_name("mooncake_master")
        found = str(own) if own.exists() else shutil.which("mooncake_master")
        if found is None:
            pytest.skip("mooncake_master is missing: mooncake-transfer-engine-non-cuda is not installed")
        self.port = free_port()
        self.address = MooncakeAddress(host="127.0.0.1", port=self.port)
        command = [found, "--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--metrics_host=127.0.0.1"]
        with (folder / "master.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--metrics_port={free_port()}"], stdout=log, stderr=log, start_new_session=True
            )
        end_s = time.monotonic() + WAIT_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            if self.process.poll() is not None:
                pytest.skip(f"mooncake_master does not start: {(folder / 'master.log').read_text()[-300:]}")
            assert time.monotonic() < end_s
            time.sleep(0.02)
        with (folder / "store.log").open("wb") as log:
            self.store = subprocess.Popen(
                [sys.executable, "-c", _STORE, self.address.endpoint, str(segment_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.store.stdout is not None
        assert self.store.stdout.readline().strip() == b"0", (folder / "store.log").read_text()[-500:]

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill_store(self) -> None:
        self.store.kill()
        self.store.wait()

    def kill(self) -> None:
        for process in (self.store, self.process):
            if process is not None:
                process.kill()
                process.wait()


@contextmanager
def serve_mooncake(folder: Path, segment_bytes: int = 128 << 20) -> Iterator[Master]:
    master = Master(folder, segment_bytes)
    try:
        yield master
    finally:
        master.kill()


def make_tier(terms: MooncakeTerms) -> RemoteTier:
    """One that looks often whether the master is back."""
    tier = RemoteTier(
        RemoteTierTerms(
            place=str(terms.address), open_store=terms.open_store, connections=1, first_probe_s=0.05, last_probe_s=0.5
        )
    )
    assert tier.wait_open(WAIT_S)
    return tier


def await_state(tier: RemoteTier, state: TierState) -> None:
    end_s = time.monotonic() + WAIT_S
    while tier.health()[0].state is not state:
        assert time.monotonic() < end_s, tier.health()
        time.sleep(0.01)
