"""The Helm chart: what Helm makes of it is what Kubernetes takes, and what our command line accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from kvoffload import __version__
from kvoffload.units import parse_size
from tests.examples.deploy import DEPLOY, GROUP, KUBERNETES, read_command, read_engine_command, read_entry

CHART = DEPLOY / "chart"
ALL = {
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-node-critical",
    "imagePullSecrets": [{"name": "registry"}],
    "disk": {"hostPath": "/disk0/kvoffload", "size": "2TiB"},
    "secretName": "kvoffload",
    "settings": {"valkey": "valkey://10.0.0.9:6379", "valkey_password_file": "/secrets/password"},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "web": {"service": {"annotations": {"a": "b"}}},
    "engine": {"enabled": True, "securityContext": {"runAsUser": 2000}},
}
"""Values that make everything there is."""


@pytest.fixture(scope="module")
def helm() -> Any:
    return pytest.importorskip("helm_python", reason="Helm (helm-python-sdk) could not be had by make setup")


def render(helm: Any, values: Mapping[str, Any], *, name: str = "test") -> dict[str, dict[str, Any]]:
    """Renders the chart, by kind; an engine is its Deployment."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(dict(values), name=name, namespace="default").values()
    return {one["kind"]: one for text in texts for one in yaml.safe_load_all(text) if one}


def pod_of(one: Mapping[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = one["spec"]["template"]["spec"]
    return pod


def test_helm_finds_nothing_wrong(helm: Any) -> None:
    for values in ({}, ALL):
        report = helm.lint(CHART, values, strict=True)
        assert report["errors"] == []
        assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


def test_it_is_of_our_version(helm: Any) -> None:
    facts = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (facts["version"], facts["appVersion"]) == (__version__, __version__)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", [{}, ALL], ids=["default", "all"])
def test_kubernetes_takes_what_it_makes(helm: Any, values: Mapping[str, Any], version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="Kubernetes' schemas could not be had by make setup")
    made = render(helm, values)
    for kind, one in made.items():
        if kind != "PodMonitor":  # of Prometheus' operator
            schemas.validate(one, version, strict=True)
    if not values:
        one["spec"]["sort"] = 1
        with pytest.raises(schemas.ValidationError):
            schemas.validate(one, version, strict=True)


def test_by_default_it_is_a_server_and_its_page_on_each_node(helm: Any) -> None:
    assert set(render(helm, {})) == {"DaemonSet", "Service"}
    assert set(render(helm, {"web": {"enabled": False}})) == {"DaemonSet"}
    assert set(render(helm, ALL)) == {"DaemonSet", "Service", "PodMonitor", "Deployment"}


def test_two_releases_have_names_of_their_own(helm: Any) -> None:
    names = [
        {one["metadata"]["name"] for one in render(helm, ALL, name=name).values()} for name in ("a", "kvoffload-b")
    ]
    assert names[0] & names[1] == set()
    assert all("kvoffload-kvoffload" not in name for one in names for name in one)


def test_the_node_has_one_server_that_its_engines_reach(helm: Any) -> None:
    made = render(helm, ALL)
    node, engine = pod_of(made["DaemonSet"]), pod_of(made["Deployment"])
    server = node["containers"][0]
    settings = read_command([*read_entry()[0], *server["args"]])
    assert read_engine_command(engine["containers"][0]["args"]).server == settings.server

    # The same folder of the node, in all of them, with the socket in it.
    folder = settings.server.rpartition("/")[0]
    containers = [*node["initContainers"], *node["containers"], *engine["containers"]]
    mounts = [mount for one in containers for mount in one["volumeMounts"] if mount["name"] == "socket"]
    assert [mount["mountPath"] for mount in mounts] == [folder] * len(containers)
    volumes = [one for pod in (node, engine) for one in pod["volumes"] if one["name"] == "socket"]
    assert [one["hostPath"]["path"] for one in volumes] == [folder] * 2

    # The same group, by other users.
    assert (settings.socket_group, settings.socket_mode) == (str(GROUP), "0660")
    assert f"install -d -o {GROUP} -g {GROUP} -m 0750 {folder}" in node["initContainers"][0]["command"][-1]
    assert server["securityContext"]["runAsGroup"] == GROUP
    assert engine["securityContext"]["supplementalGroups"] == [GROUP]
    assert engine["containers"][0]["securityContext"]["runAsUser"] != server["securityContext"]["runAsUser"]

    # Nodes with a server are those with an engine.
    assert (node["nodeSelector"], node["tolerations"]) == (engine["nodeSelector"], engine["tolerations"])


def test_sizes_and_tiers_come_from_values(helm: Any) -> None:
    node = pod_of(render(helm, ALL)["DaemonSet"])
    settings = read_command([*read_entry()[0], *node["containers"][0]["args"]])
    assert (settings.disk, settings.disk_size) == ("/disk", parse_size("2TiB"))
    assert (settings.valkey, settings.valkey_password_file) == ("valkey://10.0.0.9:6379/0", "/secrets/password")
    mounts = {mount["mountPath"] for mount in node["containers"][0]["volumeMounts"]}
    assert {"/disk", "/secrets"} <= mounts

    default = pod_of(render(helm, {})["DaemonSet"])["containers"][0]
    memory = read_command([*read_entry()[0], *default["args"]]).memory
    assert isinstance(memory, int)
    assert parse_size(default["resources"]["limits"]["memory"] + "B") > memory


@pytest.mark.parametrize("size", ["64MiB", "64GiB", "256GiB", "1.5TiB"])
def test_the_pods_memory_follows_from_the_pools(helm: Any, size: str) -> None:
    server = pod_of(render(helm, {"memory": size})["DaemonSet"])["containers"][0]
    pool, limit = parse_size(size), parse_size(server["resources"]["limits"]["memory"] + "B")
    assert pool + pool // 30 < limit <= pool + max(pool // 8, 1 << 30)
    assert server["resources"]["requests"] == {"cpu": "1", "memory": server["resources"]["limits"]["memory"]}


@pytest.mark.parametrize("values", [{}, {"handOverSeconds": 0}, {"handOverSeconds": 600}])
def test_a_server_that_is_stopped_has_time_to_hand_over(helm: Any, values: dict[str, Any]) -> None:
    node = pod_of(render(helm, values)["DaemonSet"])
    settings = read_command([*read_entry()[0], *node["containers"][0]["args"]])
    assert settings.hand_over == values.get("handOverSeconds", 20)
    assert node["terminationGracePeriodSeconds"] == settings.hand_over + 40


def test_a_memory_limit_that_is_given_is_the_pods(helm: Any) -> None:
    values = {"memory": "64GiB", "resources": {"limits": {"memory": "100G"}}}
    server = pod_of(render(helm, values)["DaemonSet"])["containers"][0]
    assert server["resources"]["limits"]["memory"] == server["resources"]["requests"]["memory"] == "100G"


def test_probes_ask_the_server_itself(helm: Any) -> None:
    server, web = pod_of(render(helm, {})["DaemonSet"])["containers"]
    settings = read_command([*read_entry()[0], *server["args"]])
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        words = server[name]["exec"]["command"]
        assert words[:4] == ["kvoffload", "top", "--once", "--json"]
        assert words[-1] == f"server={settings.server}"
    assert read_command([*web["command"], *web["args"]], name="web").server == settings.server
    assert [web[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe")] == ["/readyz", "/healthz"]


def test_what_watches_finds_the_pods_and_their_port(helm: Any) -> None:
    made = render(helm, ALL)
    labels = made["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert made["DaemonSet"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert made["Service"]["spec"]["selector"].items() <= labels.items()
    assert made["PodMonitor"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    engine_labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert not made["Service"]["spec"]["selector"].items() <= engine_labels.items()
    (port,) = pod_of(made["DaemonSet"])["containers"][1]["ports"]
    assert made["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert made["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"] == port["name"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"memory": "64G"}, "memory"),
        ({"memroy": "64GiB"}, "memroy"),
        ({"disk": {"hostPath": "relative"}}, "hostPath"),
        ({"settings": {"remote_connections": 8}}, "remote_connections"),
        ({"memory": "256GiB", "resources": {"limits": {"memory": "72Gi"}}}, "resources.limits.memory 72Gi does not"),
        ({"podMonitor": {"enabled": True}, "web": {"enabled": False}}, "needs web.enabled"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Any, values: dict[str, Any], told: str) -> None:
    with pytest.raises(helm.HelmError, match=told):
        render(helm, values)
