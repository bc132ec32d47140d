"""The wheels of a release: what is built for which machine, with what, and what is done with it.

`make wheels` builds them, which takes minutes; here is what decides.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvoffload import __version__
from requirements import emulated_trial, wheels
from requirements.wheel_trial import Environment, TrialError
from requirements.wheels import MACHINES, STABLE_MINORS, Target, WheelError, find_pythons, list_pins, list_targets
from tests.house.tree import ROOT

RELEASE = ROOT / ".github/workflows/release.yml"


def test_each_machine_has_a_wheel_for_the_oldest_python_and_one_for_all_later_ones() -> None:
    assert [target.tags for target in list_targets((11, 13), has_kernels=True)] == [
        "1kernels-cp311-cp311-manylinux_2_28_x86_64",
        "1kernels-cp312-abi3-manylinux_2_28_x86_64",
        "1kernels-cp311-cp311-manylinux_2_28_aarch64",
        "1kernels-cp312-abi3-manylinux_2_28_aarch64",
    ]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["scikit-build"]["wheel"]["py-api"] == f"cp3{STABLE_MINORS[0]}"
    assert settings["project"]["requires-python"] == f">=3.{wheels.OLDEST_MINOR}"


def test_pip_takes_the_wheel_with_kernels_where_both_are() -> None:
    order = [int(re.match(r"\d+", wheels.BUILD_TAGS[has_kernels])[0]) for has_kernels in (False, True)]  # type: ignore[index]
    assert order == sorted(order)
    definitions = [Target(machine="x86_64", minor=12, has_kernels=one).definitions(Path("c")) for one in (False, True)]
    assert [one["KVOFFLOAD_CUDA"] for one in definitions] == ["OFF", "ON"]


def test_what_is_built_for_another_machine_is_called_so() -> None:
    target = Target(machine="aarch64", minor=11, has_kernels=True)
    assert target.environment() == {
        "_PYTHON_HOST_PLATFORM": "manylinux_2_28_aarch64",
        "SETUPTOOLS_EXT_SUFFIX": ".cpython-311-aarch64-linux-gnu.so",
    }
    definitions = target.definitions(Path("compilers"))
    assert definitions["CMAKE_SYSTEM_PROCESSOR"] == "aarch64"
    assert definitions["CMAKE_CXX_COMPILER"] == "compilers/c++-aarch64"


def test_compilers_link_for_the_glibc_that_the_name_promises(tmp_path: Path) -> None:
    zig = tmp_path / "a zig"
    zig.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    zig.chmod(0o755)
    folder = wheels.write_compilers(tmp_path / "compilers", zig)
    for machine in MACHINES:
        command = [folder / f"c++-{machine}", "-c", "a b.cpp"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert told == ["c++", "-O3", "-target", f"{machine}-linux-gnu.2.28", "-c", "a b.cpp"]


@pytest.mark.parametrize(
    "tag", ["manylinux_2_31_aarch64", "manylinux_3_1_aarch64", "manylinux_2_27_x86_64", "linux_aarch64"]
)
def test_a_wheel_that_needs_more_than_its_name_says_is_refused(tag: str) -> None:
    target = Target(machine="aarch64", minor=12, has_kernels=True)
    wheels.check_platform(target, 'a warning\n{"overall_tag": "manylinux_2_27_aarch64"}')
    with pytest.raises(WheelError, match=tag):
        wheels.check_platform(target, f'{{"overall_tag": "{tag}"}}')


def test_everything_that_builds_is_pinned_once() -> None:
    names = [line.split("==")[0] for pins in list_pins() for line in pins.splitlines() if "==" in line]
    assert len(names) == len(set(names))
    assert {"ziglang", "nanobind", "scikit-build-core", "auditwheel", "abi3audit", "nvidia-cuda-nvcc"} <= set(names)


def test_digests_are_as_sha256sum_checks_them(tmp_path: Path) -> None:
    for name in ("b.whl", "a.whl", "c.tar.gz"):
        (tmp_path / name).write_text(name)
    for _ in range(2):  # the file of a former run is no part of the next one
        wheels.write_sums(tmp_path)
    lines = (tmp_path / wheels.SUMS).read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["a.whl", "b.whl", "c.tar.gz"]
    check = ["sha256sum", "--check", "--strict", wheels.SUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / "a.whl").write_text("changed")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_pythons_that_are_here_are_found() -> None:
    minor = sys.version_info.minor
    found = find_pythons((minor,))
    if not found:
        pytest.skip(f"python3.{minor} has no headers here, or is not in PATH")
    asked = [found[minor], "-c", "import sys; print(sys.version_info.minor)"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == f"{minor}\n"


def test_what_fails_is_told_with_all_that_it_said() -> None:
    with pytest.raises(WheelError, match="failed:\nso it is"):
        wheels.run(sys.executable, "-c", "import sys; sys.exit('so it is')")


def test_without_a_python_that_is_needed_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheels, "find_pythons", lambda _: {11: Path(sys.executable)})
    assert wheels.main([str(tmp_path)]) == 1
    assert "one from 3.12 on" in capsys.readouterr().err


def test_a_trial_sees_what_does_not_end_as_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    environment = Environment(tmp_path / "environment")
    assert environment.run("python", "-c", "import os; print(os.environ.get('PYTHONPATH'))") == "None\n"
    with pytest.raises(TrialError, match="ended with 3"):
        environment.run("python", "-c", "raise SystemExit(3)", wanted=(0, 1))
    with pytest.raises(TrialError, match="No module named 'kvoffload'"):
        environment.run("python", "-c", "import kvoffload")


def test_a_python_for_another_machine_is_called_through_the_emulator(tmp_path: Path) -> None:
    emulator = tmp_path / "an emulator"
    qemu = emulator / "qemu/usr/bin/qemu-aarch64-static"
    qemu.parent.mkdir(parents=True)
    qemu.write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONHOME" "$PYTHONPATH" "$@"\n')
    qemu.chmod(0o755)
    python = emulated_trial.write_python(emulator, tmp_path / "some packages", tmp_path / "python")
    told = subprocess.run([python, "-c", "a b"], capture_output=True, text=True, check=True).stdout.splitlines()
    root = emulator / "root"
    called = ["-L", str(root), str(root / f"usr/bin/python3.{wheels.OLDEST_MINOR}"), "-c", "a b"]
    assert told == [str(root / "usr"), str(tmp_path / "some packages"), *called]


def test_without_an_emulator_a_wheel_for_another_machine_is_not_tried_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "TOOLS", tmp_path)
    monkeypatch.setattr(emulated_trial, "find_emulator", lambda folder: (folder / "made").is_file())
    assert "not tried here" in wheels.try_emulated(tmp_path / "a.whl")
    (tmp_path / "emulator").mkdir()
    (tmp_path / "emulator/made").touch()
    monkeypatch.setattr(emulated_trial.subprocess, "run", fail)
    with pytest.raises(WheelError, match="ended with 1:\nso it is"):
        wheels.try_emulated(tmp_path / "a.whl")


def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(command, 1, stdout="so it is", stderr="")


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(RELEASE.read_text())
    return read


def test_a_release_is_built_by_the_same_command_and_tried_on_both_machines(release: dict[str, Any]) -> None:
    jobs = release["jobs"]
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert any(step.startswith("make release") for step in steps)
    assert any("sha256sum --check SHA256SUMS" in step for step in steps)
    matrix = jobs["try"]["strategy"]["matrix"]
    assert len(matrix["machine"]) == len(MACHINES)
    assert {f"3.{wheels.OLDEST_MINOR}", f"3.{STABLE_MINORS[0]}", f"3.{STABLE_MINORS[-1]}"} == set(matrix["python"])
    assert (jobs["try"]["needs"], jobs["publish"]["needs"]) == ("build", "try")
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"


def test_a_release_is_refused_where_the_tag_is_of_another_version(release: dict[str, Any]) -> None:
    (step,) = [one for one in release["jobs"]["build"]["steps"] if "GITHUB_REF_NAME" in one.get("run", "")]
    for name, code in ((f"v{__version__}", 0), ("v9.9.9", 1)):
        environment = os.environ | {"GITHUB_REF_NAME": name}
        done = subprocess.run(["bash", "-ec", step["run"]], cwd=ROOT, env=environment, check=False)
        assert done.returncode == code
