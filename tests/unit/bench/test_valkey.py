"""The benchmark of the Valkey tier measures a real server."""

from __future__ import annotations

import pytest

from kvoffload.bench import valkey
from kvoffload.bench.valkey import ValkeyBenchmark
from kvoffload.errors import BenchmarkError
from tests.kit.tiers.valkey_server import find_program


def test_a_line_for_each_question(monkeypatch: pytest.MonkeyPatch) -> None:
    find_program("redis-benchmark")
    monkeypatch.setattr(valkey, "DATA_BYTES", 4 << 20)
    results = list(ValkeyBenchmark().run(lambda step: None))
    assert [(result.params["what"], result.params["record_bytes"], str(result.goal)) for result in results] == [
        ("put", 1 << 20, "ratio at least 0.7"),
        ("get", 1 << 20, "ratio at least 0.7"),
        ("put", 64 << 10, "None"),
        ("get", 64 << 10, "None"),
    ]
    assert all(result.value > 0 and result.limit > 0 for result in results)


def test_without_a_server_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey.shutil, "which", lambda program: None)
    monkeypatch.setattr(valkey.sys, "prefix", "/nowhere")
    with pytest.raises(BenchmarkError, match="redis-server is not installed"):
        list(ValkeyBenchmark().run(lambda step: None))
