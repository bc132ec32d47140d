"""The benchmark with a hostile user measures all its figures."""

from __future__ import annotations

import os

import pytest

from benchmarks.hostile import measure
from tests.kit.hostile.scene import ACTS, BLOCKS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
def test_a_client_is_measured_beside_everything_that_a_hostile_user_does() -> None:
    found = measure(rounds=1, acquires=20)
    assert list(found["acquire_ms"]) == ["alone", "compute", *ACTS, "everything"]
    assert all(one["largest"] >= one["p99"] >= one["p50"] > 0 for one in found["acquire_ms"].values())
    assert all(found["acts"][beside] for beside in ("compute", *ACTS, "everything"))
    assert found["acts"]["alone"] == 0
    assert found["server_mib"]["largest"] >= found["server_mib"]["before"] > 1
    assert found["blocks"] == {"saved": BLOCKS, "there": BLOCKS, "right": BLOCKS}
