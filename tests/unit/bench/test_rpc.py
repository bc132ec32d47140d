"""The benchmark of the server is its requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffload.bench import BENCHMARKS, requests
from kvoffload.bench.base import Progress, Result


def test_it_is_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(what: str, name: str, progress: Progress) -> Iterator[Result]:
        progress(what)
        yield Result(name=name, value=1, unit="", limit=1, spread=0, goal=None, params={"what": what})

    monkeypatch.setattr(requests, "measure_requests", lambda *given: rows("requests", *given))
    (benchmark,) = [one for one in BENCHMARKS if one.name == "rpc"]
    steps: list[str] = []
    found = list(benchmark.run(steps.append))
    assert [(row.name, row.params["what"]) for row in found] == [("rpc", "requests")]
    assert steps == ["requests"]
