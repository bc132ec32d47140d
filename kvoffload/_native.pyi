"""The compiled extension, native/src/bindings/. Import it through kvoffload.native."""

from typing import TypedDict

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

class Probe(TypedDict):
    architecture: str
    cpu_features: tuple[str, ...]
    sha256_path: str
    kernel_archs: tuple[str, ...]
    cuda_version: int | None
    cuda_problem: str
    cuda_devices: tuple[tuple[str, int, int], ...] | None
    io_uring_problem: str
    page_bytes: int
    huge_pages: tuple[tuple[int, int, int], ...]
    transparent_huge_pages: str
    transparent_huge_pages_in_shmem: str
    numa_nodes: int

def hash_blocks(
    tokens: npt.NDArray[np.uint32],
    block_size: int,
    parent: bytes,
    extras: bytes = b"",
    extra_ends: npt.NDArray[np.uint64] | None = None,
) -> bytes: ...
def sha256(data: Buffer) -> bytes: ...
def probe(probe_devices: bool) -> Probe: ...
