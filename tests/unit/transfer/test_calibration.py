"""Calibration: what is measured, what is kept, and what happens when neither works."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvoffload import native
from kvoffload.errors import NativeError
from kvoffload.kvspec import build_page_map
from kvoffload.transfer import calibration
from kvoffload.transfer.calibration import (
    BLOCK_COUNTS,
    BUDGET_S,
    RECORD_BYTES,
    REGISTRATION_TIMEOUT_S,
    Calibration,
    CalibrationKey,
    cache_folder,
    find_calibration,
    find_ways,
    measure_on,
    page_sizes,
    read_calibration,
    scatter_runs,
    time_ways,
    write_calibration,
)
from kvoffload.transfer.copy_engine import CopyDirection
from kvoffload.transfer.copy_ways import CopyWay, WayTiming
from tests.kit.kvspec.builders import dense, qwen3next
from tests.kit.transfer.fake_cuda import FakeCuda, needs_fake_cuda

KEY = CalibrationKey(gpu="GPU 1", driver="13.0", kernels=("sm_90",), page_bytes=(4096, 65536))
TIMINGS = (
    WayTiming(direction=CopyDirection.SAVE, run_bytes=4096, runs=256, way=CopyWay.BATCH, seconds=2e-4),
    WayTiming(direction=CopyDirection.SAVE, run_bytes=4096, runs=256, way=CopyWay.STAGED, seconds=3e-5),
)


class Core:
    """Takes what a way takes, on a clock of its own."""

    def __init__(self, seconds: dict[str, float], *, has_kernels: bool = True, fault: str | None = None) -> None:
        self.now = 0.0
        self._seconds = seconds
        self._has_kernels = has_kernels
        self._fault = fault
        self._way = ""

    def clock(self) -> float:
        return self.now

    def kernel_problem(self) -> str:
        return "" if self._has_kernels else "none"

    def set_ways(self, rules: list[tuple[bool, int, int, str]]) -> None:
        ((_, _, _, self._way),) = rules

    def submit(self, *plan: object) -> int:
        self.now += self._seconds[self._way]
        return 1

    def fence(self, timeout_ms: int) -> bool:
        return self._fault != "late"

    def poll(self) -> list[tuple[int, str | None, bytes | None]]:
        return [(1, self._fault, None)]


def test_pages_are_the_engines_own_few_and_what_a_row_becomes() -> None:
    pages = build_page_map(dense(num_layers=3, num_blocks=8))
    own = {max(512, length) for length in pages.groups[0].length.tolist()}
    assert page_sizes(pages) == (*sorted(own), RECORD_BYTES)
    sizes = page_sizes(build_page_map(qwen3next(3)))
    assert 1 < len(sizes) <= 5
    assert list(sizes) == sorted(set(sizes))
    assert all(512 <= size <= RECORD_BYTES for size in sizes)


def test_measured_pages_do_not_touch_and_fill_their_record() -> None:
    sizes = (512, 3000, RECORD_BYTES)
    groups = scatter_runs(sizes, 1 << 30)
    assert [len(group[1]) for group in groups] == [2048, 4, 349, 4, 1, 1]
    for index, (record_bytes, base, stride, length, offset, allocation) in enumerate(groups):
        size = sizes[index // 2]
        assert record_bytes == length.sum() <= RECORD_BYTES
        assert set(length.tolist()) == {size}
        assert (np.diff(base) > size).all() or len(base) == 1
        assert base[0] == 1 << 30
        assert base[-1] + size <= (1 << 30) + stride[0]
        assert offset.tolist() == list(range(0, record_bytes, size))
        assert set(allocation.tolist()) == {0}


def test_every_plan_is_timed_by_every_way() -> None:
    core = Core({"batch": 1e-3, "staged": 5e-4, "mapped": 4.5e-4})
    timings = list(time_ways(core, (4096, 65536), 0, core.clock))  # type: ignore[arg-type]
    assert len(timings) == (1 + len(BLOCK_COUNTS)) * 2 * len(CopyDirection) * len(CopyWay)
    assert {timing.runs for timing in timings if timing.run_bytes == 65536} == {4, 16, 128, 512}
    assert all(timing.seconds == pytest.approx(5e-4) for timing in timings if timing.way is CopyWay.STAGED)
    table = Calibration(key=KEY, timings=tuple(timings)).table
    assert {rule.way for rule in table} == {CopyWay.STAGED}


def test_what_has_no_kernels_is_timed_by_batch_alone() -> None:
    core = Core({"batch": 1e-3}, has_kernels=False)
    assert {timing.way for timing in time_ways(core, (4096,), 0, core.clock)} == {CopyWay.BATCH}  # type: ignore[arg-type]


def test_a_slow_gpu_is_not_measured_beyond_the_budget() -> None:
    core = Core(dict.fromkeys(("batch", "staged", "mapped"), 0.05))
    timings = list(time_ways(core, (512, 4096, 16384, 65536), 0, core.clock))  # type: ignore[arg-type]
    assert len(timings) % len(CopyWay) == 0
    assert 0 < len(timings) < len(BLOCK_COUNTS) * 4 * len(CopyDirection) * len(CopyWay)
    assert core.now < BUDGET_S + 0.05 * 3 + 0.01


@pytest.mark.parametrize(("fault", "text"), [("late", "longer than"), ("broken", "a copy failed: broken")])
def test_a_copy_that_fails_ends_it(fault: str, text: str) -> None:
    core = Core({"batch": 1e-3, "staged": 1e-3, "mapped": 1e-3}, fault=fault)
    with pytest.raises(NativeError, match=text):
        list(time_ways(core, (4096,), 0, core.clock))  # type: ignore[arg-type]


def test_what_is_kept_is_read_again_for_its_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "deep" / KEY.file_name()
    write_calibration(file, Calibration(key=KEY, timings=TIMINGS))
    assert read_calibration(file, KEY) == Calibration(key=KEY, timings=TIMINGS)
    assert list(file.parent.iterdir()) == [file]
    for other in (replace(KEY, driver="13.1"), replace(KEY, page_bytes=(4096,)), replace(KEY, gpu="GPU 2")):
        assert other.file_name() != KEY.file_name()
        assert read_calibration(file, other) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept | {"format": 99},
        lambda kept: kept | {"timings": [kept["timings"][0] | {"way": "teleport"}]},
        lambda kept: kept | {"timings": [kept["timings"][0] | {"seconds": 0}]},
        lambda kept: kept | {"timings": 7},
        lambda kept: [kept],
    ],
)
def test_what_is_damaged_is_measured_again(tmp_path: Path, damage: object) -> None:
    file = tmp_path / KEY.file_name()
    write_calibration(file, Calibration(key=KEY, timings=TIMINGS))
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))  # type: ignore[operator]
    assert read_calibration(file, KEY) is None
    file.write_text("{")
    assert read_calibration(file, KEY) is None


@pytest.mark.parametrize("number", ["Infinity", "1e999", "[" * 100_000])
def test_numbers_that_are_none_are_measured_again(tmp_path: Path, number: str) -> None:
    file = tmp_path / KEY.file_name()
    write_calibration(file, Calibration(key=KEY, timings=TIMINGS))
    file.write_text(file.read_text().replace('"runs": 256', f'"runs": {number}'))
    assert number in file.read_text()
    assert read_calibration(file, KEY) is None


def test_a_folder_that_cannot_be_written_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_calibration(tmp_path / "file" / KEY.file_name(), Calibration(key=KEY, timings=TIMINGS))


def test_it_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(calibration, "measure", lambda sizes, device: calls.append((sizes, device)) or TIMINGS)
    for _ in range(2):
        assert find_calibration((4096,), 1, tmp_path).timings == TIMINGS
    assert calls == [((4096,), 1)]
    page_map = build_page_map(dense(num_layers=3, num_blocks=8))
    monkeypatch.setattr(calibration, "page_sizes", lambda page_map: (4096,))
    assert {rule.way for rule in find_ways(page_map, 1, tmp_path) or ()} == {CopyWay.STAGED}
    assert len(calls) == 1


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, NativeError, OSError])
def test_where_it_cannot_be_measured_the_default_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    def refuse(device: int) -> str:
        raise kind("no CUDA here")

    monkeypatch.setattr("torch.cuda.get_device_name", refuse)
    assert find_ways(build_page_map(dense(num_layers=3, num_blocks=8)), 0, tmp_path) is None
    assert "no CUDA here" in caplog.text


def test_the_users_cache_folder_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "kvoffload"


@needs_fake_cuda
def test_the_real_engine_is_timed_on_registered_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BLOCK_COUNTS", (1, 2))
    monkeypatch.setattr(calibration, "BUDGET_S", 60.0)
    driver, seen = FakeCuda(), []
    wait = calibration.wait_for_registration
    monkeypatch.setattr(
        calibration, "wait_for_registration", lambda core, size: (wait(core, size), seen.append(core.registration()))
    )
    sizes = (RECORD_BYTES // 2, RECORD_BYTES)
    timings = measure_on(driver.allocate(4 * RECORD_BYTES), [], sizes, 0, driver.library)
    ways = len(CopyWay) if native.capabilities().kernel_archs else 1
    assert len(timings) == 3 * len(sizes) * len(CopyDirection) * ways
    assert seen == [(2 * RECORD_BYTES, 2 * RECORD_BYTES, True, False, "")]
    assert driver.report_count == 0


@pytest.mark.parametrize(
    ("progress", "text"), [((8, 4, True, False, "refused"), "refused"), ((8, 4, False, False, ""), "it took too long")]
)
def test_slots_that_are_not_registered_are_not_measured(progress: tuple[int, int, bool, bool, str], text: str) -> None:
    waits: list[tuple[int, int]] = []
    core = SimpleNamespace(registration=lambda: progress, wait_registered=lambda *given: waits.append(given))
    with pytest.raises(NativeError, match=text):
        calibration.wait_for_registration(core, 8)  # type: ignore[arg-type]
    assert waits == [(8, 1000 * REGISTRATION_TIMEOUT_S)]
