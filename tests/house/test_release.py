"""`make release` fills one folder. In the campaign a release is installed from there as docs/upgrading.md says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from kvoffload import __version__
from requirements import release
from requirements.wheel_trial import Environment, try_installed
from requirements.wheels import SUMS
from tests.house.tree import ROOT

FOLDER = ROOT / "build/release"
PLAYED = """#!/bin/sh
echo "$@" >> "$0.log"
case "$1" in info) exit {code} ;; save) echo image > "$3" ;; esac
"""
"""A builder of images that builds nothing; its service answers if the code is 0."""


def read_page() -> str:
    """Returns the commands of docs/upgrading.md that install a release."""
    section = (ROOT / "docs/upgrading.md").read_text().split("\n## A release\n")[1]
    return section.split("```\n")[1]


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that stands first in PATH: podman is there and does not run, docker does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, code in (("podman", 1), ("docker", 0)):
        (folder / name).write_text(PLAYED.format(code=code))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_the_chart_is_packed_as_helm_reads_it(tmp_path: Path) -> None:
    archive = release.pack_chart(tmp_path)
    assert archive.name == f"kvoffload-{__version__}.tgz"
    with tarfile.open(archive) as entries:
        packed = {entry.name.removeprefix("kvoffload/") for entry in entries}
    assert packed == {file.relative_to(release.CHART).as_posix() for file in release.CHART.rglob("*") if file.is_file()}
    bytes_before = archive.read_bytes()
    assert release.pack_chart(tmp_path).read_bytes() == bytes_before
    helm = pytest.importorskip("helm_python", reason="Helm (helm-python-sdk) could not be had by make setup")
    with helm.Chart.load(archive) as chart:
        assert (chart.name, chart.version) == ("kvoffload", __version__)
        assert len(chart.render({}, name="test", namespace="default")) > 1


def test_every_file_has_a_digest_and_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builders: Path
) -> None:
    monkeypatch.setattr(release, "BILLS", tmp_path / "none")
    (builders / "docker").write_text(PLAYED.format(code=1))
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "a.whl").write_text("a")
    chart, bills, image, sums = release.add_rest(folder)
    assert bills.startswith("not to be had here: bills of materials")
    assert image.startswith("not to be had here: the image")
    assert sums.startswith(SUMS)
    listed = [line.split("  ")[1] for line in (folder / SUMS).read_text().splitlines()]
    assert listed == ["a.whl", chart]


def test_bills_and_image_are_in_it_where_they_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builders: Path
) -> None:
    bill = tmp_path / "bills/engine.cdx.json"
    bill.parent.mkdir()
    bill.write_text("{}")
    monkeypatch.setattr(release, "BILLS", bill.parent)
    folder = tmp_path / "release"
    folder.mkdir()
    _, bills, image, _ = release.add_rest(folder)
    assert bills == "sbom-engine.cdx.json"
    assert re.fullmatch(rf"kvoffload-{__version__}-image-\w+\.tar", image)
    assert (folder / image).read_text() == "image\n"
    build, save = (builders / "docker.log").read_text().splitlines()[1:]
    assert build == f"build -f {ROOT / 'examples/deploy/Containerfile'} -t kvoffload:{__version__} {ROOT}"
    assert save == f"save -o {folder / image} kvoffload:{__version__}"


@pytest.mark.campaign
def test_it_is_installed_as_the_page_says_and_serves(tmp_path: Path) -> None:
    if not (FOLDER / SUMS).is_file():
        pytest.skip("there is no release in build/release: make release has not run")
    copy = shutil.copytree(FOLDER, tmp_path / "release")
    environment = Environment(tmp_path / "environment")
    told = environment.run_script(read_page(), copy)
    assert told.count(": OK\n") == len(list(FOLDER.iterdir())) - 1
    assert "kernels: " in try_installed(environment)
    names = {file.name for file in FOLDER.iterdir()}
    assert {f"kvoffload-{__version__}.tgz", f"kvoffload-{__version__}.tar.gz", SUMS} < names
    with tarfile.open(FOLDER / f"kvoffload-{__version__}.tar.gz") as sdist:
        inside = {entry.name.partition("/")[2] for entry in sdist}
    assert {"pyproject.toml", "native/CMakeLists.txt", "kvoffload/__init__.py", "LICENSE"} < inside
    (copy / next(name for name in names if name.endswith(".whl"))).write_bytes(b"damaged")
    check = ["sha256sum", "--check", "--status", SUMS]
    assert subprocess.run(check, cwd=copy, check=False).returncode == 1
