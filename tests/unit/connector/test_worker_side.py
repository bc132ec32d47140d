"""The worker side's copies: bytes there and back, and every job reported once, whatever becomes of it."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

from kvoffload.connector import worker_side
from kvoffload.connector.step_plan import BlockMove, LoadJob, SaveJob, StepPlan, WorkerReport
from kvoffload.connector.worker_side import IDLE_WAIT_S, MAX_FAULT_LINES
from kvoffload.errors import NativeError
from kvoffload.transfer import CopyDirection
from tests.unit.connector.workers import (
    NUM_BLOCKS,
    PAGE,
    block_of,
    collect,
    load,
    make_worker,
    memory_of,
    replace_engine,
    save,
    start,
)
from tests.unit.transfer.stand_ins import FailingEngine, HeldEngine, PassingEngine


def test_saved_blocks_come_back_into_other_blocks() -> None:
    worker, tensors = start(make_worker())
    before = memory_of(tensors).clone()
    save(worker, BlockMove(1, 1, 0), BlockMove(0, 2, 1), BlockMove(1, 3, 2))
    memory_of(tensors)[PAGE:].fill_(0)
    assert load(worker, BlockMove(1, 5, 0), BlockMove(1, 1, 2), BlockMove(0, 4, 1))
    saved = before.reshape(NUM_BLOCKS, PAGE).tolist()
    assert block_of(tensors, 5) == saved[1]
    assert block_of(tensors, 1) == saved[3]
    assert block_of(tensors, 4) == saved[2][:152] + [0] * (PAGE - 152)  # the padding of a state is not touched
    assert block_of(tensors, 2) + block_of(tensors, 3) == [0] * (2 * PAGE)
    assert block_of(tensors, 0) == saved[0]
    worker.close()


def test_a_save_takes_the_bytes_of_the_moment_it_runs_and_keeps_them() -> None:
    worker, tensors = start(make_worker())
    wanted = block_of(tensors, 1)
    save(worker, BlockMove(1, 1, 0))
    memory_of(tensors).fill_(7)
    assert load(worker, BlockMove(1, 1, 0))
    assert block_of(tensors, 1) == wanted
    worker.close()


def test_a_record_that_is_not_there_fails_its_load_only() -> None:
    worker, tensors = start(make_worker())
    save(worker, BlockMove(1, 1, 0))
    assert not load(worker, BlockMove(1, 2, 0), BlockMove(1, 3, 99), name="bad")
    assert load(worker, BlockMove(1, 2, 0), name="good")
    assert block_of(tensors, 2) == block_of(tensors, 1)
    worker.close()


def test_a_doomed_load_is_reported_as_failed_and_touches_nothing() -> None:
    worker, tensors = start(make_worker())
    before = memory_of(tensors).clone()
    worker.submit(StepPlan(loads=(LoadJob("a", (), is_doomed=True),)))
    assert collect(worker, 1)[:2] == ({"a"}, {"a"})
    assert torch.equal(memory_of(tensors), before)
    worker.close()


@pytest.mark.parametrize("block", [0, NUM_BLOCKS, -1])
def test_a_block_that_nobody_may_touch_fails_the_job(block: int) -> None:
    """The null block above all: every request reads it."""
    worker, tensors = start(make_worker())
    save(worker, BlockMove(1, 1, 0))
    before = memory_of(tensors).clone()
    assert not load(worker, BlockMove(1, block, 0))
    assert torch.equal(memory_of(tensors), before)
    worker.submit(StepPlan(saves=(SaveJob(5, (BlockMove(1, block, 4),)),)))
    assert collect(worker, 1)[2] == WorkerReport({5: 1}, frozenset({5}))
    worker.close()


@pytest.mark.parametrize("direction", CopyDirection)
def test_a_failing_copy_is_a_failed_job_and_the_next_one_works(
    direction: CopyDirection, caplog: pytest.LogCaptureFixture
) -> None:
    worker, _ = start(make_worker())
    save(worker, BlockMove(1, 1, 0), BlockMove(1, 2, 1), job=7)
    engine = worker._engine
    failing = replace_engine(worker, lambda inner: FailingEngine(inner, direction))
    if direction is CopyDirection.SAVE:
        worker.submit(StepPlan(saves=(SaveJob(8, (BlockMove(1, 1, 2), BlockMove(1, 2, 3))),)))
        assert collect(worker, 1)[2] == WorkerReport({8: 1}, frozenset({8}))
    else:
        assert not load(worker, BlockMove(1, 3, 0), BlockMove(1, 4, 1))
    assert caplog.records[-1].getMessage().endswith(f"failed: {failing.FAULT}")
    worker._engine = engine
    assert not load(worker, BlockMove(1, 3, 2)), "what a failed save has written was found"
    save(worker, BlockMove(1, 1, 4), job=9)
    assert load(worker, BlockMove(1, 2, 4))
    worker.close()


def test_a_plan_that_the_engine_does_not_take_fails_its_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, tensors = start(make_worker())
    save(worker, BlockMove(1, 1, 0))

    def refuse(*given: object, **named: object) -> int:
        raise NativeError("a copy was not taken: all 1024 plans that may be under way are")

    with monkeypatch.context() as patch:
        patch.setattr(worker._engine, "submit", refuse)
        plan = StepPlan(saves=(SaveJob(2, (BlockMove(1, 1, 1),)),), loads=(LoadJob("a", (BlockMove(1, 2, 0),)),))
        worker.submit(plan)
        assert worker.take_results(is_idle=False) == ({"a"}, {"a"}, WorkerReport({2: 1}, frozenset({2})))
    assert load(worker, BlockMove(1, 3, 0))
    assert block_of(tensors, 3) == block_of(tensors, 1)
    worker.close()


def test_jobs_are_reported_as_failed_when_the_device_has_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = start(make_worker())

    def fail(device: torch.device) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(worker_side, "compute_stream", fail)
    worker.submit(StepPlan(loads=(LoadJob("a", ()),), saves=(SaveJob(3, (BlockMove(1, 1, 0),)),)))
    assert collect(worker, 2) == ({"a"}, {"a"}, WorkerReport({3: 1}, frozenset({3})))
    worker.close()


def test_a_job_is_one_plan_of_all_its_groups_behind_what_the_engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = start(make_worker())
    engine = replace_engine(worker, PassingEngine)
    monkeypatch.setattr(worker_side, "compute_stream", lambda device: 77)
    save(worker, BlockMove(0, 2, 0), BlockMove(1, 1, 1), BlockMove(0, 3, 2))
    assert load(worker, BlockMove(1, 4, 1), BlockMove(0, 5, 2))
    plans = [(direction, items.group.tolist(), items.block.tolist(), after) for direction, items, after in engine.plans]
    assert plans == [(CopyDirection.SAVE, [0, 1, 0], [2, 1, 3], 77), (CopyDirection.LOAD, [1, 0], [4, 5], 77)]
    worker.close()


def test_a_record_that_is_dropped_while_it_is_loaded_is_loaded() -> None:
    worker, tensors = start(make_worker())
    wanted = block_of(tensors, 1)
    save(worker, BlockMove(1, 1, 0))
    engine = replace_engine(worker, HeldEngine)
    engine.hold()
    worker.submit(StepPlan(loads=(LoadJob("a", (BlockMove(1, 2, 0),)),)))
    worker.submit(StepPlan(drops=(0,)))
    gc.collect()
    assert worker.take_results(is_idle=True)[0] == set()
    engine.release()
    assert collect(worker, 1)[:2] == ({"a"}, set())
    assert block_of(tensors, 2) == wanted
    assert not load(worker, BlockMove(1, 3, 0), name="late")
    worker.close()


def test_only_a_step_without_a_forward_waits_and_only_for_copies() -> None:
    worker, _ = start(make_worker())
    engine = replace_engine(worker, HeldEngine)
    worker.take_results(is_idle=True)
    engine.hold()
    worker.submit(StepPlan(saves=(SaveJob(1, (BlockMove(1, 1, 0),)),)))
    worker.take_results(is_idle=False)
    worker.submit(StepPlan(loads=(LoadJob("a", (), is_doomed=True),)))
    assert worker.take_results(is_idle=True)[0] == {"a"}
    assert engine.waits == []
    worker.take_results(is_idle=True)
    assert engine.waits == [IDLE_WAIT_S]
    engine.release()
    assert collect(worker, 1)[2] == WorkerReport({1: 1})
    worker.close()


def test_the_log_lines_of_failing_copies_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    worker, _ = start(make_worker())
    worker.submit(StepPlan(loads=tuple(LoadJob(str(i), (), is_doomed=True) for i in range(MAX_FAULT_LINES + 5))))
    assert len(collect(worker, MAX_FAULT_LINES + 5)[1]) == MAX_FAULT_LINES + 5
    lines = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert len(lines) == MAX_FAULT_LINES
    assert lines[-1].endswith("no further ones are logged")
    worker.close()


@pytest.mark.parametrize(("verify_always", "is_found"), [(True, True), (False, False)])
def test_a_flipped_byte_is_found_on_every_load_if_asked(
    verify_always: bool, is_found: bool, caplog: pytest.LogCaptureFixture
) -> None:
    worker, _ = start(make_worker(verify_always=verify_always))
    save(worker, BlockMove(1, 1, 0), BlockMove(0, 2, 1))
    worker._records._records[1].memory[100] ^= 1
    assert load(worker, BlockMove(1, 3, 0), BlockMove(0, 4, 1)) == (not is_found)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == ["load of request r1 failed: slot 1 does not hold what was written to it"] * is_found
    assert load(worker, BlockMove(1, 3, 0), name="r2")
    worker.close()


def test_every_end_is_reported_once() -> None:
    worker, _ = start(make_worker())
    save(worker, BlockMove(1, 1, 0))
    assert load(worker, BlockMove(1, 2, 0))
    assert worker.take_results(is_idle=True) == (set(), set(), WorkerReport())
    worker.close()


def test_dropped_records_are_forgotten_and_dropping_is_not_reported() -> None:
    worker, _ = start(make_worker())
    save(worker, BlockMove(1, 1, 0), BlockMove(1, 2, 1))
    worker.submit(StepPlan(drops=(0, 77)))
    save(worker, BlockMove(1, 3, 2), job=2)
    assert not load(worker, BlockMove(1, 4, 0), name="dropped")
    assert load(worker, BlockMove(1, 4, 1), name="kept")
    worker.close()
