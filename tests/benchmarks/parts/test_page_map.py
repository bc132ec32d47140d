"""The benchmark of page maps measures what it says."""

from __future__ import annotations

import pytest

from benchmarks.parts import page_map
from benchmarks.parts.page_map import PageMapBenchmark, limit_read_runs, make_geometry
from kvoffload.errors import BenchmarkError
from kvoffload.kvspec import build_page_map


def test_the_geometry_has_different_page_sizes_and_no_mergeable_runs() -> None:
    pages = build_page_map(make_geometry(3)).groups[0]
    assert pages.num_runs == page_map.LAYERS
    assert len(set(pages.length.tolist())) == 8


def test_one_line_per_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_map, "NUM_BLOCKS", (2, 5))
    results = list(PageMapBenchmark().run(lambda step: None))
    assert [result.params["num_blocks"] for result in results] == [2, 5]
    assert all(result.goal is not None and result.value > 0 for result in results)


def test_the_limit_reads_all_runs_and_has_a_floor() -> None:
    limit = limit_read_runs([(0, 4, 2), (8, 4, 3)])
    assert limit.call() == 5
    with pytest.raises(BenchmarkError, match="below its floor"):
        limit.rate(limit.amount / limit.floor * 1.01)
