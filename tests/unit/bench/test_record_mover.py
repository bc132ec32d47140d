"""Records are moved to shared memory and back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvoffload.bench.child import Child
from kvoffload.bench.record_mover import RecordMover
from kvoffload.bench.served import join
from kvoffload.client import LinkSettings
from kvoffload.errors import BenchmarkError

LINK = LinkSettings(acquire_deadline_s=10.0, stock_slots=(64,))


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, batch: int) -> None:
    with (
        Child("kvoffload.bench.served", tmp_path / "s", 64, 0),
        join(tmp_path / "s", "one", record_bytes=8192, link=LINK) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        mover = RecordMover(client, pool, records=6, record_bytes=8192, threads=2)
        assert mover.save(batch) > 0
        assert mover.load(batch) > 0
        assert mover.copy("save", batch) > 0
        assert mover.copy("load", batch) > 0
        found = client.stats()
        assert (found.readable, found.leases) == (6, 0)
        for slot in mover.slots:
            slot[:] = 8
        with pytest.raises(BenchmarkError, match="not what was saved"):
            mover.load(batch)
