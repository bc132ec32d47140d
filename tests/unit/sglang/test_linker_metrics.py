"""The metrics of a rank: what it counts, and that they are in the files that the engine's server reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, multiprocess

from kvoffload.metrics.engine_metrics import ENGINE_METRICS
from kvoffload.sglang.asked_prompts import TELL_AFTER_S
from kvoffload.sglang.linker_metrics import RECORDED, LinkerMetrics
from tests.kit.sglang.linked import Linked, link, make_keys
from tests.kit.sglang.pools import PAGE, MHATokenToKVPool, rows_of

KEYS = make_keys(3)
LABELS = {"model_name": "m", "tp_rank": "0"}
WITHOUT = """
import sys
from types import SimpleNamespace
from kvoffload.sglang.linker_metrics import open_metrics
assert open_metrics(SimpleNamespace(model_path="m", enable_metrics=False), rank=0) is None
assert open_metrics(SimpleNamespace(model_path="m"), rank=0) is None
print("prometheus_client" in sys.modules)
"""
WITH = """
from types import SimpleNamespace
from kvoffload.client import PromptNote
from kvoffload.sglang.linker_metrics import open_metrics
given = dict(model_path="/models/m", served_model_name="m", enable_metrics=True, extra_metric_labels={"zone": "a"})
for rank in (0, 1):
    metrics = open_metrics(SimpleNamespace(**given), rank=rank)
    if rank == 0:
        metrics.count_prompt(PromptNote(chain=b"", local=0, tokens=48, boundary=32, limit=48))
    metrics.count_load(4096, 0.002)
    metrics.set("kvoffload_server_up", 1)
"""


class Rank:
    """A rank with metrics in a registry of its own."""

    def __init__(self, *, number: int = 0) -> None:
        self.now_s = 0.0
        self.registry = CollectorRegistry()
        metrics = LinkerMetrics(LABELS, registry=self.registry)
        self.linked: Linked = link(MHATokenToKVPool(), metrics=metrics, clock=lambda: self.now_s, rank=number)
        self.record_bytes = self.linked.linker.settings.groups[0].record_bytes

    def read(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {**LABELS, **labels})

    def tell_prompts(self) -> None:
        self.now_s += TELL_AFTER_S
        self.linked.linker.begin_step()


def run(script: str, variables: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_without_the_flag_nothing_is_registered() -> None:
    assert run(WITHOUT, {}) == "False"


def test_the_metrics_of_all_ranks_are_in_the_folder_that_the_server_reads(tmp_path: Path) -> None:
    run(WITH, {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    found = {metric.name: metric.samples for metric in registry.collect()}
    assert {name.removesuffix("_total") for name in RECORDED} - found.keys() <= {
        # These have labels: the first event makes the sample.
        "kvoffload_dropped_saves",
        "kvoffload_faults",
    }
    labels = {"model_name": "m", "pp_rank": "0", "zone": "a"}
    loaded = {one.labels["tp_rank"]: one.value for one in found["kvoffload_loaded_bytes"]}
    assert loaded == {"0": 4096.0, "1": 4096.0}
    (hits,) = found["kvoffload_hits"]
    assert (hits.labels, hits.value) == ({**labels, "tp_rank": "0", "tier": "memory"}, 32.0)
    assert {one.labels["tp_rank"]: one.value for one in found["kvoffload_queries"]} == {"0": 48.0, "1": 0.0}
    assert [one.value for one in found["kvoffload_server_up"]] == [1.0, 1.0]


def test_each_recorded_metric_is_one_of_the_catalogue_for_engines() -> None:
    assert set(RECORDED) <= {metric.name for metric in ENGINE_METRICS}
    assert list(RECORDED) == sorted(RECORDED)


def test_restored_tokens_and_bytes_are_counted() -> None:
    rank = Rank()
    linker = rank.linked.linker
    assert rank.linked.save(KEYS[:2], rows_of(1, 2))
    assert rank.read("kvoffload_saved_bytes_total") == 2 * rank.record_bytes
    assert rank.read("kvoffload_save_seconds_count") == 1
    assert linker.lookup("r", KEYS) == [1, 2]
    assert rank.linked.load("r", KEYS[:2], rows_of(4, 5))
    assert rank.read("kvoffload_loaded_bytes_total") == 2 * rank.record_bytes
    assert rank.read("kvoffload_load_seconds_count") == 1
    assert rank.read("kvoffload_queries_total") == 3 * PAGE
    assert rank.read("kvoffload_hits_total", tier="memory") == 2 * PAGE
    assert rank.read("kvoffload_misses_total", reason="never_seen") == PAGE
    assert rank.read("kvoffload_failed_loads_total") == 0


def test_misses_have_their_reasons() -> None:
    rank = Rank()
    rank.linked.linker.lookup("unknown", KEYS)
    rank.linked.cache.is_served = False
    rank.linked.linker.lookup("without a server", KEYS[:1])
    rank.linked.cache.is_answering = False
    rank.linked.linker.lookup("without an answer", KEYS[:2])
    rank.tell_prompts()
    found = {reason: rank.read("kvoffload_misses_total", reason=reason) for reason in ("never_seen", "not_served")}
    assert found == {"never_seen": 3 * PAGE, "not_served": PAGE}
    assert rank.read("kvoffload_misses_total", reason="slow_to_answer") == 2 * PAGE


def test_it_is_told_whether_the_engine_is_served() -> None:
    rank = Rank()
    rank.linked.linker.begin_step()
    assert rank.read("kvoffload_server_up") == 1
    rank.linked.cache.is_served = False
    rank.linked.linker.begin_step()
    assert rank.read("kvoffload_server_up") == 0


def test_what_fails_is_counted() -> None:
    rank = Rank()
    linker, cache = rank.linked.linker, rank.linked.cache
    cache.slots_left = 1
    assert not rank.linked.save(KEYS, rows_of(1, 2, 3))
    assert rank.read("kvoffload_dropped_saves_total", reason="no_slot") == 2
    assert not rank.linked.load("never looked up", KEYS, rows_of(1, 2, 3))
    assert rank.read("kvoffload_failed_loads_total") == 1
    cache.slots_left, cache.is_mapped = 1, False
    assert not rank.linked.save(KEYS, rows_of(1, 2, 3))
    assert rank.read("kvoffload_failed_saves_total") == 1
    linker.note_fault("lookup", ValueError("no keys"))
    assert rank.read("kvoffload_faults_total", hook="lookup") == 1


def test_of_several_ranks_one_counts_the_prompts() -> None:
    first, second = Rank(), Rank(number=1)
    for rank in (first, second):
        rank.linked.linker.lookup("r", KEYS)
        rank.tell_prompts()
    assert (len(first.linked.cache.told), first.read("kvoffload_queries_total")) == (1, 3 * PAGE)
    assert (len(second.linked.cache.told), second.read("kvoffload_queries_total")) == (0, 0)
