"""The server of benchmarks is a real one, and what is asked of it is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.bench.child import Child
from kvoffload.bench.served import acquire, join, make_chain, save_chain
from kvoffload.errors import BenchmarkError


def test_what_one_client_saved_another_acquires(tmp_path: Path) -> None:
    with (
        Child("kvoffload.bench.served", tmp_path / "s", 64, 0),
        join(tmp_path / "s", "one") as one,
        join(tmp_path / "s", "two") as two,
    ):
        save_chain(one, make_chain(5))
        found = acquire(two, make_chain(5))
        assert found.groups[0].addresses.size == 5
        assert found.lease is not None
        two.release(found.lease)
        with pytest.raises(BenchmarkError, match="MISS up to 0"):
            acquire(two, make_chain(5, seed=2))
    assert list(tmp_path.iterdir()) == []


def test_more_than_there_is_room_for_is_not_saved(tmp_path: Path) -> None:
    with (
        Child("kvoffload.bench.served", tmp_path / "s", 64, 0),
        join(tmp_path / "s", "one", record_bytes=20 << 20) as one,
        pytest.raises(BenchmarkError, match="of 9 blocks not all were saved"),
    ):
        save_chain(one, make_chain(9))
