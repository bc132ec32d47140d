"""Our command line accepts the commands of `examples/deploy`, whose files agree with each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.units import parse_size
from tests.examples.deploy import CONTAINER, DEPLOY, GROUP, read_command, read_entry

UNITS = sorted(file.name for file in DEPLOY.glob("*.service"))
DROP_INS = sorted((DEPLOY / "kvoffload.service.d").glob("*.conf"))
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")


def read_unit(text: str = (DEPLOY / "kvoffload.service").read_text()) -> dict[str, list[str]]:
    """The lines of its service by their names, in order: a name may come again."""
    found: dict[str, list[str]] = {}
    for line in text.partition("[Service]")[2].partition("[Install]")[0].splitlines():
        name, is_set, value = line.partition("=")
        if is_set and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_runs_a_server_in_its_own_folder() -> None:
    unit = read_unit()
    settings = read_command(shlex.split(unit["ExecStart"][0]))
    assert [settings.server] == [f"/run/{folder}/server" for folder in unit["RuntimeDirectory"]]
    assert settings.socket_mode == "0660"
    assert isinstance(settings.memory, int)
    assert parse_size(unit["MemoryMax"][0] + "iB") > settings.memory
    assert "PrivateUsers" not in unit
    assert "ProtectProc" not in unit


def read_drop_ins() -> dict[str, list[str]]:
    """Returns lines for the unit by what needs them, as docs/security.md tells them."""
    section = (DEPLOY.parents[1] / "docs/security.md").read_text().split("\n## As a service\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {what.strip(): re.findall(r"`([A-Z]\w+=[^`]+)`", lines) for what, lines in rows[1:]}


def verify(folder: Path, name: str, *drop_ins: str) -> None:
    """systemd itself finds no fault in the unit, alone and with each of these drop-ins."""
    unit = folder / name
    unit.write_text((DEPLOY / name).read_text().replace("ExecStart=kvoffload ", f"ExecStart={sys.executable} "))
    (folder / f"{name}.d").mkdir()
    for number, text in enumerate(drop_ins):
        (folder / f"{name}.d/{number}.conf").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if name in line]
    assert (said, done.returncode) == ([], 0)


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(tmp_path: Path, name: str) -> None:
    verify(tmp_path, name)


@needs_systemd
@pytest.mark.parametrize("what", read_drop_ins())
def test_systemd_accepts_the_unit_with_the_lines_that_a_tier_needs(tmp_path: Path, what: str) -> None:
    verify(tmp_path, "kvoffload.service", "\n".join(["[Service]", *read_drop_ins()[what]]))


@needs_systemd
@pytest.mark.parametrize(
    "files", [[file] for file in DROP_INS] + [DROP_INS], ids=lambda files: "+".join(f.stem for f in files)
)
def test_systemd_accepts_the_unit_with_drop_ins(tmp_path: Path, files: list[Path]) -> None:
    verify(tmp_path, "kvoffload.service", *(file.read_text() for file in files))


@needs_systemd
def test_systemd_refuses_a_drop_in_with_a_wrong_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Unknown key"):
        verify(tmp_path, "kvoffload.service", "[Service]\nStateDirectoryMod=0700\n")


def test_drop_ins_have_the_lines_that_the_documents_tell() -> None:
    told = {what: lines for what, lines in read_drop_ins().items() if what == "disk" or what.startswith("Valkey")}
    for file, lines in zip(DROP_INS, told.values(), strict=True):
        text = file.read_text().splitlines()
        assert [line for line in lines if line not in text and not line.startswith("ReadWritePaths")] == []


def test_drop_ins_set_what_the_server_takes() -> None:
    words = shlex.split(read_unit()["ExecStart"][0])
    lines = [line for file in DROP_INS for line in read_unit(file.read_text())["Environment"]]
    environment = dict(line.replace("%S", "/run/kvoffload/state").split("=", 1) for line in lines)
    settings = read_command(words, environment=environment)
    assert (settings.disk, settings.disk_size) == ("/run/kvoffload/state/kvoffload", parse_size("500GiB"))
    assert settings.valkey == "valkey://10.0.0.9:6379/0"


def test_the_page_is_of_the_server_of_the_unit() -> None:
    web = read_unit((DEPLOY / "kvoffload-web.service").read_text())
    settings = read_command(shlex.split(web["ExecStart"][0]), name="web")
    assert settings.server == read_command(shlex.split(read_unit()["ExecStart"][0])).server
    assert web["User"] == read_unit()["User"]


def test_what_needs_lines_of_its_own_has_some() -> None:
    without = [what for what, lines in read_drop_ins().items() if not lines]
    assert without == ["`http` beyond loopback, `kvoffload web`"]


@needs_systemd
def test_the_unit_leaves_the_server_little_that_it_does_not_need(tmp_path: Path) -> None:
    """The unit explains the rights that the server keeps. Figures are tenths of systemd's rating from 0 to 10."""
    unit = tmp_path / "kvoffload.service"
    unit.write_text((DEPLOY / "kvoffload.service").read_text())
    judged = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=10", str(unit)]
    done = subprocess.run(judged, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_container_runs_a_server() -> None:
    entry, command = read_entry()
    settings = read_command([*entry, *command])
    (folder,) = re.findall(rf"install -d -o {GROUP} -g {GROUP} -m 0750 (\S+)$", CONTAINER, re.M)
    assert Path(settings.server).parent == Path(folder)
    assert f"USER {GROUP}:{GROUP}" in CONTAINER
    # The tree that is copied has everything that the build needs.
    assert "COPY . /source" in CONTAINER


def test_the_container_has_a_libcrypto_that_uses_what_processors_have() -> None:
    """Debian 13 has 3.5, and Debian 12 3.0; what is built in one image runs in the other."""
    assert re.findall(r"^FROM (\S+)", CONTAINER, re.M) == ["docker.io/library/python:3.12-slim-trixie"] * 2


def test_the_container_of_an_engine_has_the_wheels_of_make_wheels() -> None:
    text = (DEPLOY / "Containerfile.engine").read_text()
    assert "source=dist," in text
    ignored = (DEPLOY.parents[1] / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "build"} <= set(ignored)
    assert not {"dist", "native", "kvoffload", "requirements"} & set(ignored)
    (version,) = re.findall(r"^ARG VLLM=v(\S+)$", text, re.M)
    assert f"| {version} |" in (DEPLOY.parents[1] / "docs/versions.md").read_text()
