"""The benchmark of peers measures what it says, between real processes."""

from __future__ import annotations

import pytest

from kvoffload.bench import peer
from kvoffload.bench.peer import PeerBenchmark
from kvoffload.units import MIB


def test_a_line_for_each_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "DATA_BYTES", 32 * MIB)
    monkeypatch.setattr(peer, "MEMORY_BYTES", 128 * MIB)
    results = list(PeerBenchmark().run(lambda step: None))
    params = [(result.params["link"], result.params["what"], result.params["record_bytes"]) for result in results]
    assert params == [
        (link, what, size * MIB) for link in ("trusted", "sealed") for size in (1, 4, 16) for what in ("put", "get")
    ]
    goals = {"trusted": "ratio at least 0.8", "sealed": "ratio at least 0.6"}
    assert all(str(result.goal) == goals[str(result.params["link"])] for result in results)
    assert all(result.value > 0 and result.limit > 0 for result in results)
