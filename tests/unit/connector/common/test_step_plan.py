"""Values that cross between the processes: plain, frozen, the same after vLLM has sent them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from itertools import permutations
from multiprocessing.reduction import ForkingPickler

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvoffload.cache import GroupRule
from kvoffload.connector.common.orders import NodeOrders, NodeReport, NodeState
from kvoffload.connector.common.step_plan import (
    BlockMoves,
    GroupFacts,
    LoadJob,
    Place,
    SaveJob,
    StepPlan,
    WantedDigests,
    WeightDigests,
    WorkerFacts,
    WorkerReport,
    store_apart,
)
from kvoffload.kvspec import ReuseRule

PLACE = Place(7, 1 << 16)


def moves(*blocks: int) -> BlockMoves:
    count = len(blocks)
    return BlockMoves(np.arange(count), np.array(blocks, np.int64), np.arange(count, dtype=np.uint64) << np.uint64(40))


WANTED = WantedDigests(b"h" * 64, np.array([[1, 2**64 - 1], [3, 4]], np.uint64))
PLAN = StepPlan(
    loads=(LoadJob("a", PLACE, moves(5, 9), WANTED), LoadJob("b", PLACE, moves())),
    saves=(SaveJob(3, PLACE, moves(6, 7), np.array([1, 0], np.uint8), np.array([True, False])),),
    doomed=("c",),
    retired=(6,),
    apart=((1, 0),),
)
REPORT = WorkerReport(
    {3: 1, 4: 1}, frozenset({4}), {3: {0: b"d" * 16}}, {0: (PLACE,)}, {"a": 0.5}, 7, {0: (3, b"w" * 32)}
)
FACTS = WorkerFacts(
    rank=1,
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
    cache_bytes=1024,
    places=(PLACE,),
    weights=WeightDigests(b"n" * 32, b"p" * 32),
)


@pytest.mark.parametrize("value", [REPORT, FACTS, StepPlan(), WorkerReport()])
def test_survives_the_way_between_processes(value: object) -> None:
    assert ForkingPickler.loads(ForkingPickler.dumps(value)) == value


def test_plans_survive_the_way_between_processes() -> None:
    arrived = ForkingPickler.loads(ForkingPickler.dumps(PLAN))
    assert isinstance(arrived, StepPlan)
    assert (arrived.doomed, arrived.retired, arrived.apart) == (PLAN.doomed, PLAN.retired, PLAN.apart)
    jobs: list[LoadJob | SaveJob] = [*PLAN.loads, *PLAN.saves]
    others: list[LoadJob | SaveJob] = [*arrived.loads, *arrived.saves]
    for job, other in zip(jobs, others, strict=True):
        assert (type(job), job.place) == (type(other), other.place)
        for name in ("groups", "blocks", "addresses"):
            one, another = getattr(job.moves, name), getattr(other.moves, name)
            assert one.dtype == another.dtype
            assert np.array_equal(one, another)
    assert [load.request_id for load in arrived.loads] == ["a", "b"]
    (save,) = arrived.saves
    assert save.job == 3
    assert save.writers is not None
    assert save.compared is not None
    assert (save.writers.tolist(), save.compared.tolist()) == ([1, 0], [True, False])
    wanted = arrived.loads[0].wanted
    assert wanted is not None
    assert wanted.hashes == WANTED.hashes
    assert np.array_equal(wanted.digests, WANTED.digests)
    assert arrived.loads[1].wanted is None


@pytest.mark.parametrize("part", ["loads", "saves", "doomed", "retired", "apart"])
def test_a_plan_with_anything_in_it_is_not_empty(part: str) -> None:
    assert StepPlan().is_empty
    assert not StepPlan(**{part: getattr(PLAN, part)}).is_empty


def test_some_moves_of_a_job_are_chosen_in_their_order() -> None:
    chosen = moves(5, 6, 7).choose(np.array([True, False, True]))
    assert chosen.blocks.tolist() == [5, 7]
    assert (chosen.groups.tolist(), chosen.addresses.tolist()) == ([0, 2], [0, 2 << 40])


def test_groups_that_are_stored_apart_have_no_equal_ranks() -> None:
    (group,) = FACTS.groups
    groups = [replace(group, index=index, stage=stage, replicas=4) for index in range(2) for stage in range(2)]
    apart = store_apart(groups, {(1, 0)})
    assert [one.replicas for one in apart] == [4, 4, 1, 4]
    assert [replace(one, replicas=4) for one in apart] == groups


def test_a_report_is_empty_if_nothing_ended_and_no_place_is_news() -> None:
    assert WorkerReport().is_empty
    assert not WorkerReport({1: 1}).is_empty
    assert not WorkerReport(places={0: ()}).is_empty
    assert not WorkerReport(copied_s={"a": 0.5}).is_empty
    assert not WorkerReport(step=1).is_empty
    assert not WorkerReport(weights={0: (1, b"")}).is_empty


def test_a_plan_that_only_counts_its_step_gives_nobody_work() -> None:
    assert StepPlan(step=3).is_empty


@pytest.mark.parametrize("value", [PLAN, REPORT, FACTS, PLAN.loads[0], PLAN.saves[0], FACTS.groups[0]])
def test_values_are_frozen(value: object) -> None:
    for name in vars(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)


def test_reports_add_up_in_any_order() -> None:
    reports = [
        WorkerReport({1: 1, 2: 1}, digests={1: {0: b"a"}, 2: {0: b"c"}}, places={0: ()}),
        WorkerReport({2: 1}, frozenset({2}), copied_s={"a": 0.5, "b": 1.0}),
        WorkerReport(places={1: (PLACE,)}, step=5),
        WorkerReport({1: 1}, digests={1: {1: b"b"}}, copied_s={"a": 2.0, "c": 0.25}, step=5),
    ]
    for one, *others in permutations(reports):
        total = one
        for other in others:
            total = total.aggregate(other)
        assert total == WorkerReport(
            {1: 2, 2: 2},
            frozenset({2}),
            {1: {0: b"a", 1: b"b"}, 2: {0: b"c"}},
            {0: (), 1: (PLACE,)},
            {"a": 2.0, "b": 1.0, "c": 0.25},
            5,
        )


def test_aggregating_changes_neither_report() -> None:
    """vLLM uses the first worker's object as the accumulator, while the worker may still hold it."""
    one = WorkerReport({1: 1}, frozenset({1}), {1: {0: b"a"}}, {0: ()})
    other = WorkerReport({1: 1, 2: 1}, digests={1: {1: b"b"}}, places={1: (PLACE,)})
    one.aggregate(other)
    assert one == WorkerReport({1: 1}, frozenset({1}), {1: {0: b"a"}}, {0: ()})
    assert other == WorkerReport({1: 1, 2: 1}, digests={1: {1: b"b"}}, places={1: (PLACE,)})


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


# ---- several machines ----


def test_a_node_takes_its_own_part_of_a_job() -> None:
    addresses = np.array([[64, 640], [128, 1280]], np.uint64)
    both = BlockMoves(np.arange(2), np.array([5, 9]), addresses)
    places = (PLACE, Place(8, 2))
    load = LoadJob("a", Place(1, 0), both, WANTED, places).take_node(1, slice(1, 2))
    writers, compared = np.array([1, 0], np.uint8), np.array([True, False])
    save = SaveJob(3, Place(1, 0), both, writers, compared, places).take_node(0)
    assert (load.request_id, load.place, load.places) == ("a", Place(8, 2), ())
    assert load.moves.addresses.tolist() == [640, 1280]
    assert load.wanted is not None
    assert load.wanted.digests.tolist() == [[3, 4]]
    assert (save.job, save.place, save.places, save.moves.addresses.tolist()) == (3, PLACE, (), [64, 128])
    assert save.writers is writers
    assert save.compared is compared
    assert LoadJob("a", Place(1, 0), both, None, places).take_node(0, slice(0, 1)).wanted is None


def test_what_nodes_say_adds_up() -> None:
    one = WorkerReport(nodes={1: NodeReport(NodeState(memory_id=1))})
    both = one.aggregate(WorkerReport({3: 1})).aggregate(WorkerReport(nodes={2: NodeReport(), 1: NodeReport()}))
    assert not one.is_empty
    assert (set(both.nodes), both.nodes[1].state) == ({1, 2}, NodeState(memory_id=1))
    assert not StepPlan(nodes={1: NodeOrders()}).is_empty
