"""What `examples/deploy` says is what our command line accepts, and its files agree with each other."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvoffload.cli.app import make_app
from kvoffload.cli.config import parse_assignments
from kvoffload.config import Settings, load_settings
from kvoffload.units import parse_size

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
UNIT = (DEPLOY / "kvoffload.service").read_text()
CONTAINER = (DEPLOY / "Containerfile").read_text()
GROUP = 10001
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")


def read_command(words: Sequence[str]) -> Settings:
    """The settings of a `kvoffload serve` as our command line takes it."""
    assert list(words[:2]) == ["kvoffload", "serve"]
    commands: Any = typer.main.get_command(make_app())
    context = commands.commands["serve"].make_context("serve", list(words[2:]))
    return load_settings(flags=parse_assignments(context.params["assignments"])).settings


def read_unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT)
    return parser["Service"]


def read_entry() -> tuple[list[str], list[str]]:
    """Of the container: what always runs, and its arguments unless others are given."""
    found = [re.findall(rf"^{name} (\[.*\])$", CONTAINER, re.M) for name in ("ENTRYPOINT", "CMD")]
    return json.loads(found[0][0]), json.loads(found[1][0])


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    documents = [one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if one]
    return {one["kind"]: one for one in documents}


def test_the_unit_runs_a_server_in_its_own_folder() -> None:
    unit = read_unit()
    settings = read_command(shlex.split(unit["ExecStart"]))
    assert settings.server == f"/run/{unit['RuntimeDirectory']}/server"
    assert settings.socket_mode == "0660"
    assert isinstance(settings.memory, int)
    assert parse_size(unit["MemoryMax"] + "iB") > settings.memory
    assert "PrivateUsers" not in unit
    assert "ProtectProc" not in unit


def read_drop_ins() -> dict[str, list[str]]:
    """By what needs them: lines for the unit, as docs/security.md tells them."""
    section = (DEPLOY.parents[1] / "docs/security.md").read_text().split("\n## As a service\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {what.strip(): re.findall(r"`([A-Z]\w+=[^`]+)`", lines) for what, lines in rows[1:]}


@needs_systemd
@pytest.mark.parametrize("what", ["", *read_drop_ins()])
def test_systemd_accepts_the_unit(tmp_path: Path, what: str) -> None:
    unit = tmp_path / "kvoffload.service"
    lines = "\n".join(["[Service]", *read_drop_ins().get(what, [])])
    unit.write_text(UNIT.replace("ExecStart=kvoffload ", f"ExecStart={sys.executable} ") + lines + "\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    said = [line for line in done.stderr.splitlines() if "kvoffload.service" in line]
    assert (said, done.returncode) == ([], 0)


def test_what_needs_lines_of_its_own_has_some() -> None:
    without = [what for what, lines in read_drop_ins().items() if not lines]
    assert without == ["`http` beyond loopback, `kvoffload web`"]


@needs_systemd
def test_the_unit_leaves_the_server_little_that_it_does_not_need(tmp_path: Path) -> None:
    """What stays is told in the unit. Tenths of what systemd rates from 0 to 10."""
    unit = tmp_path / "kvoffload.service"
    unit.write_text(UNIT)
    judged = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=10", str(unit)]
    done = subprocess.run(judged, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_container_runs_a_server() -> None:
    entry, command = read_entry()
    settings = read_command([*entry, *command])
    (folder,) = re.findall(rf"install -d -o {GROUP} -g {GROUP} -m 0750 (\S+)$", CONTAINER, re.M)
    assert Path(settings.server).parent == Path(folder)
    assert f"USER {GROUP}:{GROUP}" in CONTAINER
    # What the build needs is in the tree that is copied.
    assert "COPY . /source" in CONTAINER


def test_the_node_has_one_server_that_its_engines_reach(manifests: dict[str, dict[str, Any]]) -> None:
    node = manifests["DaemonSet"]["spec"]["template"]["spec"]
    engine = manifests["Pod"]["spec"]
    assert manifests["DaemonSet"]["spec"]["selector"]["matchLabels"].items() <= (
        manifests["DaemonSet"]["spec"]["template"]["metadata"]["labels"].items()
    )
    (server,) = node["containers"]
    settings = read_command([*read_entry()[0], *server["args"]])

    # The same folder of the node, in both, with the socket in it.
    folders = {pod["volumes"][0]["hostPath"]["path"] for pod in (node, engine)}
    mounts = [*node["initContainers"][0]["volumeMounts"], *server["volumeMounts"]]
    mounts += engine["containers"][0]["volumeMounts"]
    assert folders == {mount["mountPath"] for mount in mounts} == {str(Path(settings.server).parent)}
    (given,) = re.findall(r"--kv-transfer-config=(.*)", "\n".join(engine["containers"][0]["args"]))
    assert load_settings(engine=json.loads(given)["kv_connector_extra_config"]).settings.server == settings.server

    # The same group, by other users.
    assert (settings.socket_group, settings.socket_mode) == (str(GROUP), "0660")
    assert node["initContainers"][0]["command"] == f"install -d -o {GROUP} -g {GROUP} -m 0750 {folders.pop()}".split()
    assert server["securityContext"]["runAsGroup"] == GROUP
    assert engine["securityContext"]["supplementalGroups"] == [GROUP]
    assert engine["containers"][0]["securityContext"]["runAsUser"] != server["securityContext"]["runAsUser"]

    assert isinstance(settings.memory, int)
    assert parse_size(server["resources"]["limits"]["memory"] + "B") > settings.memory
    assert node["terminationGracePeriodSeconds"] == int(read_unit()["TimeoutStopSec"])
