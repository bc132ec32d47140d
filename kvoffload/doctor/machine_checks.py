"""The kernel, its clock and nodes, and the devices."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.doctor.findings import Finding, fail, ok, warn
from kvoffload.doctor.machine import Machine

OLDEST_KERNEL = (5, 6)
"""With pidfd_getfd, by which memory survives its server."""
OLDEST_DEVICE = (8, 0)
"""Oldest compute capability that the copy kernels are compiled for."""


_IO_URING_REMEDIES = {
    "io_uring_disabled": "sysctl -w kernel.io_uring_disabled=0",
    "seccomp profiles": "docker run --security-opt seccomp=unconfined ...",
    "has no io_uring": "boot a kernel with CONFIG_IO_URING, or leave the sandbox",
    "locked memory": "ulimit -l unlimited",
    "descriptor": "ulimit -n 65536",
}
"""Remedies by a part of the cause that the native core tells."""


def check_machine(machine: Machine) -> Iterator[Finding]:
    yield check_kernel(machine)
    yield check_io_uring(machine)
    yield check_numa(machine)
    yield check_clock(machine)
    yield check_driver(machine)
    yield check_kernels(machine)
    yield from check_devices(machine)


def check_kernel(machine: Machine) -> Finding:
    text = "{}.{}".format(*machine.kernel)
    if machine.kernel < OLDEST_KERNEL:
        return fail(
            "kernel", f"{text}, and pidfd_getfd came with {'{}.{}'.format(*OLDEST_KERNEL)}", "boot a newer kernel"
        )
    return ok("kernel", text)


def check_io_uring(machine: Machine) -> Finding:
    problem = machine.capabilities.io_uring_problem
    if problem:
        remedy = next((remedy for cause, remedy in _IO_URING_REMEDIES.items() if cause in problem), "uname -r")
        return warn("io_uring", f"{problem}: the disk tier uses threads instead", remedy)
    return ok("io_uring", "there")


def check_numa(machine: Machine) -> Finding:
    nodes = machine.capabilities.numa_nodes
    if nodes > 1:
        return warn(
            "NUMA",
            f"{nodes} nodes: memory of a node that is far from its GPU is slower",
            "numactl --cpunodebind=0 --membind=0 kvoffload serve ...",
        )
    return ok("NUMA", "one node")


def check_clock(machine: Machine) -> Finding:
    if machine.is_clock_kept is None:
        return warn("clock", "the kernel does not tell whether it is right", "timedatectl status")
    if not machine.is_clock_kept:
        return warn(
            "clock",
            "nothing keeps it right: minutes off, buckets and certificates are refused, and the servers of a fleet do "
            "not find each other",
            "timedatectl set-ntp true",
        )
    return ok("clock", "kept right")


def check_driver(machine: Machine) -> Finding:
    found = machine.capabilities
    if found.cuda_version is not None:
        return ok("CUDA driver", "CUDA {}.{}".format(*found.cuda_version))
    if machine.nvidia_devices:
        return fail(
            "CUDA driver",
            f"{', '.join(machine.nvidia_devices)} without a driver library: {found.cuda_problem}",
            "install NVIDIA's driver; in a container: docker run --gpus all ...",
        )
    return ok("CUDA driver", "none, and no NVIDIA device: only engines on the processor")


def check_kernels(machine: Machine) -> Finding:
    """Finds whether this build has copy kernels. Whether that matters, the GPUs' own checks say."""
    archs = machine.capabilities.kernel_archs
    return ok("copy kernels", f"in this build, for {', '.join(archs)}" if archs else "none in this build")


def check_devices(machine: Machine) -> Iterator[Finding]:
    found = machine.capabilities
    if found.cuda_version is None:
        return
    if not found.cuda_devices:
        yield fail("GPU", found.cuda_problem or "the driver sees none", "nvidia-smi")
        return
    for number, device in enumerate(found.cuda_devices):
        if not found.kernel_archs:
            yield warn(
                f"GPU {number}",
                f"{device}: this build has no kernels, so that small pages are copied one by one",
                "pip install --force-reinstall kvoffload",
            )
        elif device.compute_capability < OLDEST_DEVICE:
            yield warn(
                f"GPU {number}",
                f"{device} is too old for kvoffload's kernels: small pages are copied one by one",
                f"a GPU of compute capability {'{}.{}'.format(*OLDEST_DEVICE)} or newer",
            )
        else:
            yield ok(f"GPU {number}", str(device))
