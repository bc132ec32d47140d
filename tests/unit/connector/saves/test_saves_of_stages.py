"""A block of a pipeline is saved by all its stages or by none, and restored where all of them have it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.common.step_plan import WorkerReport
from tests.kit.connector.engine_configs import full, window
from tests.kit.connector.saving import make_engine, names_of, save_prompt
from tests.kit.connector.scripted import ScriptedEngine, list_moves

DENSE = ((["a", "b", "c"], full(4)),)
UNEQUAL = (((["a", "b"], full(4)),), ((["c"], full(4)),))
"""Three layers in two stages."""
MIXED = ((["a"], full(4)), (["c", "d"], window(4, tokens=6)))
WINDOW_BEHIND = (
    ((["a"], full(4)), (["c"], window(4, tokens=6))),
    (([], full(4)), (["d"], window(4, tokens=6))),
)
"""The second stage has no layer of full attention."""
DIGEST = 16


def make_pipeline(**changes: Any) -> ScriptedEngine:
    return make_engine(DENSE, stages=UNEQUAL, **changes)


def count_bytes(engine: ScriptedEngine) -> int:
    """Adds up the bytes of the records that are there now."""
    groups = engine.cache.register.groups
    return sum(groups[one.group].record_bytes for one in engine.cache.find_readable())


def test_each_block_is_saved_by_every_stage_in_records_of_its_own_size() -> None:
    engine = make_pipeline(ranks=2)
    engine.serve("a", range(13))
    record_bytes = [group.record_bytes for group in engine.cache.register.groups]
    assert record_bytes[0] == 2 * record_bytes[1] > 0
    assert names_of(engine, 0) == names_of(engine, 1)
    assert [(one.group, one.shard) for one in engine.cache.published] == [
        (group, shard) for group in range(2) for shard in range(2) for _ in range(3)
    ]
    # Two ranks hold halves of three layers: no byte is stored twice, none is filled up.
    assert count_bytes(engine) == 2 * 3 * engine.geometry.groups[0].record_bytes
    engine.assert_at_rest()


def test_a_block_is_pinned_once_for_all_stages_and_freed_when_all_are_done() -> None:
    engine = make_pipeline()
    plan = save_prompt(engine, "a", range(13))
    assert engine.pinned == 3
    (job,) = plan.saves
    assert len(job.moves) == 6
    assert [move.block for move in list_moves(job)][:3] == [move.block for move in list_moves(job)][3:]
    engine.report(plan, ranks=1)
    assert (engine.pinned, engine.cache.published) == (3, [])
    engine.report(plan, ranks=1)
    assert engine.pinned == 0
    assert len(engine.cache.published) == 6
    engine.finish(engine.requests["a"])
    engine.assert_at_rest()


def test_what_all_stages_have_is_restored_by_all() -> None:
    engine = make_pipeline(extra={"load_policy": "always", "verify": "always"})
    engine.serve("a", range(13))
    engine.forget()
    request = engine.arrive("b", range(13))
    admission = engine.admit(request)
    assert admission is not None
    assert (admission.local, admission.external) == (0, 12)
    assert engine.parts.restores.blocks == 3
    plan = engine.step()
    (load,) = plan.loads
    assert [move.group for move in list_moves(load)] == [0, 0, 0, 1, 1, 1]
    assert len({move.block for move in list_moves(load)}) == 3
    assert load.wanted is not None
    assert load.wanted.digests.shape == (1, 6)
    engine.report(plan)
    engine.finish(request)
    engine.assert_at_rest()


@pytest.mark.parametrize("lost", [0, 1])
def test_what_one_stage_lacks_is_a_miss_of_all_and_saved_again(lost: int) -> None:
    engine = make_pipeline(extra={"load_policy": "always"})
    engine.serve("a", range(13))
    engine.forget()
    engine.cache.invalidate(lost, names_of(engine, lost)[1])
    request = engine.arrive("b", range(13))
    assert engine.match(request) == 4
    engine.cache.invalidate(lost, names_of(engine, lost)[0])
    engine.finish(request)
    engine.forget()
    engine.serve("c", range(13))
    engine.forget()
    assert engine.match(engine.arrive("d", range(13))) == 12


def test_where_slots_run_short_for_one_stage_no_stage_saves() -> None:
    engine = make_pipeline()
    engine.cache.slots_left = 5
    plan = save_prompt(engine, "a", range(17))
    (job,) = plan.saves
    moves = list_moves(job)
    # Of five slots the first stage took four, and one was left for the second.
    assert [move.group for move in moves] == [0, 1]
    assert moves[0].block == moves[1].block
    assert sum(map(len, engine.cache.aborted)) == 3
    assert engine.pinned == 1
    engine.cache.slots_left = None
    engine.report(plan)
    engine.finish(engine.requests["a"])
    engine.report(engine.step())
    assert len(names_of(engine, 0)) == len(names_of(engine, 1)) == 4
    engine.assert_at_rest()


@pytest.mark.parametrize("missing", [0, 1])
def test_a_job_whose_digests_one_stage_did_not_report_is_not_published(missing: int) -> None:
    engine = make_pipeline()
    plan = save_prompt(engine, "a", range(13))
    (job,) = plan.saves
    whole = {part: bytes(3 * DIGEST) for part in range(2) if part != missing}
    engine.hear(WorkerReport({job.job: 2}, frozenset(), {job.job: whole}))
    assert engine.cache.published == []
    assert sum(map(len, engine.cache.aborted)) == 6
    engine.finish(engine.requests["a"])
    engine.report(engine.step())
    engine.assert_at_rest()


def test_a_save_that_failed_on_one_stage_is_published_by_none() -> None:
    engine = make_pipeline()
    plan = save_prompt(engine, "a", range(13))
    engine.report(plan, ranks=1)
    engine.report(plan, ranks=1, bad_saves=True)
    assert engine.cache.published == []
    assert engine.pinned == 0


def test_a_stage_without_a_groups_layers_has_no_part_of_it() -> None:
    engine = make_engine(MIXED, stages=WINDOW_BEHIND, extra={"load_policy": "always"})
    facts = engine.parts.groups.facts
    assert [(one.index, one.stage) for one in facts] == [(0, 0), (1, 0), (1, 1)]
    engine.serve("a", range(13))
    engine.forget()
    assert names_of(engine, 1) == names_of(engine, 2) != []
    request = engine.arrive("b", range(13))
    admission = engine.admit(request)
    assert admission is not None
    assert admission.external == 12
    plan = engine.step()
    assert {move.group for move in list_moves(*plan.loads)} == {0, 1, 2}
    engine.report(plan)
    engine.finish(request)
    engine.assert_at_rest()
