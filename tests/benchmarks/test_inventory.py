"""An inventory is measured at a server of its own."""

from __future__ import annotations

from benchmarks.inventory import BATCH, measure


def test_all_that_is_stored_is_told() -> None:
    blocks = BATCH + 100
    found = measure(blocks)
    assert found["blocks"] == blocks
    assert 0 < found["longest_turn_ms"] < found["seconds"] * 1e6
