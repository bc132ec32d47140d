"""A process that reads `/metrics` again and again, as Prometheus does, for as long as the benchmark tells it."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

from kvoffload.bench.child import Child, answer_commands, say_ready

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 10.0


def start_scraper(address: str) -> Child:
    """Starts the process, which finds this module in the clone."""
    return Child(__name__, address, enter=("env", f"PYTHONPATH={ROOT}"))


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
