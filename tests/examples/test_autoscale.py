"""The examples for autoscalers: Kubernetes takes them, both scale the same, and the rule says how much is wanted."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from kvoffload.metrics.catalog import find_metric
from kvoffload.units import GIB, parse_size
from tests.examples.deploy import DEPLOY, KUBERNETES, find_program

FOLDER = DEPLOY / "autoscale"
WANTED = "kvoffload:memory_nodes_wanted:bytes"


def read(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return read


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", ["hpa.yaml", "memory-nodes.yaml"])
def test_kubernetes_takes_them(name: str, version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="Kubernetes' schemas could not be had by make setup")
    schemas.validate(read(name), version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
def test_keda_makes_an_autoscaler_of_it_that_kubernetes_takes(version: str) -> None:
    """KEDA's own schema is not there. What it hands on to Kubernetes has Kubernetes' schema."""
    schemas = pytest.importorskip("kubernetes_validate", reason="Kubernetes' schemas could not be had by make setup")
    scaled = read("scaled-object.yaml")
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = scaled["spec"]
    assert spec.keys() == {
        *("scaleTargetRef", "pollingInterval", "minReplicaCount", "maxReplicaCount", "advanced", "triggers")
    }
    (trigger,) = spec["triggers"]
    assert trigger.keys() == {"type", "metricType", "metadata"}
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    target = {"type": trigger["metricType"], "averageValue": trigger["metadata"]["threshold"]}
    made = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": scaled["metadata"],
        "spec": {
            "scaleTargetRef": spec["scaleTargetRef"],
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            "metrics": [{"type": "External", "external": {"metric": {"name": "s0-prometheus"}, "target": target}}],
            **spec["advanced"]["horizontalPodAutoscalerConfig"],
        },
    }
    schemas.validate(made, version, strict=True)


def test_both_scale_the_same_nodes_by_the_same_rule() -> None:
    nodes, hpa, scaled = read("memory-nodes.yaml"), read("hpa.yaml")["spec"], read("scaled-object.yaml")["spec"]
    target = {"apiVersion": nodes["apiVersion"], "kind": nodes["kind"], "name": nodes["metadata"]["name"]}
    assert hpa["scaleTargetRef"] == scaled["scaleTargetRef"] == target
    assert "replicas" not in nodes["spec"]
    metadata = scaled["triggers"][0]["metadata"]
    assert metadata["query"] == WANTED
    average = hpa["metrics"][0]["external"]["target"]["averageValue"]
    assert int(metadata["threshold"]) == parse_size(f"{average}B") == 256 * GIB
    name = hpa["metrics"][0]["external"]["metric"]["name"]
    assert f"name: {{as: {name}}}" in (FOLDER / "hpa.yaml").read_text()
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (scaled["minReplicaCount"], scaled["maxReplicaCount"])
    assert hpa["behavior"] == scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


def test_one_pod_holds_each_node() -> None:
    template = read("memory-nodes.yaml")["spec"]["template"]
    (rule,) = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"] == template["metadata"]["labels"]


def test_the_rule_asks_metrics_that_there_are() -> None:
    rules = read("rules.yml")["groups"][0]["rules"]
    assert [rule["record"] for rule in rules] == ["kvoffload:memory_nodes:bytes", WANTED]
    for name in re.findall(r"kvoffload_\w+", " ".join(rule["expr"] for rule in rules)):
        find_metric(name)


def test_the_rule_wants_as_much_as_pays_and_waits_a_day_after_a_change() -> None:
    command = [find_program("promtool"), "test", "rules", "rules_test.yml"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
