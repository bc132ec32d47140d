"""Kernel, clock, nodes and devices, each made to fail."""

from __future__ import annotations

import pytest

from kvoffload.doctor.findings import Verdict
from kvoffload.doctor.machine import Machine
from kvoffload.doctor.machine_checks import check_machine
from kvoffload.native import CudaDevice
from tests.kit.doctor.machines import GOOD, able, like

OLD = CudaDevice(name="V100", compute_capability=(7, 0))


def test_a_good_machine_has_nothing_to_mend() -> None:
    found = {one.check: one for one in check_machine(GOOD)}
    assert {one.verdict for one in found.values()} == {Verdict.OK}
    assert found["GPU 0"].text == "H200 (sm_90)"


@pytest.mark.parametrize(
    ("machine", "check", "verdict", "text"),
    [
        (like(kernel=(5, 4)), "kernel", Verdict.FAIL, "5.4, and pidfd_getfd came with 5.6"),
        (able(io_uring_problem="switched off"), "io_uring", Verdict.WARN, "switched off"),
        (able(numa_nodes=2), "NUMA", Verdict.WARN, "2 nodes"),
        (like(is_clock_kept=False), "clock", Verdict.WARN, "nothing keeps it right"),
        (like(is_clock_kept=None), "clock", Verdict.WARN, "does not tell"),
        (able(cuda_version=None, cuda_problem="no libcuda"), "CUDA driver", Verdict.FAIL, "/dev/nvidia0 without"),
        (able(cuda_devices=None, cuda_problem="no permission"), "GPU", Verdict.FAIL, "no permission"),
        (able(cuda_devices=()), "GPU", Verdict.FAIL, "sees none"),
        (able(cuda_devices=(OLD,)), "GPU 0", Verdict.WARN, "V100 (sm_70) is too old"),
        (able(kernel_archs=()), "GPU 0", Verdict.WARN, "no kernels"),
    ],
)
def test_what_is_wrong_is_said(machine: Machine, check: str, verdict: Verdict, text: str) -> None:
    found = {one.check: one for one in check_machine(machine)}
    assert found[check].verdict is verdict
    assert text in found[check].text
    assert {one.verdict for name, one in found.items() if name != check} == {Verdict.OK}


@pytest.mark.parametrize(("archs", "text"), [(("sm_80", "sm_90"), "for sm_80, sm_90"), ((), "none in this build")])
def test_it_says_whether_the_build_has_kernels(archs: tuple[str, ...], text: str) -> None:
    [found] = [one for one in check_machine(able(kernel_archs=archs)) if one.check == "copy kernels"]
    assert (found.verdict, text in found.text) == (Verdict.OK, True)


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("turned off by sysctl kernel.io_uring_disabled=2", "sysctl -w kernel.io_uring_disabled=0"),
        ("not permitted here; container runtimes' default seccomp profiles forbid it", "seccomp=unconfined"),
        ("this kernel has no io_uring, or a sandbox (gVisor, seccomp) hides it", "CONFIG_IO_URING"),
        ("not enough locked memory (ulimit -l)", "ulimit -l unlimited"),
    ],
)
def test_io_uring_is_mended_by_its_cause(problem: str, remedy: str) -> None:
    [found] = [one for one in check_machine(able(io_uring_problem=problem)) if one.check == "io_uring"]
    assert remedy in found.remedy


def test_a_machine_without_gpu_is_well() -> None:
    from dataclasses import replace

    bare = replace(able(cuda_version=None, cuda_devices=None, cuda_problem="no libcuda"), nvidia_devices=())
    found = list(check_machine(bare))
    assert {one.verdict for one in found} == {Verdict.OK}
    assert "GPU" not in {one.check for one in found}
