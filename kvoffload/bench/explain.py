"""Why a plan takes the way it takes: the calibration of this GPU as a table."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.errors import UnsupportedError
from kvoffload.transfer.calibration import Calibration, cache_folder, find_calibration
from kvoffload.transfer.copy_ways import CopyWay, WayTiming, fastest
from kvoffload.units import KIB

PAGE_BYTES = (4 * KIB, 16 * KIB, 28 * KIB, 64 * KIB)
"""Where the ways part, as others have measured: DMAs of less than 28 KiB cost as much as those."""


def find_gpu_calibration() -> Calibration:
    """Returns the first GPU's calibration, kept or measured now. UnsupportedError: there is none."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "torch sees no CUDA device, and the host engine has one way only",
            remedy="run this where the model runs on an NVIDIA GPU",
        )
    return find_calibration(PAGE_BYTES, 0, cache_folder())


Row = dict[str, str | int | float | None]


def explain_ways(timings: Iterable[WayTiming]) -> list[Row]:
    """A row for each plan that was timed: GB/s by each way, and the way that is taken."""
    plans: dict[tuple[str, int, int], list[WayTiming]] = {}
    for timing in timings:
        plans.setdefault((timing.direction.value, timing.run_bytes, timing.runs), []).append(timing)
    rows: list[Row] = []
    for (direction, run_bytes, runs), timed in sorted(plans.items()):
        speeds = {timing.way: timing.bytes_per_s / 1e9 for timing in timed}
        row: Row = {"direction": direction, "run_bytes": run_bytes, "runs": runs}
        row.update({f"{way.value}_GB/s": speeds.get(way) for way in CopyWay})
        rows.append(row | {"way": fastest(timed).way.value})
    return rows
