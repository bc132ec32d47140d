"""A process that reads `/metrics` again and again, as Prometheus does, for as long as the benchmark tells it."""

from __future__ import annotations

import time
import urllib.request

from kvoffload.bench.child import answer_commands, say_ready

TIMEOUT_S = 10.0


def scrape(address: str, seconds: float, every_s: float) -> list[float]:
    """Returns the seconds that each reading took. A reading begins every `every_s`, if the one before it has ended."""
    taken, begin = [], time.perf_counter()
    while (start := time.perf_counter()) < begin + seconds:
        with urllib.request.urlopen(f"{address}/metrics", timeout=TIMEOUT_S) as answer:
            answer.read()
        taken.append(time.perf_counter() - start)
        time.sleep(max(start + every_s - time.perf_counter(), 0.0))
    return taken


def main(address: str) -> None:
    say_ready()
    answer_commands({"scrape": lambda seconds, every_s: scrape(address, seconds, every_s)})
