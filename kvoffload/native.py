"""The only door to the compiled extension: what it does for Python, and what it can do on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import NativeError
from kvoffload.units import format_size


def _missing_extension(fault: ImportError) -> ImportError:
    # Made here, not in the error tree: it exists only where nothing else of this module does.
    class MissingExtensionError(NativeError, ImportError):
        pass

    return MissingExtensionError(
        f"the native core cannot be imported ({fault})",
        remedy="build it with `pip install -e .` in kvoffload's source tree, or install a wheel made for this Python",
    )


try:
    from kvoffload import _native
except ImportError as _fault:
    raise _missing_extension(_fault) from _fault

HASH_ALGORITHM = "sha256"
"""The algorithm of hash_blocks and sha256; part of every identity, since other digests are other names."""

hash_blocks = _native.hash_blocks
sha256 = _native.sha256

NO_DIGEST = 0
"""No record has this digest."""

digest_record = _native.digest_record
digest_records = _native.digest_records
digest_slots = _native.digest_slots
digest_run = _native.digest_run
finish_digest = _native.finish_digest
finish_digests = _native.finish_digests
digest_path = _native.digest_path
read_bytes = _native.read_bytes

RecordEncoder = _native.RecordEncoder
BackgroundEncoder = _native.BackgroundEncoder
decode_record = _native.decode_record
codec_path = _native.codec_path

SealKeys = _native.SealKeys
SEAL_OVERHEAD_BYTES = _native.SEAL_OVERHEAD_BYTES

PlainFrames = _native.PlainFrames
ExpressServer = _native.ExpressServer
ExpressEnd = _native.ExpressEnd
open_express_end = _native.open_express_end
CALL_TIME_BOUNDS_NS = _native.CALL_TIME_BOUNDS_NS

Cache = _native.Cache
IndexReader = _native.IndexReader
PopulateProgress = _native.PopulateProgress
create_cache = _native.create_cache
adopt_cache = _native.adopt_cache
find_lock_owner = _native.find_lock_owner
is_memory_file = _native.is_memory_file
take_short_turns = _native.take_short_turns
accept_open = _native.accept_open
open_index_reader = _native.open_index_reader
SegmentMap = _native.SegmentMap
open_segment_map = _native.open_segment_map

RecordLink = _native.RecordLink
receive_resp_values = _native.receive_resp_values
seal_library = _native.seal_library
time_sealing = _native.time_sealing

DiskStore = _native.DiskStore
create_disk_store = _native.create_disk_store

CopyEngine = _native.CopyEngine
CudaCopyEngine = _native.CudaCopyEngine
StreamPoint = _native.StreamPoint
create_host_engine = _native.create_host_engine
create_cuda_engine = _native.create_cuda_engine
copy_bytes = _native.copy_bytes

CacheLoad = _native.CacheLoad
LineWalk = _native.LineWalk
TurnoverLoad = _native.TurnoverLoad
make_cache_load = _native.make_cache_load
make_sparse_load = _native.make_sparse_load
make_turnover_load = _native.make_turnover_load
measure_growth = _native.measure_growth
read_memory_headroom = _native.read_memory_headroom
memory_headroom_bytes = _native.memory_headroom_bytes
memory_total_bytes = _native.memory_total_bytes

ReplayTrace = _native.ReplayTrace
ReplayMemory = _native.ReplayMemory
ReplayPool = _native.ReplayPool
policy_names = _native.policy_names
replay_policy = _native.replay_policy
count_optimal_hits = _native.count_optimal_hits


@dataclass(frozen=True, kw_only=True)
class CudaDevice:
    name: str
    compute_capability: tuple[int, int]

    def __str__(self) -> str:
        major, minor = self.compute_capability
        return f"{self.name} (sm_{major}{minor})"


@dataclass(frozen=True, kw_only=True)
class HugePagePool:
    """Pages of one size that the machine has set aside."""

    page_bytes: int
    total: int
    free: int

    def __str__(self) -> str:
        return f"{format_size(self.page_bytes)} ({self.free} of {self.total} free)"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The abilities of this build and this machine. A problem is one line of text, empty where there is none."""

    architecture: str
    cpu_features: tuple[str, ...]
    sha256_path: str
    """The instructions that hashing uses: `sha_ni`, `armv8_sha2` or `portable`."""
    kernel_archs: tuple[str, ...]
    """Architectures of the embedded kernels, such as `sm_90` and `ptx_80`; empty if the build had no nvcc."""
    cuda_version: tuple[int, int] | None
    """Newest CUDA that the driver library knows; None where there is no driver library that we can use."""
    cuda_problem: str
    cuda_devices: tuple[CudaDevice, ...] | None
    """None: not probed, or not to be had (`cuda_problem` says why)."""
    io_uring_problem: str
    page_bytes: int
    huge_pages: tuple[HugePagePool, ...]
    transparent_huge_pages: str
    """The kernel's setting (`always`, `madvise`, `never`); empty where it has none."""
    transparent_huge_pages_in_shmem: str
    """The same for memfds, which our segments are."""
    numa_nodes: int

    @property
    def has_cuda_driver(self) -> bool:
        return self.cuda_version is not None

    @property
    def has_io_uring(self) -> bool:
        return not self.io_uring_problem

    def __str__(self) -> str:
        rows = {
            "processor": f"{self.architecture}: {_list(self.cpu_features)}",
            "hashing": f"{HASH_ALGORITHM} by {self.sha256_path} instructions",
            "kernels": _list(self.kernel_archs) if self.kernel_archs else "none, built without nvcc",
            "CUDA driver": self._describe_driver(),
            "CUDA devices": self._describe_devices(),
            "io_uring": "yes" if self.has_io_uring else f"no: {self.io_uring_problem}",
            "pages": format_size(self.page_bytes),
            "huge pages": _list(self.huge_pages),
            "transparent": f"{self.transparent_huge_pages or 'unknown'}, "
            f"in shared memory {self.transparent_huge_pages_in_shmem or 'unknown'}",
            "NUMA nodes": str(self.numa_nodes),
        }
        return "\n".join(f"{name:<14}{text}" for name, text in rows.items())

    def _describe_driver(self) -> str:
        if self.cuda_version is None:
            return f"none: {self.cuda_problem}"
        return "CUDA {}.{}".format(*self.cuda_version)

    def _describe_devices(self) -> str:
        if self.cuda_devices is not None:
            return _list(self.cuda_devices)
        return f"unknown: {self.cuda_problem}" if self.cuda_problem else "not probed"


def capabilities(*, probe_devices: bool = False) -> Capabilities:
    """Looks at the machine again. Takes a millisecond or so, more if devices are probed; the GIL is released.

    Without `probe_devices` CUDA is not initialised, so the process may still fork workers that use it. With it, cuInit
    is called (no context is made), and children forked afterwards cannot use CUDA.
    """
    found = _native.probe(probe_devices)
    version, devices = found["cuda_version"], found["cuda_devices"]
    return Capabilities(
        architecture=found["architecture"],
        cpu_features=found["cpu_features"],
        sha256_path=found["sha256_path"],
        kernel_archs=found["kernel_archs"],
        cuda_version=None if version is None else (version // 1000, version % 1000 // 10),
        cuda_problem=found["cuda_problem"],
        cuda_devices=None
        if devices is None
        else tuple(CudaDevice(name=name, compute_capability=(major, minor)) for name, major, minor in devices),
        io_uring_problem=found["io_uring_problem"],
        page_bytes=found["page_bytes"],
        huge_pages=tuple(
            HugePagePool(page_bytes=size, total=total, free=free) for size, total, free in found["huge_pages"]
        ),
        transparent_huge_pages=found["transparent_huge_pages"],
        transparent_huge_pages_in_shmem=found["transparent_huge_pages_in_shmem"],
        numa_nodes=found["numa_nodes"],
    )


def _list(items: tuple[object, ...]) -> str:
    return ", ".join(map(str, items)) or "none"
