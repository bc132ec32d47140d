"""The benchmark of copy engines measures what it says."""

from __future__ import annotations

import sys

import pytest

from kvoffload.bench import copy
from kvoffload.bench.copied_blocks import LAYERS
from kvoffload.bench.copy import CopyBenchmark, make_pool
from kvoffload.errors import BenchmarkError
from kvoffload.kvspec import build_page_map


def test_a_pool_is_scattered_pages_and_half_as_many_slots() -> None:
    pool = make_pool(4096, 40 * 4096 * LAYERS)
    (pages,) = build_page_map(pool.geometry).groups
    assert (pages.num_runs, set(pages.length.tolist())) == (LAYERS, {4096})
    assert pool.pages.nbytes == 2 * pool.copied_bytes == 40 * pages.record_bytes
    assert len(set(pool.items.block.tolist())) == 20
    offsets = sorted(int(slot) - pool.slots.ctypes.data for slot in pool.items.slot)
    assert offsets == [index * pages.record_bytes for index in range(20)]
    assert sorted(pool.items.block.tolist()) != pool.items.block.tolist()


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BenchmarkError, match=r"torch is not installed.*pip install torch"):
        list(CopyBenchmark().run(lambda step: None))


def test_one_line_per_size_direction_and_digests_and_one_for_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "PAGE_BYTES", (64, 4096))
    monkeypatch.setattr(copy, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(copy, "SUBMIT_BLOCKS", 10)
    *copies, submit = list(CopyBenchmark().run(lambda step: None))
    assert [tuple(row.params[name] for name in ("page_bytes", "direction", "digests")) for row in copies] == [
        (size, direction, digests) for size in (64, 4096) for direction in ("save", "load") for digests in ("no", "yes")
    ]
    assert [str(row.goal) for row in copies if row.goal] == ["ratio at least 0.7"] * 2
    assert all(row.value > 0 and row.limit > 0 for row in copies)
    assert (submit.unit, submit.params["blocks"], str(submit.goal)) == ("s", 10, "value at most 0.0003")
