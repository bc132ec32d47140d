"""Two domains, processes of two users, one server: no process gets, finds or acts on anything of another domain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.cache import CacheSettings
from kvoffload.protocol import Counts, Stats
from kvoffload.server import DomainSettings, TenantSettings
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.units import MIB
from tests.kit.children import child
from tests.kit.server.blocks import hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient

RED, BLUE, NOBODY = 61_001, 61_002, 61_003
SERVER = """
import sys
from pathlib import Path
from kvoffload.cache import CacheSettings
from kvoffload.server import DomainSettings
from kvoffload.server.loop import CacheServer, ServerPlan
memory = CacheSettings(memory_bytes=64 << 20, segment_bytes=64 << 20)
domains = (DomainSettings(name="red", uids=frozenset({61001})), DomainSettings(name="blue", uids=frozenset({61002})))
plan = ServerPlan(socket=Path(sys.argv[1]), memory={"red": memory, "blue": memory}, domains=domains, mode=0o666)
server = CacheServer(plan)
print(server.boot_id, flush=True)
server.run()
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")


@contextmanager
def engine(path: Path, uid: int) -> Iterator[subprocess.Popen[str]]:
    with child(["-m", "tests.kit.server.domain_engine", str(path), str(uid)]) as started:
        yield started


def read(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process has ended"
    return json.loads(line)


def write(process: subprocess.Popen[str], value: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()


@pytest.fixture
def served() -> Iterator[tuple[Path, int]]:
    """A socket that every user can reach, and the server's boot id."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with subprocess.Popen(
            [sys.executable, "-c", SERVER, f"{folder}/s"], stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                assert server.stdout is not None
                yield Path(folder) / "s", int(server.stdout.readline())
            finally:
                server.kill()


@needs_root
def test_no_domain_is_given_anything_of_another(served: tuple[Path, int]) -> None:
    path, boot_id = served
    with engine(path, RED) as red, engine(path, BLUE) as blue:
        engines = {RED: red, BLUE: blue}
        given = {uid: read(process) for uid, process in engines.items()}
        assert (given[RED]["domain"], given[BLUE]["domain"]) == ("red", "blue")
        # Lock, index and the one segment.
        assert [len(found["inodes"]) for found in given.values()] == [3, 3]
        for uid, other in ((RED, BLUE), (BLUE, RED)):
            write(engines[uid], given[other] | {"boot_id": boot_id, "uid": other})
            got = read(engines[uid])
            assert got.pop("inodes") == given[uid]["inodes"]
            line = f"session {given[other]['session']} is not open on this connection"
            assert got == {
                "its domain": f"NOT_ALLOWED: greeting: user {uid} may not use domain '{given[other]['domain']}'",
                "its session": f"NO_SESSION: hello: {line}",
                "its session, on my connection": f"NO_SESSION: stats: {line}",
                "its session, reopened": False,
                "its blocks": "MISS",
                "its blocks in my index": False,
                "my blocks": "HIT",
                "my bytes": [uid % 251],
                "indexes to write to": 0,
            }
        assert not set(given[RED]["inodes"]) & set(given[BLUE]["inodes"])


@needs_root
def test_a_user_of_no_domain_is_told_so_in_one_line(served: tuple[Path, int]) -> None:
    path, _ = served
    with engine(path, NOBODY) as process:
        refused = f"NOT_ALLOWED: greeting: user {NOBODY} may not use this server"
        assert read(process) == {"refused": refused, "inodes": []}


def test_a_tenant_over_its_quota_loses_its_own_first(tmp_path: Path) -> None:
    tenants = (TenantSettings(name="small", quota_bytes=8 * MIB), TenantSettings(name="large", quota_bytes=48 * MIB))
    plan = ServerPlan(
        socket=tmp_path / "s",
        memory={"": CacheSettings(memory_bytes=64 * MIB, segment_bytes=64 * MIB)},
        domains=(DomainSettings(name="", tenants=tenants),),
    )
    server = CacheServer(plan)
    clients = {
        name: RawClient(
            tmp_path / "s",
            replace(register_of(record_bytes=MIB), tenant=name),
            engine=name,
            turn=lambda: server.turn(0.001),
        )
        for name in ("small", "large")
    }
    try:
        # While there is room, a quota is no bound.
        small, large = hashes_of(56, seed=1), hashes_of(40, seed=2)
        for at in range(0, 56, 8):
            save(clients["small"], small[at * 32 : (at + 8) * 32], 1)
        for at in range(0, 40, 8):
            save(clients["large"], large[at * 32 : (at + 8) * 32], 2)
        index, name_space = clients["large"].index, clients["large"].name_space
        assert index.lookup(name_space, 0, large).all()
        kept = int(np.count_nonzero(index.lookup(name_space, 0, small)))
        assert 8 <= kept < 56
        counts = clients["small"].ask(Stats())
        assert isinstance(counts, Counts)
        used = {tenant.name: tenant.used_bytes for tenant in counts.tenants}
        assert (used["small"], used["large"]) == (kept * MIB, 40 * MIB)
    finally:
        for client in clients.values():
            client.close()
        server.close()
