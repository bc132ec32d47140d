"""Thousands of requests from one seed to an engine of their own, of which nothing is left when it has ended.

In one process every block is compared as well.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import select
import tempfile
from pathlib import Path

import pytest

from tests.kit.open_files import count_open_files
from tests.vllm.connector_probe import prepare
from tests.vllm.engine import EnginePool, start_engine
from tests.vllm.seeded_traffic import (
    DENSE_TRAFFIC,
    GDN_TRAFFIC,
    SLIDING_TRAFFIC,
    Traffic,
    assert_it_was_what_it_claims,
    run_traffic,
)

pytestmark = [pytest.mark.vllm, pytest.mark.campaign]

SEED = 20_271
REQUESTS = 2000
PROMPTS = 120
GONE_TIMEOUT_MS = 60_000


@pytest.mark.parametrize(
    ("traffic", "has_own_processes"),
    [
        (DENSE_TRAFFIC, False),
        (SLIDING_TRAFFIC, False),
        (GDN_TRAFFIC, False),
        (SLIDING_TRAFFIC, True),
    ],
    ids=["dense", "sliding", "gdn", "sliding_in_own_processes"],
)
def test_thousands_of_requests_restore_what_was_saved_and_leave_nothing_behind(
    engines: EnginePool,
    traffic: Traffic,
    has_own_processes: bool,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines.leave_process()
    room = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("TMPDIR", str(room))
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    files, children = count_open_files(), find_children()
    engine = start_engine(
        traffic.model,
        engines.model_folder(traffic.model),
        has_own_processes=has_own_processes,
        **traffic.arguments(),
    )
    try:
        prepare(engine)
        server = open_server(room)
        assert bool(find_children() - children) is has_own_processes
        counts = run_traffic(engine, traffic, requests=REQUESTS, prompts=PROMPTS, seed=SEED)
    finally:
        engine.close()
    print(json.dumps({"model": traffic.model.name, "has_own_processes": has_own_processes, **counts}))
    assert_it_was_what_it_claims(counts)
    assert counts["evicted"] > 100
    assert await_exit(server), "the engine's private server lives on"
    assert list(room.glob("kvoffload-*/*")) == []
    for child in find_children() - children:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            assert await_exit(os.pidfd_open(child)), "a process of the engine lives on"
    # Of an engine with its own processes vLLM keeps its side of their sockets.
    assert has_own_processes or count_open_files() <= files


def open_server(room: Path) -> int:
    """Opens a pidfd of the private server's process, which is not our child."""
    (log,) = room.glob("kvoffload-*/*.log")
    found = re.search(r"process (\d+)", log.read_text())
    assert found is not None
    return os.pidfd_open(int(found[1]))


def await_exit(process: int) -> bool:
    """Waits for a process to exit, and takes its descriptor."""
    poller = select.poll()
    poller.register(process, select.POLLIN)
    try:
        return bool(poller.poll(GONE_TIMEOUT_MS))
    finally:
        os.close(process)


def find_children() -> set[int]:
    """Of this process and of theirs, without the one that Python keeps for its own names."""
    multiprocessing.active_children()  # takes note of those that have ended
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid for pid in found - {os.getpid()} if b"multiprocessing.resource_tracker" not in read_command(pid)}


def read_command(pid: int) -> bytes:
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
