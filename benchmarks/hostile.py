"""Measures what one hostile user of another domain costs an honest client in time, and the server in memory.

The honest client acquires 64 blocks and releases them, one acquire after the other, over an express channel: alone,
then while a process only computes (the cost of a busy processor alone: the limit), during each act of the hostile
user, and during all of them in turn. All of that is measured round by round. Prints one JSON line; the
goal is a 99% of less than 2 ms. It needs root, for processes of three users. Run: python -m benchmarks.hostile
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.kit.hostile.scene import ACTS, BLOCKS, HostileProcess, Scene, open_scene

ALONE, COMPUTES, ALL = "alone", "compute", "everything"
GOAL_MS = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description="One hostile user beside one honest client.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--acquires", type=int, default=20_000, help="in each round, beside each of them")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("only root can start processes of other users", file=sys.stderr)
        return 1
    print(json.dumps(measure(options.rounds, options.acquires)))
    return 0


def measure(rounds: int, acquires: int) -> dict[str, Any]:
    """Returns the milliseconds of acquires by what went on during them, and the server's own memory in MiB."""
    with open_scene() as scene:
        begun_mib = _rss_mib(scene)
        taken: dict[str, list[float]] = {}
        done: dict[str, int] = {}
        largest_mib = begun_mib
        with scene.hostile() as hostile:
            for _ in range(rounds):
                for beside in (ALONE, COMPUTES, *ACTS, ALL):
                    with _acting(hostile, beside) as acted:
                        taken.setdefault(beside, []).extend(scene.tell_honest(f"measure {acquires}"))
                    done[beside] = done.get(beside, 0) + len(acted)
                    largest_mib = max(largest_mib, _rss_mib(scene))
        kept = scene.check()
        return {
            "acquire_ms": {beside: _describe(times) for beside, times in taken.items()},
            "limit_ms": _describe(taken[COMPUTES])["p99"],
            "goal_ms": GOAL_MS,
            "acts": done,
            "server_mib": {"before": begun_mib, "largest": largest_mib, "after": _rss_mib(scene)},
            "server_files": scene.count_files(),
            "blocks": {"saved": BLOCKS, "there": kept["blocks"], "right": kept["right"]},
            "processors": len(os.sched_getaffinity(0)),
        }


@contextmanager
def _acting(hostile: HostileProcess, beside: str) -> Iterator[list[int]]:
    """Again and again, until what is inside is over. An entry for each time."""
    acted: list[int] = []
    is_over = threading.Event()

    def act() -> None:
        while not is_over.is_set():
            if beside == COMPUTES:
                hostile.compute()
            else:
                hostile.act(*(() if beside == ALL else (beside,)))
            acted.append(1)

    if beside == ALONE:
        yield acted
        return
    thread = threading.Thread(target=act)
    thread.start()
    try:
        while not acted:
            is_over.wait(0.001)
        yield acted
    finally:
        is_over.set()
        thread.join()


def _describe(times_s: list[float]) -> dict[str, float]:
    times_ms = np.array(times_s) * 1000
    found = {"p50": np.percentile(times_ms, 50), "p99": np.percentile(times_ms, 99), "largest": times_ms.max()}
    return {name: round(float(value), 3) for name, value in found.items()}


def _rss_mib(scene: Scene) -> float:
    return round(scene.measure_rss_bytes() / (1 << 20), 1)


if __name__ == "__main__":
    sys.exit(main())
