"""The explanation of ways says what was measured and what follows."""

from __future__ import annotations

import pytest

from kvoffload.bench import explain
from kvoffload.bench.explain import explain_ways, find_gpu_calibration
from kvoffload.errors import UnsupportedError
from kvoffload.transfer.calibration import Calibration, CalibrationKey
from kvoffload.transfer.copy_engine import CopyDirection
from kvoffload.transfer.copy_ways import CopyWay, WayTiming

SAVED = [
    WayTiming(direction=CopyDirection.SAVE, run_bytes=4096, runs=1000, way=way, seconds=seconds)
    for way, seconds in ((CopyWay.BATCH, 1e-3), (CopyWay.STAGED, 1e-4))
]
LOADED = WayTiming(direction=CopyDirection.LOAD, run_bytes=65536, runs=10, way=CopyWay.BATCH, seconds=1e-3)
TIMINGS = (*SAVED, LOADED)


def test_a_row_has_all_ways_and_the_one_taken() -> None:
    load, save = explain_ways(TIMINGS)
    assert save == {
        "direction": "save",
        "run_bytes": 4096,
        "runs": 1000,
        "batch_GB/s": pytest.approx(4.096),
        "staged_GB/s": pytest.approx(40.96),
        "mapped_GB/s": None,
        "way": "staged",
    }
    assert (load["direction"], load["way"]) == ("load", "batch")


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        find_gpu_calibration()


def test_the_first_gpu_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Calibration(key=CalibrationKey(gpu="G", driver="13.0", kernels=(), page_bytes=(1,)), timings=TIMINGS)
    asked = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(explain, "find_calibration", lambda *settings: asked.append(settings) or made)
    assert find_gpu_calibration() is made
    assert asked[0][:2] == (explain.PAGE_BYTES, 0)
