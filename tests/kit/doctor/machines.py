"""Machines that only exist in tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvoffload.doctor.machine import NO_LIMIT, Machine
from kvoffload.native import Capabilities, CudaDevice
from kvoffload.units import GIB

GOOD = Machine(
    capabilities=Capabilities(
        architecture="x86_64",
        cpu_features=("avx2",),
        sha256_path="sha_ni",
        kernel_archs=("sm_80", "sm_90"),
        cuda_version=(13, 0),
        cuda_problem="",
        cuda_devices=(CudaDevice(name="H200", compute_capability=(9, 0)),),
        io_uring_problem="",
        page_bytes=4096,
        huge_pages=(),
        transparent_huge_pages="madvise",
        transparent_huge_pages_in_shmem="advise",
        numa_nodes=1,
    ),
    kernel=(6, 8),
    headroom_bytes=64 * GIB,
    available_bytes=64 * GIB,
    limits={
        "file size": NO_LIMIT,
        "open files": 1 << 20,
        "locked memory": 8 << 20,
        "address space": NO_LIMIT,
        "threads": NO_LIMIT,
    },
    shm_bytes=8 * GIB,
    commit_room_bytes=None,
    nvidia_devices=("/dev/nvidia0",),
    engines={"vllm": "0.32.0"},
    plugins=("kvoffload",),
    is_clock_kept=True,
)


def like(**changes: Any) -> Machine:
    return replace(GOOD, **changes)


def able(**changes: Any) -> Machine:
    return replace(GOOD, capabilities=replace(GOOD.capabilities, **changes))


def limited(name: str, limit: int) -> Machine:
    return replace(GOOD, limits={**GOOD.limits, name: limit})
