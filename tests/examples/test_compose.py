"""The services of `compose.yaml` find each other: commands, sockets, addresses and the files that they mount."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.deploy import DEPLOY, GROUP, read_command, read_engine_command, read_entry

FOLDER = DEPLOY / "compose"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """Returns the file with defaults in the place of variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (FOLDER / "compose.yaml").read_text())
    read: dict[str, Any] = yaml.safe_load(text)
    return read


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def targets_of(file: Path) -> set[str]:
    jobs = yaml.safe_load(file.read_text())["scrape_configs"]
    return {target for job in jobs for one in job["static_configs"] for target in one["targets"]}


def test_engine_and_page_reach_the_server(services: dict[str, dict[str, Any]]) -> None:
    settings = read_command([*read_entry()[0], *services["server"]["command"]])
    web = services["web"]
    assert read_command([*web["entrypoint"], *web["command"]], name="web").server == settings.server
    assert read_engine_command(services["engine"]["command"]).server == settings.server
    folder = settings.server.rpartition("/")[0]
    for name in ("server", "web", "engine"):
        assert services[name]["volumes"][0].startswith(f"socket:{folder}")
    assert settings.socket_mode == "0660"
    assert services["engine"]["group_add"] == [str(GROUP)]
    assert services["server"]["healthcheck"]["test"][-1] == f"server={settings.server}"


def test_what_is_built_and_mounted_is_there(compose: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        if "build" in service:
            context = FOLDER / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()
            assert (context / "pyproject.toml").is_file()
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (FOLDER / source).is_file() if source.startswith(".") else source in compose["volumes"]


def test_prometheus_asks_services_at_the_ports_that_they_have(services: dict[str, dict[str, Any]]) -> None:
    targets = targets_of(FOLDER / "prometheus.yml")
    for target in targets:
        name, port = target.split(":")
        assert f"127.0.0.1:{port}:{port}" in services[name]["ports"]
    assert len(targets) == len(targets_of(DEPLOY.parent / "monitoring/prometheus.yml"))


def test_prometheus_has_the_same_rules_and_jobs_as_without_containers() -> None:
    ours, theirs = (
        yaml.safe_load(file.read_text())
        for file in (FOLDER / "prometheus.yml", DEPLOY.parent / "monitoring/prometheus.yml")
    )
    for one in (ours, theirs):
        for job in one["scrape_configs"]:
            del job["static_configs"]
    assert ours == theirs


def test_grafana_finds_the_dashboard_and_prometheus(services: dict[str, dict[str, Any]]) -> None:
    grafana = services["grafana"]
    mounted = dict(volume.split(":")[1::-1] for volume in grafana["volumes"])
    folder = grafana["environment"]["GF_PATHS_PROVISIONING"]
    (source,) = yaml.safe_load((FOLDER / mounted[f"{folder}/datasources/prometheus.yaml"]).read_text())["datasources"]
    port = source["url"].rpartition(":")[2]
    assert source["url"] == f"http://prometheus:{port}"
    assert f"127.0.0.1:{port}:{port}" in services["prometheus"]["ports"]
    (provider,) = yaml.safe_load((FOLDER / mounted[f"{folder}/dashboards/kvoffload.yaml"]).read_text())["providers"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    panels = json.loads((FOLDER / mounted[home]).read_text())["panels"]
    assert panels
    # Its panels ask whatever is of the data source's type.
    assert {panel["datasource"]["type"] for panel in panels if "datasource" in panel} == {source["type"]}


def test_only_this_machine_reaches_them(services: dict[str, dict[str, Any]]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_outer_images_have_versions(services: dict[str, dict[str, Any]]) -> None:
    outer = [service["image"] for service in services.values() if "build" not in service]
    assert all(re.search(r":v?\d+\.\d+", image) for image in outer)
