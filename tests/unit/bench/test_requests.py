"""The rows about requests measure what they say."""

from __future__ import annotations

import pytest

from kvoffload.bench import requests


def test_a_row_for_each_kind_of_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MANY": 500,
        "ROUNDS": 7,
        "CALLS": 2,
        "MANY_ROUNDS": 7,
        "BUSY_ROUNDS": 2,
        "BUSY_S": 0.05,
        "CLIENTS": 2,
        "CLIENTS_S": 0.05,
        "IDLE_S": 0.05,
    }.items():
        monkeypatch.setattr(requests, name, value)
    steps: list[str] = []
    rows = list(requests.measure_requests("rpc", steps.append))
    assert [(row.params["what"], row.params.get("blocks"), str(row.goal)) for row in rows] == [
        ("idle server", None, "value at most 0.2"),
        ("look-up, hit", 64, "value at most 5"),
        ("look-up, miss", 64, "value at most 5"),
        ("acquire", 64, "ratio at most 1.3"),
        ("acquire beside others of 500", 64, "value at most 2000"),
        ("acquire", 500, "value at most 6000"),
        ("acquire and release, all clients", 64, "ratio at least 0.6"),
    ]
    assert all(row.limit > 0 for row in rows)
    assert all(row.value > 0 for row in rows[1:])
    assert {row.name for row in rows} == {"rpc"}
    assert steps
