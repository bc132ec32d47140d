"""What does a server cost whose answers are late? A real client and a real server; the answers are held back.

Each answer comes after a delay of its own, which is drawn (lognormal), or at the beginning of the server's next turn,
as with a quota of processors that is used up most of the time. Each request is a hit that waits for a quarter of the
time that computing it would take, and 50 ms at least, as the connector's do.
Run: python -m benchmarks.busy.late_answers
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvoffload.cache import Ask
from kvoffload.client import Client, ClientSettings
from kvoffload.client.joining import Member
from kvoffload.connector.loads.restores import LATE_SHARE
from kvoffload.protocol import Role
from tests.kit.cache.cache_model import make_chain
from tests.kit.server.blocks import register_of
from tests.kit.server.tiers import serving
from tests.kit.web.vllm_blocks import PATIENT, save

STEP_S = 0.003
"""How long an engine's step takes: as often the client is asked for the answer."""
PAUSE_S = 0.05
"""Mean time between a request's end and the next one."""


@dataclass(frozen=True, kw_only=True)
class LateAnswers:
    """How the requests of one case ended. Times are in milliseconds."""

    delay: str
    compute_ms: float
    asked: int
    hits: int
    late: int
    """Number of requests that were not answered in time."""
    not_asked: int
    """Number of requests that came while the client took the server for one that hangs."""
    wait: tuple[float, float]
    """How long requests waited: the median and the longest."""


class HeldBack:
    """Stands before the client's end of the express channel, and hands over each answer when it is due."""

    def __init__(self, end: Any, find_due: Callable[[float], float]) -> None:
        self._end = end
        self._find_due = find_due
        self._held: list[tuple[float, bytes]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def wait(self, other: int, timeout_ns: int) -> None:
        self._end.wait(other, min(timeout_ns, 1_000_000))

    def receive(self) -> tuple[list[bytes], bool]:
        frames, goes_on = self._end.receive()
        now_s = time.monotonic()
        self._held += [(self._find_due(now_s), frame) for frame in frames]
        due = [frame for at_s, frame in self._held if at_s <= now_s]
        self._held = [(at_s, frame) for at_s, frame in self._held if at_s > now_s]
        return due, goes_on


def draw_delays(median_ms: float, seed: int) -> Callable[[float], float]:
    chance = random.Random(seed)
    return lambda now_s: now_s + chance.lognormvariate(0, 1) * median_ms / 1e3


def wait_for_turns(turn_ms: float) -> Callable[[float], float]:
    turn_s = turn_ms / 1e3
    return lambda now_s: (now_s // turn_s + 1) * turn_s


DELAYS: dict[str, Callable[[], Callable[[float], float]]] = {
    "none": lambda: lambda now_s: now_s,
    "lognormal, median 1 ms": lambda: draw_delays(1, 1),
    "lognormal, median 10 ms": lambda: draw_delays(10, 1),
    "lognormal, median 100 ms": lambda: draw_delays(100, 1),
    "a turn each 100 ms": lambda: wait_for_turns(100),
    "a turn each 200 ms": lambda: wait_for_turns(200),
}


def measure(delay: str, *, compute_ms: float, requests: int, pause_s: float = PAUSE_S) -> LateAnswers:
    """Asks for the same blocks again and again, one request after the other."""
    member, chain, chance = (
        Member(engine="engine", role=Role.WORKER, pid=os.getpid()),
        make_chain(1, 4),
        random.Random(2),
    )
    found, waits = Counter[str](), []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "socket"):
        settings = ClientSettings(socket=Path(folder) / "socket", member=member, register=register_of(), link=PATIENT)
        with Client(settings) as saver:
            assert saver.wait_until_served(60), saver.fault
            save(saver, chain)
        settings = ClientSettings(socket=Path(folder) / "socket", member=member, register=register_of())
        with Client(settings) as client:
            assert client.wait_until_served(60), client.fault
            client.wire._express = HeldBack(client.wire._express, DELAYS[delay]())  # type: ignore[assignment]
            for _ in range(requests):
                begun_s, is_asked = time.monotonic(), client.is_served
                client.begin_step()
                pending = client.start_acquire(Ask(chain), wait_s=compute_ms * LATE_SHARE / 1e3)
                while client.poll(pending) is None and client.wait_for(pending) is None:
                    time.sleep(STEP_S)
                    client.begin_step()
                waits.append(time.monotonic() - begun_s)
                lease = None if pending.found is None else pending.found.lease
                found["hit" if lease is not None else "late" if is_asked else "not asked"] += 1
                if lease is not None:
                    client.release(lease)
                time.sleep(chance.expovariate(1 / pause_s))
    return LateAnswers(
        delay=delay,
        compute_ms=compute_ms,
        asked=requests,
        hits=found["hit"],
        late=found["late"],
        not_asked=found["not asked"],
        wait=(round(statistics.median(waits) * 1e3, 1), round(max(waits) * 1e3, 1)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy.late_answers", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="for each delay")
    parser.add_argument("--compute-ms", type=float, default=400, help="that computing a request's tokens would take")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    table = Table("delay", "hits", "late", "not asked", "wait, longest (ms)")
    for delay in DELAYS:
        row = measure(delay, compute_ms=options.compute_ms, requests=options.requests)
        if options.json:
            print(json.dumps(asdict(row)), flush=True)
        table.add_row(delay, *map(str, (row.hits, row.late, row.not_asked)), f"{row.wait[0]}, {row.wait[1]}")
    if not options.json:
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
