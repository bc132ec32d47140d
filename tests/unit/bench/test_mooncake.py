"""The benchmark of the Mooncake tier measures a real master and store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.bench import mooncake
from kvoffload.bench.mooncake import MooncakeBenchmark
from kvoffload.errors import BenchmarkError
from tests.kit.tiers.mooncake_server import Master, add_libraries, serve_mooncake


def test_a_line_for_each_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_libraries(monkeypatch)
    with serve_mooncake(tmp_path) as installed:
        assert isinstance(installed, Master), "else it is skipped"
    monkeypatch.setattr(mooncake, "DATA_BYTES", 2 << 20)
    results = list(MooncakeBenchmark().run(lambda step: None))
    assert [(result.params["what"], result.params["record_bytes"]) for result in results] == [
        ("put", 1 << 20),
        ("get", 1 << 20),
        ("put", 64 << 10),
        ("get", 64 << 10),
    ]
    assert all(result.value > 0 and result.limit > 0 for result in results)


def test_without_a_master_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake.shutil, "which", lambda program: None)
    monkeypatch.setattr(mooncake.sys, "executable", "/nowhere/python")
    with pytest.raises(BenchmarkError, match="mooncake_master is not installed"):
        list(MooncakeBenchmark().run(lambda step: None))
