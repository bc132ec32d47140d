"""What crosses between the processes: plain, frozen, the same after vLLM has sent it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import permutations
from multiprocessing.reduction import ForkingPickler

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvoffload.cache import GroupRule
from kvoffload.connector.step_plan import (
    BlockMove,
    GroupFacts,
    LoadJob,
    SaveJob,
    StepPlan,
    WorkerFacts,
    WorkerReport,
)
from kvoffload.kvspec import ReuseRule

PLAN = StepPlan(
    loads=(LoadJob("a", (BlockMove(0, 5, 9),)), LoadJob("b", (), is_doomed=True)),
    saves=(SaveJob(3, (BlockMove(1, 6, 10), BlockMove(0, 7, 11))),),
    drops=(1, 2),
)
REPORT = WorkerReport({3: 1, 4: 1}, frozenset({4}))
FACTS = WorkerFacts(
    fingerprint=b"f" * 32,
    description={"model": "acme/tiny", "hash_seed": b"s" * 32, "layers": {"a": ["bfloat16", "none"]}},
    groups=(
        GroupFacts(
            index=0,
            name="group 0",
            rule=GroupRule(block_size=4, reuse=ReuseRule.WINDOW, window=6),
            record_bytes=64,
        ),
    ),
    num_blocks=8,
)


@pytest.mark.parametrize("value", [PLAN, REPORT, FACTS, StepPlan(), WorkerReport()])
def test_survives_the_way_between_processes(value: object) -> None:
    assert ForkingPickler.loads(ForkingPickler.dumps(value)) == value


@pytest.mark.parametrize("value", [PLAN, REPORT, FACTS, PLAN.loads[0], PLAN.saves[0], FACTS.groups[0]])
def test_values_are_frozen(value: object) -> None:
    for name in vars(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)


def test_reports_add_up_in_any_order() -> None:
    reports = [WorkerReport({1: 1, 2: 1}), WorkerReport({2: 1}, frozenset({2})), WorkerReport(), WorkerReport({1: 1})]
    for one, *others in permutations(reports):
        total = one
        for other in others:
            total = total.aggregate(other)
        assert total == WorkerReport({1: 2, 2: 2}, frozenset({2}))


def test_aggregating_changes_neither_report() -> None:
    """vLLM uses the first worker's object as the accumulator, while the worker may still hold it."""
    one, other = WorkerReport({1: 1}, frozenset({1})), WorkerReport({1: 1, 2: 1})
    one.aggregate(other)
    assert one == WorkerReport({1: 1}, frozenset({1}))
    assert other == WorkerReport({1: 1, 2: 1})


def test_vllms_aggregator_adds_the_reports_of_all_ranks() -> None:
    reports = [WorkerReport({1: 1}), None, WorkerReport({1: 1, 2: 1}, frozenset({2}))]
    outputs = [
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(
                finished_recving={"a"}, failed_recving={"a"} if rank == 1 else set(), kv_connector_worker_meta=report
            ),
        )
        for rank, report in enumerate(reports)
    ]
    total = KVOutputAggregator(expected_finished_count=3).aggregate(outputs)  # type: ignore[arg-type]
    assert total is not None
    assert total.kv_connector_output is not None
    assert total.kv_connector_output.kv_connector_worker_meta == WorkerReport({1: 2, 2: 1}, frozenset({2}))
    assert total.kv_connector_output.finished_recving == {"a"}
    assert total.kv_connector_output.failed_recving == {"a"}
