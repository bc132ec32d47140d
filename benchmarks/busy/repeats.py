"""Prompts that are asked again after the engine's own cache was reset: how many are restored, why not, and how fast."""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvoffload.errors import BenchmarkError
from tests.vllm.engine import make_prompt
from tests.vllm.http_service import Service

PROMPT_TOKENS = 2000
LEAST_RESTORED = 1280
"""A repeat with so many restored tokens counts as restored."""
PAUSE_S = 0.3
"""Between a prompt and its repeat."""
COUNTED_S = 5.0
"""How long the connector's counts of a prompt are awaited. They come with the engine's steps."""
LOOK_S = 0.1
RESET_S = 60.0
NOT_COUNTED = "not counted"
"""Stands for a reason that did not come in time."""


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The figures of one case. All times are in milliseconds."""

    case: str
    server: str
    load: float
    """The machine's load average over the last minute, at the end."""
    asked: int
    restored: int
    reasons: dict[str, int]
    """Number of repeats that were not restored, by the reason of most of their tokens."""
    cold: tuple[float, float]
    """Time to the first token of new prompts: the median and the longest. 0: there were none."""
    hit: tuple[float, float]
    miss: tuple[float, float]
    """The same of repeats that were not restored."""
    hooks: float = 0.0
    """Time in the connector's hooks on the scheduler's thread, for each request."""
    hooks_cpu: float = 0.0
    longest_hooks: float = 0.0
    """The longest time in hooks of one step."""
    longest_wait: float = 0.0
    """The longest time that one step waited for the server."""
    long_waits: int = 0
    """Number of steps that waited for more than a millisecond."""


def ask_repeats(
    service: Service, steps: Path, *, case: str, server: str, prompts: int, seed: int, is_over: Callable[[], bool]
) -> Repeats:
    """Asks so many prompts and their repeats, and more until the load is over. Without a connector nothing is
    repeated."""
    has_connector = server != "none"
    begin, counts = len(read_steps(steps)), _Counts(service)
    times: dict[str, list[float]] = {"cold": [], "hit": [], "miss": []}
    reasons = Counter[str]()
    number = 0
    while number < prompts or not is_over():
        prompt = make_prompt(seed + number, PROMPT_TOKENS)
        number += 1
        times["cold"].append(_ask(service, prompt)[0])
        if not has_connector:
            continue
        time.sleep(PAUSE_S)  # what a user does: nothing is waited for
        reset(service)
        taken, cached = _ask(service, prompt)
        reason = counts.take_reason()
        times["hit" if cached >= LEAST_RESTORED else "miss"].append(taken)
        if cached < LEAST_RESTORED:
            reasons[reason] += 1
    found = Repeats(
        case=case,
        server=server,
        load=os.getloadavg()[0],
        asked=number * has_connector,
        restored=len(times["hit"]),
        reasons=dict(reasons),
        cold=_summarize(times["cold"]),
        hit=_summarize(times["hit"]),
        miss=_summarize(times["miss"]),
    )
    return replace(found, **_summarize_steps(service, steps, begin, number)) if has_connector else found


def reset(service: Service) -> None:
    """Resets the engine's own cache, as soon as none of its blocks is in use."""
    until_s = time.monotonic() + RESET_S
    while not service.reset():
        if time.monotonic() >= until_s:
            raise BenchmarkError("the engine could not reset its own cache, a block is still held")
        time.sleep(LOOK_S)


def read_steps(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of a `TimedScheduler`."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class _Counts:
    """The connector's counts of prompt tokens, as the engine's metrics have them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._asked, self._misses = self._read()

    def take_reason(self) -> str:
        """Returns why a prompt and its repeat, both asked since the last call, were not restored: the reason of the
        most tokens, where those of the prompt itself are left out if it was not seen before."""
        until_s, least = time.monotonic() + COUNTED_S, self._asked + 2 * PROMPT_TOKENS
        asked, misses = self._read()
        while asked < least and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            asked, misses = self._read()
        found = misses - self._misses - Counter(never_seen=PROMPT_TOKENS)
        self._asked, self._misses = asked, misses
        return found.most_common(1)[0][0] if found and asked >= least else NOT_COUNTED

    def _read(self) -> tuple[int, Counter[str]]:
        text = self._service.ask("/metrics")
        rows = re.findall(r'^kvoffload_misses_total\{.*reason="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        asked = re.findall(r"^kvoffload_queries_total\{.*\} (\S+)$", text, re.MULTILINE)
        return sum(int(float(one)) for one in asked), Counter({name: int(float(count)) for name, count in rows})


def _ask(service: Service, prompt: list[int]) -> tuple[float, int]:
    """Returns the milliseconds until the first token, and how many tokens were not computed."""
    begun_s = time.perf_counter()
    cached = service.ask_for_cached(prompt)
    return (time.perf_counter() - begun_s) * 1e3, cached


def _summarize(taken: Sequence[float]) -> tuple[float, float]:
    return (round(statistics.median(taken)), round(max(taken))) if taken else (0, 0)


def _summarize_steps(service: Service, steps: Path, begin: int, prompts: int) -> dict[str, Any]:
    reset(service)
    lines = read_steps(steps)[begin:]
    totals = {name: sum(line[f"{name}_s"] for line in lines) / (2 * prompts) for name in ("hooks", "hooks_cpu")}
    longest = {name: max(line[f"{name}_s"] for line in lines) for name in ("longest_hooks", "longest_wait")}
    rounded = {name: round(seconds * 1e3, 2) for name, seconds in (totals | longest).items()}
    return {**rounded, "long_waits": sum(line["long_waits"] for line in lines)}
