"""The figures with which our connector's run is compared with the ideal one's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.ground.engine import Run, Served
from benchmarks.ground.figures import compare_runs
from benchmarks.ground.work import Ask

REQUEST: Any = None
"""The engine's own request, which no figure reads."""


def make_run(*served: tuple[str, float, int]) -> Run:
    """A run of requests: their names, their seconds to the first token, and how many tokens came from the pool."""
    return Run(
        [
            Served(Ask(name, [1], [2]), REQUEST, 0.0, first_s=seconds, cached_tokens=hit, external_tokens=hit)
            for name, seconds, hit in served
        ]
    )


def test_first_tokens_are_of_the_hits_of_either_and_of_all_requests() -> None:
    ours = make_run(("both", 0.1, 64), ("ideal alone", 0.8, 0), ("ours alone", 0.2, 64), ("neither", 9.0, 0))
    ideal = make_run(("both", 0.1, 64), ("ideal alone", 0.4, 64), ("ours alone", 1.6, 0), ("neither", 8.0, 0))
    found = {row.name: (row.value, row.limit) for row in compare_runs(ours, ideal, {})}
    assert found == {
        "tokens hit": (128, 128),
        "ttft of hits, p50": (200, 400),
        "ttft of hits, p99": (800, 1600),
        "ttft of all requests, p50": (800, 1600),
        "ttft of all requests, p99": (9000, 8000),
    }


def test_runs_without_hits_have_first_tokens_of_all_requests_alone() -> None:
    run = make_run(("a", 0.5, 0))
    names = [row.name for row in compare_runs(run, run, {})]
    assert names == ["tokens hit", "ttft of all requests, p50", "ttft of all requests, p99"]
