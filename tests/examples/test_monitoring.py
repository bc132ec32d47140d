"""Rules and panels are what Prometheus understands, about metrics that there are: asked of a real one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from docs.panels import INTERVAL, PANEL_ROWS
from kvoffload.cli.web import MIN_TOKEN_LETTERS
from kvoffload.errors import ServerError
from kvoffload.metrics.catalog import CATALOG
from kvoffload.metrics.metric import Kind, Metric, Source
from kvoffload.server import DomainSettings, TenantSettings
from kvoffload.types import HASH_BYTES
from tests.examples.deploy import find_program
from tests.house.tree import ROOT
from tests.kit.cache.cache_model import make_chain
from tests.kit.cli.web_process import web
from tests.kit.free_ports import free_port
from tests.kit.server.tiers import await_that, disk_below, serving
from tests.kit.web.prompt_load import PromptLoad

FOLDER = ROOT / "examples/monitoring"
NAMES = {metric.name for metric in CATALOG}
OF_SERVER = [metric for metric in CATALOG if metric.source is not Source.ENGINE]
AFTER_A_MINUTE = ("kvoffload_memory_worth_", "kvoffload_memory_wanted_")
"""Less than a minute of requests does not tell what memory is worth; tests/unit/top/test_memory_worth.py passes it."""
AT_ONCE = [metric for metric in OF_SERVER if not metric.name.startswith(AFTER_A_MINUTE)]
EXPRESSIONS = [query.expression for row in PANEL_ROWS for panel in row.panels for query in panel.queries]


def sample_name(metric: Metric) -> str:
    """The name of a sample that the metric has as soon as there is any."""
    return f"{metric.name}_bucket" if metric.kind is Kind.HISTOGRAM else metric.name


@pytest.mark.parametrize(
    "words", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")], ids=["checked", "tested"]
)
def test_rules_are_right(words: tuple[str, ...]) -> None:
    done = subprocess.run([find_program("promtool"), *words], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tested() -> None:
    alerts = re.findall(r"- alert: (\w+)", (FOLDER / "alerts.yml").read_text())
    fired = set(re.findall(r"alertname: (\w+)\n +exp_alerts", (FOLDER / "alerts_test.yml").read_text()))
    assert len(alerts) >= 10
    assert fired == set(alerts)


def test_panels_and_alerts_are_about_metrics_and_labels_that_there_are() -> None:
    asked = [*EXPRESSIONS, (FOLDER / "alerts.yml").read_text()]
    suffixes = tuple(f"{metric.name}_bucket" for metric in CATALOG if metric.kind is Kind.HISTOGRAM)
    for text in asked:
        for name in re.findall(r"\bkvoffload_\w+", text):
            assert name in NAMES or name in suffixes, name
    labels = {label for metric in CATALOG for label in metric.labels} | {"le"}
    for text in EXPRESSIONS:
        for group in re.findall(r"(?:by|ignoring) \(([^)]*)\)", text):
            assert {label.strip() for label in group.split(",")} <= labels, text


def test_every_metric_of_a_server_is_shown_or_told() -> None:
    """But the few that only those need who look at the cache itself."""
    inner = {"kvoffload_compacted_bytes_total", "kvoffload_index_bytes", "kvoffload_lost_touches_total"}
    less = {
        "kvoffload_hint_retained_prefixes",
        "kvoffload_ledger_asked_tokens_total",
        "kvoffload_ledger_hit_tokens_total",
        "kvoffload_ledger_memory_byte_seconds_total",
        "kvoffload_ledger_read_bytes_total",
        "kvoffload_ledger_tier_read_bytes_total",
        "kvoffload_ledger_tier_written_bytes_total",
        "kvoffload_ledger_written_bytes_total",
        "kvoffload_memory_given_back_bytes_total",
        "kvoffload_memory_wanted_change_bytes",
        "kvoffload_memory_worth_error_seconds",
        "kvoffload_memory_worth_price_error",
        "kvoffload_memory_worth_window_seconds",
        "kvoffload_occupied_byte_seconds_total",
        "kvoffload_tenant_quota_bytes",
        "kvoffload_tier_coded_records_total",
        "kvoffload_tier_missing_blocks_total",
        "kvoffload_tier_promoted_blocks_total",
        "kvoffload_tier_waiting_requests",
    }
    asked = "\n".join([*EXPRESSIONS, (FOLDER / "alerts.yml").read_text()])
    missing = {metric.name for metric in OF_SERVER if not re.search(rf"\b{sample_name(metric)}\b", asked)}
    assert missing == inner | less


def test_the_dashboard_has_all_panels() -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert asked == EXPRESSIONS
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    covered = [
        (place["x"] + x, place["y"] + y) for place in places for x in range(place["w"]) for y in range(place["h"])
    ]
    assert len(covered) == len(set(covered)), "panels lie on one another"
    assert max(x for x, _ in covered) == 23


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """With the rules of the example, and asking that target often."""
    text = (FOLDER / "prometheus.yml").read_text()
    text = text.replace("127.0.0.1:9470", target).replace("scrape_interval: 5s", "scrape_interval: 250ms")
    (folder / "prometheus.yml").write_text(text.replace("evaluation_interval: 15s", "evaluation_interval: 250ms"))
    shutil.copy(FOLDER / "alerts.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    command = [find_program("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://{address}"
        finally:
            process.kill()


def ask(address: str, path: str, **words: str) -> Any:
    """Asks for a value. None: it is not there yet."""
    try:
        with urllib.request.urlopen(f"{address}{path}?{urllib.parse.urlencode(words)}", timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as fault:
        if fault.code == HTTPStatus.SERVICE_UNAVAILABLE:
            return None
        raise AssertionError(fault.read().decode()) from fault
    except (ConnectionError, urllib.error.URLError):
        return None


def find(address: str, expression: str) -> list[Any]:
    found = ask(address, "/api/v1/query", query=expression.replace(INTERVAL, "1m"))
    return [] if found is None else found["result"]


def hint(address: str, token: str, chain: bytes) -> None:
    """Retains a prefix that is never asked for again, and asks for an unknown action."""
    hashes = [chain[at : at + HASH_BYTES].hex() for at in range(0, len(chain), HASH_BYTES)]
    retain = {"action_type": "retain", "payload": {"hashes": hashes, "ttl_s": 1}}
    actions = [{"action_id": "a", "action_version": "1", **retain}]
    actions += [{"action_id": "b", "action_version": "1", "action_type": "dance", "payload": {}}]
    envelope = {"protocol_version": "1", "message_id": "1", "actions": actions}
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/hints", json.dumps(envelope).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        [retained, ignored] = json.load(answer)["actions"]
    assert [row["outcome"] for row in retained["identities"]] == ["done"]
    assert ignored["ignored"] == "unknown_action"


def test_a_real_prometheus_reads_a_real_server(tmp_path: Path) -> None:
    """One that has worked, and made a mistake: every metric has a sample."""
    path, folder, token = tmp_path / "s", tmp_path / "disk", tmp_path / "token"
    folder.mkdir(mode=0o700)
    token.write_text("x" * MIN_TOKEN_LETTERS)
    token.chmod(0o600)
    domain = DomainSettings(name="", tenants=(TenantSettings(name="a", quota_bytes=32 << 20),))
    with (
        serving(path, tiers={"": [disk_below(folder)]}, domains=(domain,)) as server,
        web(path, f"http_token_file={token}", "computing_price=4", "memory_price=0.01") as told,
        prometheus(tmp_path, told.removeprefix("http://")) as address,
    ):
        await_that(lambda: server.has_memory)
        load = PromptLoad(path, tenant="a")
        load.turn(conversations=1)
        load.await_told()
        await_that(lambda: find(address, "kvoffload_memory_hit_ratio"))
        load.turn(conversations=1)  # a hit
        hint(told, token.read_text(), make_chain(0, 3))
        with pytest.raises(ServerError):
            load.client.set_quota("nobody", 1 << 30)
        await_that(lambda: all(find(address, sample_name(metric)) for metric in AT_ONCE))
        kinds = ask(address, "/api/v1/metadata")
        for metric in AT_ONCE:
            # It asks for OpenMetrics, where a counter's family has no suffix.
            [kind] = kinds[metric.name.removesuffix("_total")]
            assert (kind["type"], kind["help"]) == (metric.kind.value, metric.help)
        for expression in EXPRESSIONS:
            find(address, expression)
        used = [one["value"][1] for one in find(address, "kvoffload_used_bytes / kvoffload_capacity_bytes")]
        assert len(used) == 2
        assert all(0 < float(share) <= 1 for share in used)
        await_that(lambda: len(ask(address, "/api/v1/rules")["groups"]) == 1)
        [group] = ask(address, "/api/v1/rules")["groups"]
        await_that(lambda: all(rule["health"] == "ok" for rule in ask(address, "/api/v1/rules")["groups"][0]["rules"]))
        firing = {rule["name"] for rule in group["rules"] if rule["state"] == "firing"}
        assert firing == set()
        load.close()
