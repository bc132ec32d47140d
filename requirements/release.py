"""Makes a release in one folder: `python -m requirements.release FOLDER`, in `make release`.

FOLDER gets the wheels, the source distribution, the Helm chart, the server's image, bills of materials, and SHA256SUMS
of them all. A line says what this machine cannot make. The same commit makes the same sdist and chart.
"""

from __future__ import annotations

import argparse
import gzip
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from requirements.wheels import (
    MACHINES,
    OLDEST_MINOR,
    ROOT,
    SUMS,
    Tools,
    WheelError,
    build_all,
    commit_time,
    find_pythons,
    run,
    write_sums,
)

CHART = ROOT / "examples/deploy/chart"
BILLS = ROOT / "build/sbom"
"""Where `make sbom` writes."""
CONTAINER = ROOT / "examples/deploy/Containerfile"
IMAGE_BUILDERS = ("podman", "docker")
SDIST = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"


def read_version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "kvoffload/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def pack_chart(folder: Path) -> Path:
    """Packs the chart as `helm package` does: its files below its name."""
    facts = dict(re.findall(r"^(name|version): (\S+)$", (CHART / "Chart.yaml").read_text(), re.MULTILINE))
    archive = folder / f"{facts['name']}-{facts['version']}.tgz"
    changed = int(commit_time())
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=changed) as packed,
        tarfile.open(fileobj=packed, mode="w") as entries,
    ):
        for file in sorted(file for file in CHART.rglob("*") if file.is_file()):
            entry = tarfile.TarInfo(f"{facts['name']}/{file.relative_to(CHART).as_posix()}")
            entry.size, entry.mtime, entry.mode = file.stat().st_size, changed, 0o644
            with file.open("rb") as content:
                entries.addfile(entry, content)
    return archive


def find_image_builder() -> str | None:
    """The first one whose service answers."""
    for name in IMAGE_BUILDERS:
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


def save_image(folder: Path, builder: str) -> Path:
    """Builds the server's image, and saves it as a file for `podman load` and `docker load`. WheelError."""
    name = f"kvoffload:{read_version()}"
    archive = folder / f"kvoffload-{read_version()}-image-{platform.machine()}.tar"
    run(builder, "build", "-f", CONTAINER, "-t", name, ROOT)
    run(builder, "save", "-o", archive, name)
    return archive


def copy_bills(folder: Path) -> list[Path]:
    return [Path(shutil.copy(bill, folder / f"sbom-{bill.name}")) for bill in sorted(BILLS.glob("*.cdx.json"))]


def add_rest(folder: Path) -> Iterator[str]:
    """Adds what is not built by Python's tools, and the digests; yields what it did, and what cannot be had."""
    yield pack_chart(folder).name
    bills = copy_bills(folder)
    yield ", ".join(bill.name for bill in bills) or "not to be had here: bills of materials (cyclonedx-bom)"
    builder = find_image_builder()
    yield save_image(folder, builder).name if builder else "not to be had here: the image (podman or docker that runs)"
    write_sums(folder)
    yield f"{SUMS}: what is in {folder}"


def make_release(folder: Path, *, has_kernels: bool, machines: Sequence[str]) -> Iterator[str]:
    """Makes all of it in a folder of its own. WheelError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield from build_all(folder, has_kernels=has_kernels, machines=machines)
    tools = Tools(find_pythons((OLDEST_MINOR,))[OLDEST_MINOR])
    told = tools.run(tools.folder / "bin/python", "-c", SDIST, folder, more={"SOURCE_DATE_EPOCH": commit_time()})
    yield told.split()[-1]
    yield from add_rest(folder)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", choices=("on", "off"), default="on", help="whether GPU kernels are in the wheels")
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=MACHINES, help="those that get wheels")
    options = parser.parse_args(words)
    try:
        for line in make_release(
            options.folder.absolute(), has_kernels=options.kernels == "on", machines=options.machines
        ):
            print(line, flush=True)
    except WheelError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
