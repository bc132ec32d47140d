"""The GPU's rows: all of them on a GPU, with small pools; without one, what they are made of."""

from __future__ import annotations

import threading

import pytest
import torch

from kvoffload.bench import copy_gpu
from kvoffload.bench.copied_blocks import LAYERS
from kvoffload.bench.copy_gpu import Background, measure_gpu
from kvoffload.units import KIB, MIB


def test_a_background_runs_beside_the_block_and_ends_with_it() -> None:
    has_called = threading.Event()
    before = threading.active_count()
    with Background(has_called.set):
        assert has_called.wait(60)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch finds no CUDA device")
def test_every_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_gpu, "PAGE_BYTES", (4 * KIB,))
    monkeypatch.setattr(copy_gpu, "POOL_BYTES", 64 * KIB * LAYERS * 4)
    monkeypatch.setattr(copy_gpu, "SUBMIT_BLOCKS", 10)
    monkeypatch.setattr(copy_gpu, "REGISTERED_BYTES", 64 * MIB)
    rows = list(measure_gpu(lambda step: None))
    assert [row.params.get("direction") for row in rows[:3]] == ["save", "load", "both"]
    assert [row.params.get("way") for row in rows[4:7]] == ["batch", "staged", "mapped"]
    assert rows[7].params["problem"] == "none"
    assert all(row.value > 0 and row.limit > 0 for row in rows)
