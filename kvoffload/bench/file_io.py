"""The limit of everything that reads and writes disks: fio with the same block size and depth, or a plain loop."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvoffload.errors import BenchmarkError

FIO_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class FileLoad:
    """`size_bytes` of one file in blocks, `depth` at a time, around the kernel's cache."""

    path: Path
    size_bytes: int
    block_bytes: int
    depth: int
    is_write: bool = False
    is_random: bool = False


def find_fio() -> str | None:
    """Returns where fio is, if it is installed."""
    return shutil.which("fio")


def time_file_load(load: FileLoad) -> float:
    """Seconds for one pass over the file, which is made first where it is missing."""
    if not load.path.exists() or load.path.stat().st_size < load.size_bytes:
        _make_file(load)
    return _time_by_fio(load) if find_fio() else _time_by_loop(load)


def _make_file(load: FileLoad) -> None:
    part = np.random.default_rng(1).bytes(1 << 20)
    with load.path.open("wb") as file:
        for _ in range(0, load.size_bytes, len(part)):
            file.write(part)
        os.fsync(file.fileno())


def _time_by_fio(load: FileLoad) -> float:
    kind = ("rand" if load.is_random else "") + ("write" if load.is_write else "read")
    command = [
        find_fio() or "fio",
        "--name=limit",
        f"--filename={load.path}",
        f"--size={load.size_bytes}",
        f"--bs={load.block_bytes}",
        f"--iodepth={load.depth}",
        f"--rw={kind}",
        "--direct=1",
        "--ioengine=io_uring",
        "--overwrite=1",
        "--refill_buffers=0",
        *(["--end_fsync=1"] if load.is_write else []),
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_TIMEOUT_S, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise BenchmarkError(f"fio failed: {lines[-1]}", remedy="remove fio to measure against a plain loop")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["job_runtime"]) / 1000.0


def _time_by_loop(load: FileLoad) -> float:
    file = os.open(load.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        offsets = np.arange(0, load.size_bytes, load.block_bytes)
        if load.is_random:
            np.random.default_rng(2).shuffle(offsets)
        buffers = [mmap.mmap(-1, load.block_bytes) for _ in range(load.depth)]
        move: Callable[[int, list[mmap.mmap], int], int] = os.pwritev if load.is_write else os.preadv

        def run(lane: int) -> None:
            for offset in offsets[lane :: load.depth].tolist():
                move(file, [buffers[lane]], offset)

        with ThreadPoolExecutor(load.depth) as pool:
            begun = time.perf_counter()
            for lane in [pool.submit(run, lane) for lane in range(load.depth)]:
                lane.result()
            if load.is_write:
                os.fdatasync(file)
            return time.perf_counter() - begun
    finally:
        os.close(file)
