"""The benchmark of the index measures what it says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.parts import index
from benchmarks.parts.index import IndexBenchmark
from kvoffload import native
from kvoffload.bench.base import Result
from kvoffload.errors import BenchmarkError


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {
        "ENTRIES": 20_000,
        "MANY_ENTRIES": 40_000,
        "GROWN_ENTRIES": 30_000,
        "GROWN_FROM": 10_000,
        "GROWTH_STEP": 10_000,
        "RECORD_BYTES": 4096,
        "BATCHES": 5,
        "ACQUIRE_BATCHES": 5,
        "PAIRS": 9,
        "RACE_CALLS": 50,
    }.items():
        monkeypatch.setattr(index, name, number)


def _rows(results: list[Result], what: str) -> list[Result]:
    return [result for result in results if result.params["what"] == what]


@pytest.mark.usefixtures("_small")
def test_a_line_per_goal_of_the_table() -> None:
    steps: list[str] = []
    results = list(IndexBenchmark().run(steps.append))
    assert steps
    assert all(result.value > 0 and result.limit > 0 for result in results)
    assert [result.params["entries"] for result in _rows(results, "look-up")] == [20_000, 40_000]
    assert len(_rows(results, "acquire")) == 1
    stores = _rows(results, "reserve, commit, evict")
    assert [row.params["policy"] for row in stores] == list(dict.fromkeys((index.DEFAULT_POLICY, "lru")))
    assert [row.goal is not None for row in stores] == [True, False][: len(stores)]
    (after,) = _rows(results, "reserve, commit, evict, after acquires")
    assert (after.params["policy"], after.goal) == (index.DEFAULT_POLICY, None)
    half, tail = _rows(results, "acquire beside stores")
    assert half.value <= tail.value
    assert (half.goal, str(tail.goal)) == (None, "value at most 50")
    assert int(tail.params["hits"]) <= int(tail.params["calls"]) == 350
    assert int(tail.params["stored"]) >= 7_000
    (grown,) = _rows(results, "peak memory while growing")
    assert grown.value >= 80
    assert (grown.params["from_entries"], grown.params["entries"]) == (10_000, 30_000)
    assert sum(result.goal is not None for result in results) == 6


def test_operations_that_fail_are_no_speed() -> None:
    assert index.check_done((0.5, 10), 10) == 0.5
    with pytest.raises(BenchmarkError, match="9 of 10"):
        index.check_done((0.5, 9), 10)


def test_too_few_hits_beside_stores_are_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "RACE_CALLS", 10)
    walk = native.LineWalk(1000)
    load = SimpleNamespace(race_acquires=lambda calls, _: (bytes(8 * 4), 1), race_walks=lambda *_: (bytes(80), 1))
    with pytest.raises(BenchmarkError, match="28 of 70 acquires"):
        next(IndexBenchmark().race(load, walk))  # type: ignore[arg-type]


def test_blocks_are_acquired_until_there_are_enough() -> None:
    answers = iter([(0.1, 400), (0.1, 0), (0.1, 700), (0.1, 1000)])
    index.acquire_some(SimpleNamespace(acquire=lambda *_: next(answers)), 1000)  # type: ignore[arg-type]
    assert list(answers) == [(0.1, 1000)]
    with pytest.raises(BenchmarkError, match="100 chains had 500 blocks too few"):
        index.acquire_some(SimpleNamespace(acquire=lambda *_: (0.1, 5)), 1000)  # type: ignore[arg-type]


def test_a_walk_is_no_larger_than_an_index() -> None:
    for entries in (0, (1 << 30) + 1, 1 << 63):
        with pytest.raises(ValueError, match="an index has 1 to 1073741824 entries"):
            native.LineWalk(entries)
    with pytest.raises(ValueError, match="fit into no memory"):
        native.LineWalk(10).walk(1 << 40, 1 << 40, False)


def test_a_race_ends_where_nothing_can_be_stored() -> None:
    load = native.make_cache_load(entries=1, record_bytes=1 << 20, policy="lru", threads=1)
    assert load.store(1)[1] == 0
    assert load.race_acquires(3, 1) == (b"", 0)


def test_too_little_memory_is_said_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "memory_headroom_bytes", lambda: 1 << 20)
    with pytest.raises(BenchmarkError, match="memory"):
        next(IndexBenchmark().run(lambda _: None))
