"""Builds a release's wheels and checks them: `python -m requirements.wheels FOLDER`, in `make wheels`.

There are two for each machine: one for Python 3.11, and one of the stable ABI for every later Python. zig's compiler
links them for glibc 2.28, whatever glibc and whatever machine build them. auditwheel says whether that holds, abi3audit
whether the stable ABI does; then those for this machine are installed and tried. FOLDER/SHA256SUMS has the digests.

It needs Python 3.11 and one from 3.12 on, each with its headers, and a g++ that nvcc can preprocess with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from requirements import emulated_trial

ROOT = Path(__file__).parents[1]
BUILDERS = ("cmake", "nanobind", "ninja", "scikit-build-core")
"""Pinned for the tests' own build, too."""
TOOLS = ROOT / ".venv-wheels"
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"
OLDEST_MINOR = 11
STABLE_MINORS = (12, 13, 14)
"""A Python of any of these builds the wheel for all of them."""
BUILD_TAGS = {True: "1kernels", False: "0plain"}
"""In the wheel's name, by whether it has the kernels: of two that fit, pip takes the greater."""
SUMS = "SHA256SUMS"
_ASK_VERSION = """
import os, sys, sysconfig
os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))
print(sys.version_info.minor)
"""


class WheelError(Exception):
    """A wheel cannot be built here, or is not what it should be."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One wheel: for a machine, built by a Python, with kernels or without."""

    machine: str
    minor: int
    has_kernels: bool

    @property
    def platform(self) -> str:
        return f"manylinux_{GLIBC.replace('.', '_')}_{self.machine}"

    @property
    def tag(self) -> str:
        """Which Pythons it is for, and which platform."""
        abi = "cp311-cp311" if self.minor == OLDEST_MINOR else f"cp{STABLE_MINORS[0] + 300}-abi3"
        return f"{abi}-{self.platform}"

    @property
    def tags(self) -> str:
        """The part of its name behind the version."""
        return f"{BUILD_TAGS[self.has_kernels]}-{self.tag}"

    def environment(self) -> dict[str, str]:
        """Returns variables with which a Python of this machine builds for another one."""
        suffix = f".cpython-3{self.minor}-{self.machine}-linux-gnu.so"
        return {"_PYTHON_HOST_PLATFORM": self.platform, "SETUPTOOLS_EXT_SUFFIX": suffix}

    def definitions(self, compilers: Path) -> dict[str, str]:
        """For CMake. `compilers`: the folder that `write_compilers` wrote."""
        return {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": self.machine,
            "CMAKE_CXX_COMPILER": str(compilers / f"c++-{self.machine}"),
            "CMAKE_AR": str(compilers / "ar"),
            "CMAKE_RANLIB": str(compilers / "ranlib"),
            "KVOFFLOAD_CUDA": "ON" if self.has_kernels else "OFF",
            "KVOFFLOAD_NVCC_CXX": "g++",
        }


def list_targets(minors: Sequence[int], *, has_kernels: bool, machines: Sequence[str] = MACHINES) -> list[Target]:
    return [Target(machine=machine, minor=minor, has_kernels=has_kernels) for machine in machines for minor in minors]


def find_pythons(minors: Sequence[int]) -> dict[int, Path]:
    """Those of Python 3's minor versions that are here, in PATH or under pyenv, with the headers to build for them."""
    named = [shutil.which(f"python3.{minor}") for minor in minors]
    kept = [path for minor in minors for path in sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/*/python3"))]
    found: dict[int, Path] = {}
    for python in [*map(Path, filter(None, named)), *kept]:
        done = subprocess.run([python, "-c", _ASK_VERSION], capture_output=True, text=True, check=False)
        if done.returncode == 0:  # one of pyenv's in PATH may be switched off, one of the system's without headers
            found.setdefault(int(done.stdout), python)
    return dict(sorted(found.items()))


def write_compilers(folder: Path, zig: Path) -> Path:
    """Writes commands of the names that CMake expects: it takes a path, and zig's compiler is a word behind zig's.

    zig makes its C++ library for each level of optimization that it is asked for; CMake's own trials name none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    commands = {f"c++-{machine}": f"c++ -O3 -target {machine}-linux-gnu.{GLIBC}" for machine in MACHINES}
    for name, words in {**commands, "ar": "ar", "ranlib": "ranlib"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{zig}" {words} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def list_pins() -> tuple[str, str]:
    """Lines of requirements files: what builds a wheel in its Python, and what compiles and checks it."""
    engine, wheels = ((ROOT / f"requirements/{name}.txt").read_text() for name in ("engine", "wheels"))
    builders = [line for line in engine.splitlines(keepends=True) if line.startswith(BUILDERS)]
    return "".join(builders), wheels


def install(python: Path, folder: Path, pins: str) -> Path:
    """An environment with these pins. Does nothing where they are installed already."""
    named, installed = folder / "pins.txt", folder / "installed"
    if not (installed.is_file() and named.read_text() == pins):
        run(python, "-m", "venv", "--clear", folder)
        named.write_text(pins)
        run(folder / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", named)
        installed.touch()
    return folder


class Tools:
    """The environment of the oldest Python: it compiles and checks all wheels, and builds its own."""

    def __init__(self, python: Path) -> None:
        builders, tools = list_pins()
        self.folder = install(python, TOOLS / f"3.{OLDEST_MINOR}", builders + tools)
        packages = self.folder / f"lib/python3.{OLDEST_MINOR}/site-packages"
        self.compilers = write_compilers(TOOLS / "compilers", packages / "ziglang/zig")
        self._cuda = packages / "nvidia/cu13"
        """Where nvcc and its headers are."""

    def run(self, *command: object, more: Mapping[str, str] | None = None) -> str:
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        return run(*command, environment={**(more or {}), "PATH": path, "CUDA_HOME": str(self._cuda)})


def run(*command: object, environment: Mapping[str, str] | None = None) -> str:
    """Runs a command, and returns its output. WheelError: it has failed; the error has the output."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise WheelError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-8000:]}")
    return done.stdout


def build(target: Target, python: Path, tools: Tools, folder: Path) -> Path:
    """Builds one wheel with an environment's Python and gives it its name.

    WheelError: auditwheel says that it needs more than its platform has.
    """
    # Both Pythons use the same objects of the core. What CMake remembers of the other Python has to go, and what the
    # build backend does, which would remove the objects, too.
    objects = ROOT / f"build/wheels/{target.machine}-{BUILD_TAGS[target.has_kernels]}"
    for name in ("CMakeCache.txt", ".skbuild-info.json"):
        (objects / name).unlink(missing_ok=True)
    settings = {"build-dir": str(objects), "wheel.build-tag": BUILD_TAGS[target.has_kernels]}
    if target.minor == OLDEST_MINOR:
        # The build backend finds no ABI of its own for a platform that this machine is not.
        settings["wheel.tags"] = target.tag
    settings |= {f"cmake.define.{name}": value for name, value in target.definitions(tools.compilers).items()}
    words = [f"--config-settings={name}={value}" for name, value in settings.items()]
    pip = (python, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-build-isolation", "--no-deps")
    tools.run(*pip, "-w", folder, *words, ROOT, more=target.environment() | {"SOURCE_DATE_EPOCH": commit_time()})
    (wheel,) = folder.glob(f"*-{target.tags}.whl")
    check_platform(target, tools.run("auditwheel", "show", "--json", wheel))
    if "-abi3-" in wheel.name:
        tools.run("abi3audit", "--strict", wheel)
    return wheel


def check_platform(target: Target, told: str) -> None:
    """`told`: what auditwheel prints, JSON after any warnings. WheelError: the wheel needs more than its name says."""
    tag = json.loads(told[told.index("{") :])["overall_tag"]
    found = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{target.machine}", tag)
    if found is None or (int(found[1]), int(found[2])) > tuple(map(int, GLIBC.split("."))):
        raise WheelError(f"a wheel for {target.platform} needs {tag}, says auditwheel")


def commit_time() -> str:
    """Seconds of Unix time: the same commit makes wheels of the same date. Outside git it is that of the settings."""
    asked = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or str(int((ROOT / "pyproject.toml").stat().st_mtime))


def write_sums(folder: Path) -> None:
    """Writes a file of digests of all files of the folder, which `sha256sum --check` reads."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != SUMS)
    (folder / SUMS).write_text("".join(f"{_digest(file)}  {file.name}\n" for file in files))


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def build_all(folder: Path, *, has_kernels: bool, machines: Sequence[str] = MACHINES) -> Iterator[str]:
    """Builds, checks and tries the wheels of these machines; yields what it did. WheelError."""
    pythons = find_pythons((OLDEST_MINOR, *STABLE_MINORS))
    stable = next((minor for minor in pythons if minor != OLDEST_MINOR), None)
    if OLDEST_MINOR not in pythons or stable is None:
        raise WheelError("Python 3.11 and one from 3.12 on are needed, with their headers")
    folder.mkdir(parents=True, exist_ok=True)
    tools = Tools(pythons[OLDEST_MINOR])
    newer = install(pythons[stable], TOOLS / f"3.{stable}", list_pins()[0])
    builders = {OLDEST_MINOR: tools.folder / "bin/python", stable: newer / "bin/python"}
    for target in list_targets((OLDEST_MINOR, stable), has_kernels=has_kernels, machines=machines):
        wheel = build(target, builders[target.minor], tools, folder)
        yield f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, needs glibc {GLIBC} at most"
        if target.machine == platform.machine():
            yield run(pythons[target.minor], "-m", "requirements.wheel_trial", wheel).rstrip()
        elif (target.machine, target.minor) == (emulated_trial.MACHINE, emulated_trial.MINOR):
            yield try_emulated(wheel)
        else:
            yield f"  not tried here: this machine is of another kind, {platform.machine()}"


def try_emulated(wheel: Path) -> str:
    """Tries a wheel for another machine, and returns a line about it. WheelError: it does not work."""
    if not emulated_trial.find_emulator(TOOLS / "emulator"):
        return "  not tried here, because there is no emulator of its machine (qemu-user-static of Debian 12)"
    try:
        return emulated_trial.try_emulated(wheel, TOOLS / "emulator")
    except emulated_trial.TrialError as fault:
        raise WheelError(str(fault)) from fault


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", choices=("on", "off"), default="on", help="whether GPU kernels are in the wheels")
    options = parser.parse_args(words)
    try:
        for line in build_all(options.folder.absolute(), has_kernels=options.kernels == "on"):
            print(line, flush=True)
        write_sums(options.folder)
        print(f"{SUMS}: what is in {options.folder}")
    except WheelError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
