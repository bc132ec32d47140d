"""Figures of a run, alone and compared with the ideal connector's run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.ground.engine import Run, VirtualEngine
from benchmarks.ground.work import Ask
from kvoffload.bench.base import Bound, Goal, Measure, Result


def serve_parts(engine: VirtualEngine, parts: Sequence[Sequence[Ask]]) -> Run:
    """All of it as one run; before each part but the first, the engine's own cache is reset."""
    whole = Run()
    for number, part in enumerate(parts):
        if number:
            assert engine.forget()
        whole.append(engine.serve(part))
    return whole


def compare_runs(ours: Run, ideal: Run, params: Mapping[str, int | float | str]) -> Iterator[Result]:
    """Tokens hit, and the first tokens of requests that are hits for either connector, and of all requests."""
    yield Result(
        name="tokens hit",
        value=count_hits(ours),
        limit=max(count_hits(ideal), 1),
        unit="tokens",
        spread=0.0,
        goal=Goal(Measure.RATIO, Bound.AT_LEAST, 0.98),
        params={
            **params,
            "external": sum(one.external_tokens for one in ours.served),
            "ideal_external": sum(one.external_tokens for one in ideal.served),
        },
    )
    hits = {one.ask.name for run in (ours, ideal) for one in run.served if one.external_tokens}
    for of, names in (("hits", hits), ("all requests", {one.ask.name for one in ideal.served})):
        mine, its = _first_tokens(ours, names), _first_tokens(ideal, names)
        for at, ratio in ((50, 1.1), (99, 1.25)) if names else ():
            yield Result(
                name=f"ttft of {of}, p{at}",
                value=find_percentile(mine, at),
                limit=find_percentile(its, at),
                unit="ms",
                spread=0.0,
                goal=Goal(Measure.RATIO, Bound.AT_MOST, ratio),
                params={**params, "requests": len(names)},
            )


def count_hits(run: Run) -> int:
    """Counts the prompts' tokens that were not computed, whether the engine itself had them or the pool."""
    return sum(one.cached_tokens for one in run.served)


def _first_tokens(run: Run, names: set[str]) -> list[float]:
    return [one.ttft_s * 1e3 for one in run.served if one.ask.name in names]


def find_percentile(values: Sequence[float], percent: int) -> float:
    """Returns the value that so many percent of all values are at most."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]
