"""One wheel imports everywhere: built without nvcc it works without that copy path, and it links nothing of CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.house.tree import ROOT

SCRIPT = """
import sys, kvoffload, kvoffload.native as native
assert kvoffload.__file__.startswith(sys.argv[1]), kvoffload.__file__
seen = native.capabilities()
print(seen.kernel_archs, native.sha256(b"").hex(), "torch" in sys.modules)
"""
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as installed from a wheel that was built where nvcc is not to be used."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation"]
    command += ["--no-deps", "--no-index", "--config-settings=cmake.define.KVOFFLOAD_CUDA=OFF"]
    command += [f"--config-settings=build-dir={folder / 'build'}", "--target", str(folder / "site"), str(ROOT)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "site"


def test_it_imports_and_works_without_kernels(site: Path) -> None:
    # Without site, so that the tree's own editable install stays out of it.
    python_path = os.pathsep.join([str(site), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    command = [sys.executable, "-S", "-P", "-c", SCRIPT, str(site)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": python_path}, cwd=site
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"() {EMPTY_SHA256} False"


def test_it_links_neither_cuda_nor_torch_nor_liburing(site: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    (extension,) = (site / "kvoffload").glob("_native*.so")
    listed = subprocess.run(["readelf", "-d", str(extension)], capture_output=True, text=True, check=True).stdout
    needed = [line.rpartition("[")[2].rstrip("]") for line in listed.splitlines() if "(NEEDED)" in line]
    assert needed
    assert [
        name for name in needed if name.startswith(("libcuda", "libtorch", "libc10", "liburing", "libpython"))
    ] == []


def test_the_installed_entry_point_is_declared(site: Path) -> None:
    (info,) = site.glob("kvoffload-*.dist-info")
    assert "kvoffload = kvoffload.connector.plugin:register" in (info / "entry_points.txt").read_text()
