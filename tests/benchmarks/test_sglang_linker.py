"""The look-ups of the benchmark of SGLang's linker; its other rows need an engine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sglang_linker import LOOKUP_PAGES, Options, measure_lookups


def test_look_ups_are_of_what_is_there_and_of_what_is_not(tmp_path: Path) -> None:
    results = list(measure_lookups(tmp_path, lambda step: None, Options(prompt=0, rounds=1)))
    assert [result.params["case"] for result in results] == ["miss", "hit, with its lease", "hit, looked up again"]
    assert all(result.value > 0 and result.params["pages"] == LOOKUP_PAGES for result in results)
