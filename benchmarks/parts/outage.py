"""What does a scheduler notice of a server that hangs, dies or comes back? Measured with real processes and signals."""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.child import Child
from kvoffload.bench.served import JOIN_S, join, make_chain, save_chain
from kvoffload.cache import AcquiredBlocks, Ask
from kvoffload.client import Client, LinkSettings
from kvoffload.errors import BenchmarkError

BLOCKS = 64
ENTRIES = 4096
RECORD_BYTES = 4096
MEMORY_MIB = 64
CALLS = 200
TRIES = 5
ADOPT_WAIT_S = 5.0
STEP_MS = 1.0
"""Milliseconds that all calls of a scheduler's step may wait together: the clients' default."""
PAUSES_S = (0.0, 2.0)
"""Between a server's death and the next one's start: within the same second, and later."""


class OutageBenchmark:
    """A server and a client, each a process of its own. A limit is what the call takes while the server serves."""

    name = "outage"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Three rows for a server that stops, one for one that is killed, one for each that comes after it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "server")
            server = Child("kvoffload.bench.served", path, MEMORY_MIB, 0)
            try:
                with join(path, "scheduler", record_bytes=RECORD_BYTES, link=LinkSettings()) as client:
                    save_chain(client, make_chain(ENTRIES))
                    progress("a server that is stopped")
                    yield from _stop(self.name, client, server)
                    for pause_s in PAUSES_S:
                        progress(f"a server that is killed, and another one {pause_s:g} s later")
                        yield _kill(self.name, client, server)
                        time.sleep(pause_s)
                        server = Child("kvoffload.bench.served", path, MEMORY_MIB, ADOPT_WAIT_S)
                        yield _survive(self.name, client, pause_s)
            finally:
                server.close()


def _stop(name: str, client: Client, server: Child) -> Iterator[Result]:
    chain, missing = make_chain(BLOCKS), make_chain(BLOCKS, seed=2)
    hits, misses = [_step(client, chain) for _ in range(CALLS)], [_step(client, missing) for _ in range(CALLS)]
    first, later, later_misses = [], [], []
    for _ in range(TRIES):
        server.stop()
        try:
            first.append(_step(client, chain))
            later_misses += [_step(client, missing) for _ in range(CALLS)]
            _await(client, is_served=False)
            later += [_step(client, chain) for _ in range(CALLS)]
        finally:
            server.signal(signal.SIGCONT)
        _await(client, is_served=True)
    usual, usual_miss = statistics.median(hits), statistics.median(misses)
    for what, added, limit, goal_ms in (
        ("stopped server, first hit", statistics.median(first) - usual, usual, STEP_MS),
        ("stopped server, hits once it is late", statistics.median(later) - usual, usual, 0.01),
        ("stopped server, misses", statistics.median(later_misses) - usual_miss, usual_miss, 0.01),
    ):
        goal = Goal(Measure.VALUE, Bound.AT_MOST, goal_ms)
        yield _row(name=name, what=what, value=added * 1e3, unit="ms added", limit=limit * 1e3, goal=goal, calls=TRIES)


def _kill(name: str, client: Client, server: Child) -> Result:
    """Also sees to it that what was held can be read until it is released."""
    chain = make_chain(BLOCKS)
    found = _hold(client, chain)
    assert found.lease is not None
    address = int(found.groups[0].addresses[0])
    slot = client.memory(found.lease.memory_id).view(address, RECORD_BYTES)
    before = slot.copy()
    usual = statistics.median(_step(client, chain) for _ in range(CALLS))
    server.kill()
    seconds = _step(client, chain)
    _await(client, is_served=False)
    if not np.array_equal(before, slot) or not client.lookup(0, chain).all():
        raise BenchmarkError("memory of a server that was killed is not what it was")
    client.release(found.lease)
    goal = Goal(Measure.VALUE, Bound.AT_MOST, STEP_MS)
    what = "killed server, next call"
    return _row(name=name, what=what, value=seconds * 1e3, unit="ms", limit=usual * 1e3, goal=goal, calls=1)


def _survive(name: str, client: Client, pause_s: float) -> Result:
    start = time.perf_counter()
    _await(client, is_served=True)
    seconds = time.perf_counter() - start
    readable = int(client.lookup(0, make_chain(ENTRIES)).sum())
    goal = Goal(Measure.RATIO, Bound.AT_LEAST, 1.0)
    what = f"entries after a restart {pause_s:g} s later"
    return _row(name=name, what=what, value=readable, unit="entries", limit=ENTRIES, goal=goal, served_after_s=seconds)


def _row(*, name: str, what: str, value: float, unit: str, limit: float, goal: Goal, **more: float) -> Result:
    params: dict[str, int | float | str] = {"what": what}
    params |= {key: round(number, 3) for key, number in more.items()}
    return Result(name=name, value=value, unit=unit, limit=limit, spread=0.0, goal=goal, params=params)


def _step(client: Client, chain: bytes) -> float:
    """Seconds of a scheduler's call, in a step of its own."""
    client.begin_step()
    start = time.perf_counter()
    found = client.acquire(Ask(chain))
    seconds = time.perf_counter() - start
    if found.lease is not None:
        client.release(found.lease)
    return seconds


def _hold(client: Client, chain: bytes) -> AcquiredBlocks:
    """A hit, which a step's budget may be too short for on a busy machine."""
    end = time.perf_counter() + JOIN_S
    while time.perf_counter() < end:
        client.begin_step()
        found = client.acquire(Ask(chain))
        if found.is_hit:
            return found
    raise BenchmarkError(f"no acquire in {JOIN_S:g} s was a hit within a step of {STEP_MS} ms")


def _await(client: Client, *, is_served: bool) -> None:
    end = time.perf_counter() + JOIN_S
    while client.is_served != is_served:
        if time.perf_counter() > end:
            raise BenchmarkError(f"the client is {'still' if client.is_served else 'not'} served: {client.fault}")
        time.sleep(0.01)
