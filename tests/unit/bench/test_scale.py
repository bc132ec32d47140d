"""The proving ground is a program of the clone, and is told which form is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.bench import scale
from kvoffload.bench.scale import ScaleBenchmark
from tests.kit.bench.scripts import RESULT


def test_the_repository_has_it() -> None:
    assert scale.SCRIPT.exists()


@pytest.mark.parametrize(
    ("benchmark", "told"),
    [
        (ScaleBenchmark(), "--json"),
        (ScaleBenchmark(is_short=True), "--json --short"),
        (ScaleBenchmark(trace=Path("t.jsonl")), "--json --trace t.jsonl"),
    ],
)
def test_it_is_told_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark: ScaleBenchmark, told: str
) -> None:
    monkeypatch.setattr(scale, "SCRIPT", tmp_path / "script.py")
    row = RESULT.as_json()
    scale.SCRIPT.write_text(
        f"import json, sys\nprint(json.dumps({{**{row!r}, 'connector': ' '.join(sys.argv[1:])}}))\n"
    )
    (result,) = benchmark.run(lambda step: None)
    assert result.params["connector"] == told
