"""Which of the machine's limits bind, for the memory and the files that the settings ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvoffload.doctor.findings import Finding, fail, ok, warn
from kvoffload.doctor.given import NOTHING, Given
from kvoffload.doctor.machine import NO_LIMIT, Machine
from kvoffload.server.channels.express_channels import MAX_CHANNELS
from kvoffload.server.common.thread_limit import RESERVE, leave_reserve
from kvoffload.units import GIB, MIB, describe_size

FILES_BESIDE_SEGMENTS = 512
"""Sessions, links, sockets, and what an interpreter has open."""
ENGINE_SHM_BYTES = GIB
"""Engines of more than one process pass tensors to each other in /dev/shm."""
_AS_MUCH = 0.95
"""Two numbers that were read a moment apart count as equal if their ratio is at least this."""
_THP = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The memory that the settings ask for."""

    memory_bytes: int
    segment_bytes: int

    @property
    def segments(self) -> int:
        return -(-self.memory_bytes // self.segment_bytes)


def check_limits(machine: Machine, wanted: Wanted, given: Given = NOTHING) -> Iterator[Finding]:
    yield check_memory(machine, wanted, given)
    yield check_commit(machine, wanted)
    yield check_file_size(machine, wanted)
    yield check_open_files(machine, wanted)
    yield check_threads(machine)
    yield check_address_space(machine, wanted)
    yield check_locked_memory(machine)
    yield check_shm(machine)
    yield check_huge_pages(machine)


def check_memory(machine: Machine, wanted: Wanted, given: Given) -> Finding:
    is_cgroup = machine.headroom_bytes < machine.available_bytes * _AS_MUCH
    binds = "a cgroup's limit" if is_cgroup else "the machine's memory"
    can_be_had = f"{describe_size(machine.headroom_bytes)} can be had, by {binds}"
    if wanted.memory_bytes > machine.headroom_bytes:
        less = max(machine.headroom_bytes // 2 // MIB, 64)
        return fail(
            "memory",
            f"{describe_size(wanted.memory_bytes)} are wanted, and {can_be_had}",
            given.change("memory", f"{less >> 10}GiB" if less >= 2048 else f"{less}MiB"),
        )
    return ok("memory", f"{describe_size(wanted.memory_bytes)} are wanted; {can_be_had}")


def check_commit(machine: Machine, wanted: Wanted) -> Finding:
    room = machine.commit_room_bytes
    if room is None:
        return ok("overcommit", "does not matter: the kernel does not count promised memory")
    if room < wanted.memory_bytes:
        return fail(
            "overcommit",
            f"vm.overcommit_memory is 2, and {describe_size(room)} may still be promised",
            "sysctl -w vm.overcommit_memory=0",
        )
    return ok("overcommit", f"vm.overcommit_memory is 2, with {describe_size(room)} left")


def check_file_size(machine: Machine, wanted: Wanted) -> Finding:
    limit = machine.limits["file size"]
    if limit != NO_LIMIT and limit < wanted.segment_bytes:
        return fail(
            "file size",
            f"files may have {describe_size(limit)} (RLIMIT_FSIZE), and a segment of memory is one of "
            f"{describe_size(wanted.segment_bytes)}",
            "ulimit -f unlimited",
        )
    return ok("file size", "does not bind")


def check_open_files(machine: Machine, wanted: Wanted) -> Finding:
    limit, needed = machine.limits["open files"], wanted.segments + FILES_BESIDE_SEGMENTS
    if limit != NO_LIMIT and limit < needed:
        return fail(
            "open files",
            f"{limit} (RLIMIT_NOFILE), and {wanted.segments} segments with sessions and links take up to {needed}",
            f"ulimit -n {needed}",
        )
    return ok("open files", f"{'no limit' if limit == NO_LIMIT else limit}, up to {needed} are used")


def check_threads(machine: Machine) -> Finding:
    limit = machine.limits["threads"]
    if limit == NO_LIMIT:
        return ok("threads", "no limit")
    channels = min(leave_reserve(limit), MAX_CHANNELS)
    text = f"{limit} (RLIMIT_NPROC, pids.max) leave room for {channels} processes of engines"
    if channels < MAX_CHANNELS:
        enough = MAX_CHANNELS + RESERVE
        return warn(
            "threads",
            f"{text}; without a limit there may be {MAX_CHANNELS}",
            f"ulimit -u {enough}; of a systemd unit: TasksMax={enough}; of a container: --pids-limit {enough}",
        )
    return ok("threads", text)


def check_address_space(machine: Machine, wanted: Wanted) -> Finding:
    limit, needed = machine.limits["address space"], wanted.memory_bytes + GIB
    if limit != NO_LIMIT and limit < needed:
        return fail(
            "address space",
            f"{describe_size(limit)} (RLIMIT_AS), and the pool is mapped as a whole: "
            f"{describe_size(needed)} with everything else",
            "ulimit -v unlimited",
        )
    return ok("address space", "does not bind")


def check_locked_memory(machine: Machine) -> Finding:
    limit = machine.limits["locked memory"]
    text = "no limit" if limit == NO_LIMIT else describe_size(limit)
    return ok(
        "locked memory", f"does not bind ({text}): NVIDIA's driver pins pages without it, and nothing else locks any"
    )


def check_shm(machine: Machine) -> Finding:
    if machine.shm_bytes < ENGINE_SHM_BYTES:
        return warn(
            "/dev/shm",
            f"{describe_size(machine.shm_bytes)}: enough for kvoffload, which does not use it, and little for an "
            "engine of more than one process",
            "mount -o remount,size=8g /dev/shm; of a container: docker run --shm-size=8g ...",
        )
    return ok("/dev/shm", f"{describe_size(machine.shm_bytes)}; the pool does not lie there")


def check_huge_pages(machine: Machine) -> Finding:
    found = machine.capabilities
    mode = found.transparent_huge_pages_in_shmem or "unknown"
    pools = [pool for pool in found.huge_pages if pool.total]
    set_aside = f", set aside: {', '.join(map(str, pools))}" if pools else ""
    if mode in ("never", "deny", "unknown") and not pools:
        return warn(
            "huge pages",
            f"none in shared memory ({mode}): copies of small pages miss the TLB more often",
            f"echo advise > {_THP}",
        )
    return ok("huge pages", f"{mode} in shared memory{set_aside}")
