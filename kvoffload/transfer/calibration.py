"""Which way is fastest on this GPU, for pages like the engine's: measured once, within two seconds, and kept.

The measurement has pages, slots and an engine of its own, so the model's memory is not touched. What is measured is
what will be used: plans of scattered blocks, submitted, moved and reported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.errors import KVOffloadError, NativeError
from kvoffload.kvspec.page_map import PageMap
from kvoffload.transfer.copy_engine import CopyDirection, RunArrays
from kvoffload.transfer.copy_ways import NO_LIMIT, CopyWay, WayTable, WayTiming, choose_ways
from kvoffload.units import MIB, milliseconds

logger = logging.getLogger(__name__)

BUDGET_S = 1.2
"""How long measuring may take. A way that is not measured by then has no rule of its own. Opening and closing the
engine take extra time."""
FORMAT = 1
RECORD_BYTES = MIB
BLOCK_COUNTS = (1, 8, 32)
"""Blocks of the measured plans, which therefore have 1, 8 and 32 MiB, whatever the pages. A further plan has a few
pages."""
FEW_PAGES = 4
MAX_PAGE_SIZES = 4
MIN_PAGE_BYTES = 512
"""Shorter ones count as this: what they cost is their number."""
REPEATS = 3
PLAN_TIMEOUT_MS = 1_000
CLOSE_TIMEOUT_MS = 10_000
REGISTRATION_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class CalibrationKey:
    """The GPU, driver, kernels and page sizes that a measurement holds for."""

    gpu: str
    driver: str
    kernels: tuple[str, ...]
    page_bytes: tuple[int, ...]

    def file_name(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True).encode()
        return f"copy-ways-{hashlib.sha256(text).hexdigest()[:16]}.json"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    key: CalibrationKey
    timings: tuple[WayTiming, ...]

    @property
    def table(self) -> WayTable:
        return choose_ways(self.timings)


def page_sizes(page_map: PageMap) -> tuple[int, ...]:
    """The lengths of the engine's runs, at most MAX_PAGE_SIZES of them, spread over all there are; and what a row of
    blocks becomes when its runs touch, which is as large as any.
    """
    lengths = sorted(
        {
            min(max(length, MIN_PAGE_BYTES), RECORD_BYTES)
            for pages in page_map.groups
            for length in pages.length.tolist()
        }
    )
    if len(lengths) > MAX_PAGE_SIZES:
        places = np.linspace(0, len(lengths) - 1, MAX_PAGE_SIZES).round().astype(int)
        lengths = [lengths[place] for place in places]
    return tuple(sorted({*lengths, RECORD_BYTES}))


def find_ways(page_map: PageMap, device: int, folder: Path | None = None) -> WayTable | None:
    """The table for this engine on this GPU: kept from before, or measured now. None: the engine's own stays.

    `folder` None: kvoffload's own below the user's cache folder.
    """
    try:
        return find_calibration(page_sizes(page_map), device, folder or cache_folder()).table or None
    except (KVOffloadError, RuntimeError, AssertionError, OSError) as fault:
        # A torch without CUDA asserts.
        logger.warning("the ways of copying were not measured, the default ones are taken: %s", fault)
        return None


def find_calibration(page_bytes: tuple[int, ...], device: int, folder: Path) -> Calibration:
    """NativeError or torch's error: it cannot be measured here."""
    import torch

    key = CalibrationKey(
        gpu=torch.cuda.get_device_name(device),
        driver=_driver_version(),
        kernels=native.capabilities().kernel_archs,
        page_bytes=page_bytes,
    )
    file = folder / key.file_name()
    kept = read_calibration(file, key)
    if kept is not None:
        return kept
    calibration = Calibration(key=key, timings=tuple(measure(page_bytes, device)))
    write_calibration(file, calibration)
    return calibration


def cache_folder() -> Path:
    """Returns where calibrations are kept. RuntimeError: this user has no home."""
    return Path.home() / ".cache" / "kvoffload"


def read_calibration(file: Path, key: CalibrationKey) -> Calibration | None:
    """Reads a calibration. None: it is not there, of another format or key, or damaged; whatever it is, measuring again
    mends it."""
    try:
        kept = json.loads(file.read_text())
        if kept["format"] != FORMAT or kept["key"] != json.loads(json.dumps(asdict(key))):
            return None
        timings = tuple(
            WayTiming(
                direction=CopyDirection(timing["direction"]),
                run_bytes=int(timing["run_bytes"]),
                runs=int(timing["runs"]),
                way=CopyWay(timing["way"]),
                seconds=float(timing["seconds"]),
            )
            for timing in kept["timings"]
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if not all(timing.seconds > 0 and timing.run_bytes > 0 and timing.runs > 0 for timing in timings):
        return None
    return Calibration(key=key, timings=timings)


def write_calibration(file: Path, calibration: Calibration) -> None:
    """Whole or not at all. A folder that cannot be written costs a measurement at the next start, no more."""
    timings = [
        {
            "direction": timing.direction.value,
            "run_bytes": timing.run_bytes,
            "runs": timing.runs,
            "way": timing.way.value,
            "seconds": timing.seconds,
        }
        for timing in calibration.timings
    ]
    written = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps({"format": FORMAT, "key": asdict(calibration.key), "timings": timings}))
        written.replace(file)
    except OSError as fault:
        logger.info("the ways of copying are measured at every start: %s", fault)


def measure(page_bytes: tuple[int, ...], device: int) -> list[WayTiming]:
    """Measures on GPU memory that is allocated for it and freed afterwards."""
    import torch

    with torch.cuda.device(device):
        pages = torch.zeros(2 * RECORD_BYTES * max(BLOCK_COUNTS), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        timings = measure_on(pages.data_ptr(), [pages], page_bytes, device)
        del pages
        torch.cuda.empty_cache()
    return timings


def measure_on(
    address: int, memory: list[object], page_bytes: tuple[int, ...], device: int, library: str | None = None
) -> list[WayTiming]:
    """On these pages, and on slots as the engine has them: whole pages of the host, registered as all others are."""
    slots = mmap.mmap(-1, RECORD_BYTES * max(BLOCK_COUNTS))
    slots_at = np.frombuffer(slots, np.uint8).ctypes.data
    core = native.create_cuda_engine(
        max(BLOCK_COUNTS), scatter_runs(page_bytes, address), [*memory, slots], device, 4, library
    )
    try:
        core.add_host_range(slots_at, len(slots))
        wait_for_registration(core, len(slots))
        return list(time_ways(core, page_bytes, slots_at, time.perf_counter))
    finally:
        core.close(CLOSE_TIMEOUT_MS)


def wait_for_registration(core: native.CudaCopyEngine, size_bytes: int) -> None:
    core.wait_registered(size_bytes, milliseconds(REGISTRATION_TIMEOUT_S))
    asked, registered, _, _, problem = core.registration()
    if problem or registered < asked:
        raise NativeError(f"{asked} bytes of host memory were not registered: {problem or 'it took too long'}")


def scatter_runs(page_bytes: tuple[int, ...], address: int) -> list[RunArrays]:
    """For each size a group of whole records and one of records of a few pages. Runs lie with a gap of their own length
    between them, and records of all groups in the same memory.
    """
    groups = []
    for size in page_bytes:
        for count in record_pages(size):
            offset = np.arange(count, dtype=np.int64) * size
            stride = np.full(count, 2 * RECORD_BYTES, np.int64)
            lengths = np.full(count, size, np.int64)
            groups.append((count * size, address + 2 * offset, stride, lengths, offset, np.zeros(count, np.uint32)))
    return groups


def record_pages(size: int) -> tuple[int, int]:
    """Of a whole record, and of one of a few pages."""
    count = max(RECORD_BYTES // size, 1)
    return count, min(count, FEW_PAGES)


def time_ways(
    core: native.CudaCopyEngine, page_bytes: tuple[int, ...], slots: int, clock: Callable[[], float]
) -> Iterator[WayTiming]:
    """Each size, count and direction by each way, until the budget is spent; a plan's ways all together, or none."""
    end = clock() + BUDGET_S
    ways = [CopyWay.BATCH] if core.kernel_problem() else list(CopyWay)
    for blocks, is_few in ((1, True), *((blocks, False) for blocks in BLOCK_COUNTS)):
        for number, size in enumerate(page_bytes):
            items = _items(2 * number + is_few, blocks, slots)
            runs = blocks * record_pages(size)[is_few]
            for direction in CopyDirection:
                timings = []
                for way in ways:
                    seconds = _time_way(core, direction, way, items, clock)
                    if clock() > end:
                        return
                    timings.append(WayTiming(direction=direction, run_bytes=size, runs=runs, way=way, seconds=seconds))
                yield from timings


_Items = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.uint64]]


def _items(group: int, blocks: int, slots: int) -> _Items:
    block = np.arange(blocks, dtype=np.uint32)
    return np.full(blocks, group, np.uint32), block, slots + block.astype(np.uint64) * np.uint64(RECORD_BYTES)


def _time_way(
    core: native.CudaCopyEngine, direction: CopyDirection, way: CopyWay, items: _Items, clock: Callable[[], float]
) -> float:
    """Returns the best time of a way."""
    is_load = direction is CopyDirection.LOAD
    core.set_ways([(is_load, NO_LIMIT, NO_LIMIT, way.value)])
    best = float("inf")
    for _ in range(REPEATS):
        start = clock()
        core.submit(is_load, False, *items, None)
        if not core.fence(PLAN_TIMEOUT_MS):
            raise NativeError("a copy of at most 32 MiB took longer than 1 s", remedy="look for NVRM lines in `dmesg`")
        best = min(best, clock() - start)
        for _, fault, *_ in core.poll():
            if fault is not None:
                raise NativeError(f"a copy failed: {fault}")
    return best


def _driver_version() -> str:
    version = native.capabilities().cuda_version
    return "unknown" if version is None else "{}.{}".format(*version)
