"""One wheel imports everywhere: of the sdist, built without nvcc it works without that copy path, and links no CUDA.

Where there are Pythons that get a wheel of the stable ABI, the oldest builds it and the newest serves from it. That for
Python 3.11 is built by the set-up.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from requirements.wheels import STABLE_MINORS, find_pythons
from tests.house.tree import ROOT

pytestmark = pytest.mark.campaign

SDIST = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
SCRIPT = """
import importlib.util, sys
import kvoffload, kvoffload.native as native
assert kvoffload.__file__.startswith(sys.prefix), kvoffload.__file__
print(native.capabilities().kernel_archs, native.sha256(b"").hex(), importlib.util.find_spec("torch"))
"""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
BUILDERS = ("nanobind", "scikit-build-core")
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def run(*command: object, cwd: Path) -> str:
    """Runs a command, and returns what it prints."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path, "PYTHONPATH": ""}
    )
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


@pytest.fixture(scope="module")
def pythons() -> list[Path]:
    """The Pythons from 3.12 on, the oldest first; where there is none, this Python is the only one."""
    return list(find_pythons(STABLE_MINORS).values()) or [Path(sys.executable)]


@pytest.fixture(scope="module")
def wheel(pythons: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of these Pythons builds it from the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-c", SDIST, folder, cwd=ROOT)
    (sdist,) = folder.glob("kvoffload-*.tar.gz")
    run(pythons[0], "-m", "venv", "--without-pip", folder / "build", cwd=folder)
    pip = [*PIP, "--python", folder / "build/bin/python"]
    pins = [line for line in (ROOT / "requirements/engine.txt").read_text().splitlines() if line.startswith(BUILDERS)]
    run(*pip, "install", "--quiet", *pins, cwd=folder)
    build = ["wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder]
    run(*pip, *build, "--config-settings=cmake.define.KVOFFLOAD_CUDA=OFF", sdist, cwd=folder)
    (wheel,) = folder.glob("kvoffload-*.whl")
    return wheel


def install(wheel: Path, python: Path, folder: Path) -> Path:
    """An environment with nothing but the wheel and what it depends on."""
    run(python, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    run(*PIP, "--python", folder / "bin/python", "install", "--quiet", wheel, cwd=wheel.parent)
    return folder


@pytest.fixture(scope="module")
def clean(wheel: Path, pythons: list[Path]) -> Path:
    return install(wheel, pythons[-1], wheel.parent / "clean")


def test_a_wheel_of_the_stable_abi_is_for_all_newer_pythons(wheel: Path, pythons: list[Path]) -> None:
    if len(pythons) < 2:
        pytest.skip("no two of python3.12, 3.13 and 3.14 are installed")
    assert "-cp312-abi3-" in wheel.name
    for number, python in enumerate(pythons[:-1]):
        folder = install(wheel, python, wheel.parent / f"older-{number}")
        assert run(folder / "bin/python", "-c", SCRIPT, cwd=folder) == f"() {EMPTY_SHA256} None\n"


def test_it_imports_and_works_without_kernels_and_without_torch(clean: Path) -> None:
    assert run(clean / "bin/python", "-c", SCRIPT, cwd=clean) == f"() {EMPTY_SHA256} None\n"


def test_a_server_of_the_wheel_is_served_and_looked_at(clean: Path) -> None:
    command, socket = clean / "bin/kvoffload", f"server={clean / 's'}"
    words = [command, "serve", "--set", socket, "--set", "memory=64MiB", "--set", "segment_size=64MiB"]
    with subprocess.Popen(words, cwd=clean, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("kvoffload serves 64MiB")
            row = json.loads(run(command, "top", "--once", "--json", "--set", socket, cwd=clean))
            assert row["memory"]["capacity_bytes"] == 64 << 20
            [observer] = run(command, "inspect", "sessions", "--json", "--set", socket, cwd=clean).splitlines()
            assert json.loads(observer)["role"] == "observer"
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_it_links_neither_cuda_nor_torch_nor_liburing(clean: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    (extension,) = clean.glob("lib/python*/site-packages/kvoffload/_native*.so")
    listed = run("readelf", "-d", extension, cwd=clean)
    needed = [line.rpartition("[")[2].rstrip("]") for line in listed.splitlines() if "(NEEDED)" in line]
    assert needed
    assert [
        name for name in needed if name.startswith(("libcuda", "libtorch", "libc10", "liburing", "libpython"))
    ] == []


def test_the_installed_entry_point_is_declared(clean: Path) -> None:
    (info,) = clean.glob("lib/python*/site-packages/kvoffload-*.dist-info")
    assert "kvoffload = kvoffload.connector.plugin:register" in (info / "entry_points.txt").read_text()
