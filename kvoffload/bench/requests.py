"""Requests of real clients to a real server, and echoes in turn with them.

What an acquire brings is released behind the clock, but where clients are counted.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvoffload import native
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.calls import time_acquires, time_calls
from kvoffload.bench.child import Child
from kvoffload.bench.echo import EchoClient
from kvoffload.bench.limits import limit_line_walk
from kvoffload.bench.measure import Pair, measure_pair, summarize_pairs
from kvoffload.bench.served import join, make_chain, save_chain
from kvoffload.client import Client
from kvoffload.errors import BenchmarkError

FEW = 64
MANY = 32_000
ROUNDS = 101
"""Of a few calls to the server and as many to the echo in turn, as this machine's speed changes by the second."""
CALLS = 10
MANY_ROUNDS = 31
BUSY_ROUNDS = 7
BUSY_S = 1.0
CLIENTS = 8
CLIENTS_S = 0.5
IDLE_S = 5.0
MEMORY_MIB = 256


def measure_requests(name: str, progress: Progress) -> Iterator[Result]:
    """A row for each kind of request, and one for a server that gets none."""
    yield from _Requests(name).run(progress)


class _Requests:
    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, progress: Progress) -> Iterator[Result]:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            server, echo = Path(folder, "server"), Path(folder, "echo")
            served = stack.enter_context(Child("kvoffload.bench.served", server, MEMORY_MIB, 0))
            echoing = stack.enter_context(Child("kvoffload.bench.echo", echo))
            with join(server, "rpc") as client:
                save_chain(client, make_chain(FEW))
                save_chain(client, make_chain(MANY))
                progress("an idle server")
                yield self._idle(served.pid, echoing.pid)
                progress("look-ups")
                yield from self._look_up(client)
                with EchoClient(echo, FEW) as limit:
                    progress(f"acquires of {FEW}")
                    pair = _alternate(client, make_chain(FEW), limit, rounds=ROUNDS, calls=CALLS)
                    yield self._timed("acquire", pair, Goal(Measure.RATIO, Bound.AT_MOST, 1.3), blocks=FEW)
                    progress(f"acquires of {FEW} beside acquires of {MANY}")
                    yield self._busy(client, limit, server, echo)
                with EchoClient(echo, MANY) as limit:
                    progress(f"acquires of {MANY}")
                    pair = _alternate(client, make_chain(MANY), limit, rounds=MANY_ROUNDS, calls=1)
                    yield self._timed("acquire", pair, Goal(Measure.VALUE, Bound.AT_MOST, 6000), blocks=MANY)
            progress(f"{CLIENTS} clients")
            yield self._many(server, echo)

    def _look_up(self, client: Client) -> Iterator[Result]:
        """The limit reads as many lines of a table at random."""
        walk = native.LineWalk(1 << 16)
        limit = limit_line_walk(walk, batches=1, hashes=FEW, amount=1)
        for what, hashes in (("hit", make_chain(FEW)), ("miss", make_chain(FEW, seed=2))):
            if client.lookup(0, hashes).all() != (what == "hit"):
                raise BenchmarkError(f"a look-up of {what}s finds something else")
            pair = measure_pair(lambda hashes=hashes: client.lookup(0, hashes), limit.call)  # type: ignore[misc]
            yield self._timed(f"look-up, {what}", pair, Goal(Measure.VALUE, Bound.AT_MOST, 5), blocks=FEW)

    def _busy(self, client: Client, limit: EchoClient, server: Path, echo: Path) -> Result:
        """Times acquires while another client is busy. The echo has the same load."""
        values, limits = [], []
        with Child("kvoffload.bench.calls", server, echo, "other", MANY) as other:
            for _ in range(BUSY_ROUNDS):
                other.start("acquires", BUSY_S)
                acquires, echoes, end = [], [], time.perf_counter() + BUSY_S
                while time.perf_counter() < end:
                    acquires += time_acquires(client, make_chain(FEW), CALLS)
                    echoes += time_calls(limit.call, CALLS)
                other.answer()
                values.append(float(np.percentile(acquires, 99)))
                limits.append(float(np.percentile(echoes, 99)))
        goal = Goal(Measure.VALUE, Bound.AT_MOST, 2000)
        return self._timed(
            f"acquire beside others of {MANY}", summarize_pairs(values, limits), goal, blocks=FEW, percentile=99
        )

    def _many(self, server: Path, echo: Path) -> Result:
        values: list[float] = []
        limits: list[float] = []
        with ExitStack() as stack:
            clients = [
                stack.enter_context(Child("kvoffload.bench.calls", server, echo, f"client{number}", FEW))
                for number in range(CLIENTS)
            ]
            for _ in range(BUSY_ROUNDS):
                for what, rates in (("acquires", values), ("echoes", limits)):
                    for client in clients:
                        client.start(what, CLIENTS_S)
                    rates.append(sum(client.answer() for client in clients) / CLIENTS_S)
        pair = summarize_pairs(values, limits)
        return Result(
            name=self.name,
            value=pair.value_s,
            unit="calls/s",
            limit=pair.limit_s,
            spread=pair.spread,
            goal=Goal(Measure.RATIO, Bound.AT_LEAST, 0.6),
            params={
                "what": "acquire and release, all clients",
                "blocks": FEW,
                "clients": CLIENTS,
                "processors": os.cpu_count() or 1,
            },
        )

    def _idle(self, server: int, echo: int) -> Result:
        """The limit is a server that waits and does nothing, and looks up as often."""
        before = [_used_s(server), _used_s(echo)]
        time.sleep(IDLE_S)
        value, limit = (
            (_used_s(pid) - start) / IDLE_S * 100 for pid, start in zip((server, echo), before, strict=True)
        )
        return Result(
            name=self.name,
            value=value,
            unit="% of a core",
            limit=max(limit, 1e-6),
            spread=0.0,
            goal=Goal(Measure.VALUE, Bound.AT_MOST, 0.2),
            params={"what": "idle server", "seconds": IDLE_S},
        )

    def _timed(self, what: str, pair: Pair, goal: Goal, *, blocks: int, percentile: int = 50) -> Result:
        return Result(
            name=self.name,
            value=pair.value_s * 1e6,
            unit="us",
            limit=pair.limit_s * 1e6,
            spread=pair.spread,
            goal=goal,
            params={"what": what, "blocks": blocks, "percentile": percentile},
        )


def _alternate(client: Client, chain: bytes, limit: EchoClient, *, rounds: int, calls: int) -> Pair:
    """Medians of each round."""
    time_acquires(client, chain, calls)
    time_calls(limit.call, calls)
    values, limits = [], []
    for _ in range(rounds):
        values.append(statistics.median(time_acquires(client, chain, calls)))
        limits.append(statistics.median(time_calls(limit.call, calls)))
    return summarize_pairs(values, limits)


def _used_s(pid: int) -> float:
    """Of all threads of a process, those that have ended too."""
    # The clock that clock_getcpuclockid(3) names.
    return time.clock_gettime(~pid << 3 | 2)
