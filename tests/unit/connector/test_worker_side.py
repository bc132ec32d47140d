"""The worker side's copies: bytes there and back, and every job reported once, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np
import torch

from kvoffload.connector import worker_side
from kvoffload.connector.common.step_plan import LoadJob, Place, StepPlan, WorkerReport
from kvoffload.connector.worker_side import IDLE_WAIT_S, MAX_FAULT_LINES
from kvoffload.errors import NativeError
from kvoffload.kvspec import PageMap
from kvoffload.native import finish_digests
from kvoffload.transfer import CopyDirection, open_engine
from tests.kit.connector.workers import (
    NUM_BLOCKS,
    PAGE,
    Move,
    TestedWorker,
    block_of,
    collect,
    join_plans,
    load,
    load_job,
    make_worker,
    memory_of,
    name_of,
    replace_engine,
    save,
    save_job,
    start,
)
from tests.kit.transfer.stand_ins import FailingEngine, HeldEngine, MarkingEngine, PassingEngine


def test_saved_blocks_come_back_into_other_blocks() -> None:
    worker, tensors = start(make_worker())
    before = memory_of(tensors).clone()
    save(worker, Move(1, 1, 0), Move(0, 2, 1), Move(1, 3, 2))
    memory_of(tensors)[PAGE:].fill_(0)
    assert load(worker, Move(1, 5, 0), Move(1, 1, 2), Move(0, 4, 1))
    saved = before.reshape(NUM_BLOCKS, PAGE).tolist()
    assert block_of(tensors, 5) == saved[1]
    assert block_of(tensors, 1) == saved[3]
    assert block_of(tensors, 4) == saved[2][:152] + [0] * (PAGE - 152)  # the padding of a state is not touched
    assert block_of(tensors, 2) + block_of(tensors, 3) == [0] * (2 * PAGE)
    assert block_of(tensors, 0) == saved[0]
    worker.close()


def test_how_long_a_load_was_copied_is_told_with_its_end() -> None:
    worker, _ = start(make_worker())
    save(worker, Move(1, 1, 0))
    worker.submit(StepPlan(loads=(LoadJob("a", worker.shared.place, worker.shared.make_moves((Move(1, 2, 0),))),)))
    _, _, report = collect(worker, 1)
    assert report.saved == {}
    assert report.copied_s.keys() == {"a"}
    assert report.copied_s["a"] > 0
    worker.close()


def test_a_save_takes_the_bytes_of_the_moment_it_runs_and_keeps_them() -> None:
    worker, tensors = start(make_worker())
    wanted = block_of(tensors, 1)
    save(worker, Move(1, 1, 0))
    memory_of(tensors).fill_(7)
    assert load(worker, Move(1, 1, 0))
    assert block_of(tensors, 1) == wanted
    worker.close()


def test_copies_go_through_the_engine_that_it_is_given() -> None:
    opened: list[PassingEngine] = []

    def open_watched(page_map: PageMap, memory: Mapping[str, torch.Tensor], **settings: int) -> PassingEngine:
        opened.append(PassingEngine(open_engine(page_map, memory, **settings)))
        return opened[-1]

    worker = make_worker()
    worker.settings = replace(worker.settings, open_engine=open_watched)
    start(worker)
    assert worker.engine is opened[0]
    save(worker, Move(1, 1, 0))
    assert load(worker, Move(1, 2, 0))
    worker.close()


def test_a_slot_that_lies_nowhere_fails_its_load_only() -> None:
    worker, tensors = start(make_worker())
    save(worker, Move(1, 1, 0))
    bad = load_job(worker, Move(1, 2, 0), Move(1, 3, 1), name="bad")
    bad.loads[0].moves.addresses[1] = 1 << 40
    before = memory_of(tensors).clone()
    worker.submit(bad)
    assert collect(worker, 1)[:2] == ({"bad"}, {"bad"})
    assert torch.equal(memory_of(tensors), before)
    assert load(worker, Move(1, 2, 0), name="good")
    assert block_of(tensors, 2) == block_of(tensors, 1)
    worker.close()


@pytest.mark.parametrize("what", ["memory", "session"])
def test_a_memory_or_a_session_that_is_not_ours_fails_its_jobs_only(what: str) -> None:
    """The server would not wait for our exit before it gives these slots to others."""
    worker, tensors = start(make_worker())
    save(worker, Move(1, 1, 0))
    place = worker.shared.place
    other = Place(place.memory_id + (what == "memory"), place.session + (what == "session"))
    load_plan, save_plan = load_job(worker, Move(1, 2, 0), name="bad"), save_job(worker, Move(1, 3, 0), job=2)
    before = worker.shared.record(Move(1, 3, 0)).copy()
    worker.submit(join_plans(StepPlan(loads=(replace(load_plan.loads[0], place=other),))))
    worker.submit(join_plans(StepPlan(saves=(replace(save_plan.saves[0], place=other),))))
    finished, failed, report = collect(worker, 2)
    assert (finished, failed, report) == ({"bad"}, {"bad"}, WorkerReport({2: 1}, frozenset({2})))
    assert np.array_equal(worker.shared.record(Move(1, 3, 0)), before)
    assert load(worker, Move(1, 2, 0), name="good")
    assert block_of(tensors, 2) == block_of(tensors, 1)
    worker.close()


def test_a_doomed_load_is_reported_as_failed_and_touches_nothing() -> None:
    worker, tensors = start(make_worker())
    before = memory_of(tensors).clone()
    worker.submit(StepPlan(doomed=("a",)))
    assert worker.take_results(is_idle=False) == ({"a"}, {"a"}, WorkerReport())
    assert worker.take_results(is_idle=False) == (set(), set(), WorkerReport())
    assert torch.equal(memory_of(tensors), before)
    worker.close()


@pytest.mark.parametrize("block", [0, NUM_BLOCKS, -1])
def test_a_block_that_nobody_may_touch_fails_the_job(block: int) -> None:
    """The null block above all: every request reads it."""
    worker, tensors = start(make_worker())
    save(worker, Move(1, 1, 0))
    before = memory_of(tensors).clone()
    assert not load(worker, Move(1, block, 0))
    assert torch.equal(memory_of(tensors), before)
    worker.submit(save_job(worker, Move(1, block, 4), job=5))
    assert collect(worker, 1)[2] == WorkerReport({5: 1}, frozenset({5}))
    worker.close()


@pytest.mark.parametrize("direction", CopyDirection)
def test_a_failing_copy_is_a_failed_job_and_the_next_one_works(
    direction: CopyDirection, caplog: pytest.LogCaptureFixture
) -> None:
    worker, _ = start(make_worker())
    save(worker, Move(1, 1, 0), Move(1, 2, 1), job=7)
    engine = worker.engine
    failing = replace_engine(worker, lambda inner: FailingEngine(inner, direction))
    if direction is CopyDirection.SAVE:
        worker.submit(save_job(worker, Move(1, 1, 2), Move(1, 2, 3), job=8))
        assert collect(worker, 1)[2] == WorkerReport({8: 1}, frozenset({8}))
    else:
        assert not load(worker, Move(1, 3, 0), Move(1, 4, 1))
    assert caplog.records[-1].getMessage().endswith(f"failed: {failing.FAULT}")
    worker.engine = engine
    save(worker, Move(1, 1, 4), job=9)
    assert load(worker, Move(1, 2, 4))
    worker.close()


def test_a_plan_that_the_engine_does_not_take_fails_its_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, tensors = start(make_worker())
    save(worker, Move(1, 1, 0))

    def refuse(*given: object, **named: object) -> int:
        raise NativeError("a copy was not taken: all 1024 plans that may be under way are")

    with monkeypatch.context() as patch:
        patch.setattr(worker.engine, "submit", refuse)
        worker.submit(join_plans(save_job(worker, Move(1, 1, 1), job=2), load_job(worker, Move(1, 2, 0), name="a")))
        assert worker.take_results(is_idle=False) == ({"a"}, {"a"}, WorkerReport({2: 1}, frozenset({2})))
    assert load(worker, Move(1, 3, 0))
    assert block_of(tensors, 3) == block_of(tensors, 1)
    worker.close()


def test_jobs_are_reported_as_failed_when_the_device_has_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = start(make_worker())

    def fail(device: torch.device) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(worker_side, "compute_stream", fail)
    worker.submit(join_plans(load_job(worker, name="a"), save_job(worker, Move(1, 1, 0), job=3)))
    assert collect(worker, 2) == ({"a"}, {"a"}, WorkerReport({3: 1}, frozenset({3})))
    worker.close()


def test_a_job_is_one_plan_of_all_its_groups_behind_what_the_engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = start(make_worker())
    engine = replace_engine(worker, PassingEngine)
    monkeypatch.setattr(worker_side, "compute_stream", lambda device: 77)
    save(worker, Move(0, 2, 0), Move(1, 1, 1), Move(0, 3, 2))
    assert load(worker, Move(1, 4, 1), Move(0, 5, 2))
    plans = [(direction, items.group.tolist(), items.block.tolist(), after) for direction, items, after in engine.plans]
    assert plans == [(CopyDirection.SAVE, [0, 1, 0], [2, 1, 3], 77), (CopyDirection.LOAD, [1, 0], [4, 5], 77)]
    worker.close()


def test_loads_come_after_what_was_marked_and_saves_after_what_was_given_since(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = start(make_worker())
    engine = replace_engine(worker, MarkingEngine)
    monkeypatch.setattr(worker_side, "compute_stream", lambda device: 77)
    worker.mark()
    worker.submit(join_plans(save_job(worker, Move(1, 1, 0)), load_job(worker, Move(1, 2, 1))))
    collect(worker, 2)
    assert engine.seen == ["mark 1 of 77", "save after 77", "load after point 1"]
    assert load(worker, Move(1, 3, 0))  # a mark is of one step
    assert engine.seen[3:] == ["load after 77"]
    worker.close()


def test_loads_wait_for_nothing_where_blocks_come_free_late(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = start(make_worker(has_late_frees=True))
    engine = replace_engine(worker, MarkingEngine)
    monkeypatch.setattr(worker_side, "compute_stream", lambda device: 77)
    worker.mark()
    worker.submit(join_plans(save_job(worker, Move(1, 1, 0)), load_job(worker, Move(1, 2, 1))))
    collect(worker, 2)
    assert engine.seen == ["save after 77", "load after None"]
    worker.close()


def test_a_stream_that_cannot_be_marked_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker, _ = start(make_worker())
    engine = replace_engine(worker, MarkingEngine)
    monkeypatch.setattr(worker_side, "compute_stream", lambda device: 77)

    def refuse(stream: int) -> None:
        raise NativeError("a stream was not marked: the compute stream is being captured")

    monkeypatch.setattr(engine, "mark", refuse)
    worker.mark()
    assert load(worker, Move(1, 3, 0))
    assert engine.seen == ["load after 77"]
    assert "being captured" in caplog.text
    worker.close()


def test_a_mark_does_not_outlive_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = start(make_worker())
    engine = replace_engine(worker, MarkingEngine)
    monkeypatch.setattr(worker_side, "compute_stream", lambda device: 77)
    worker.mark()
    worker.unregister()
    worker.mark()
    assert engine.marks == 1
    start(worker)
    engine = replace_engine(worker, MarkingEngine)
    assert load(worker, Move(1, 3, 0))
    assert engine.seen == ["load after 77"]
    worker.close()


def test_only_a_step_without_a_forward_waits_and_only_for_copies() -> None:
    worker, _ = start(make_worker())
    engine = replace_engine(worker, HeldEngine)
    worker.take_results(is_idle=True)
    engine.hold()
    worker.submit(save_job(worker, Move(1, 1, 0)))
    worker.take_results(is_idle=False)
    worker.submit(StepPlan(doomed=("a",)))
    assert worker.take_results(is_idle=True)[0] == {"a"}
    assert engine.waits == []
    worker.take_results(is_idle=True)
    assert engine.waits == [IDLE_WAIT_S]
    engine.release()
    assert collect(worker, 1)[2].saved == {1: 1}
    worker.close()


def test_the_log_lines_of_failing_copies_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    worker, _ = start(make_worker())
    worker.submit(join_plans(*(load_job(worker, Move(1, 0, 0), name=str(i)) for i in range(MAX_FAULT_LINES + 5))))
    assert len(collect(worker, MAX_FAULT_LINES + 5)[1]) == MAX_FAULT_LINES + 5
    lines = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert len(lines) == MAX_FAULT_LINES
    assert lines[-1].endswith("no further ones are logged")
    worker.close()


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_flipped_byte_is_found_if_the_load_brings_digests(is_checked: bool, caplog: pytest.LogCaptureFixture) -> None:
    worker, _ = start(make_worker())
    save(worker, Move(1, 1, 0), Move(0, 2, 1))
    worker.shared.record(Move(0, 2, 1))[100] ^= 1
    assert load(worker, Move(1, 3, 0), Move(0, 4, 1), is_checked=is_checked) == (not is_checked)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    line = "load of request r1 failed: a record of group 0 differs from the saved bytes (loaded into block 4)"
    assert lines == [line] * is_checked
    assert load(worker, Move(1, 3, 0), name="r2", is_checked=is_checked)
    worker.close()


@pytest.mark.parametrize("change", ["another block's", "another group's", "another shard's", "another engine's"])
def test_a_record_that_belongs_elsewhere_is_found(change: str) -> None:
    """Its bytes are whole, but they are not those of this block."""
    worker, _ = start(make_worker(ranks=2))
    save(worker, Move(1, 1, 0), Move(1, 2, 1))
    assert load(worker, Move(1, 3, 0), Move(1, 4, 1), is_checked=True)
    digests = worker.shared.digests
    if change == "another block's":
        worker.shared.record(Move(1, 1, 0))[:] = worker.shared.record(Move(1, 2, 1))
    else:
        (total,) = digest_of(worker, Move(1, 1, 0))
        given = {"fingerprint": worker.shared.client.register.fingerprint, "group": 1, "shard": 0}
        given |= {
            "another group's": {"group": 0},
            "another shard's": {"shard": 1},
            "another engine's": {"fingerprint": b"e" * 32},
        }[change]
        finished = finish_digests(total, PAGE, block_hashes=name_of(0), **given)
        digests[0, 0] = int.from_bytes(finished, "little")
    assert not load(worker, Move(1, 3, 0), is_checked=True)
    assert load(worker, Move(1, 4, 1), is_checked=True)
    worker.close()


def digest_of(worker: TestedWorker, move: Move) -> list[bytes]:
    worker.submit(save_job(worker, move))
    return list(collect(worker, 1)[2].digests[1].values())


def test_a_record_without_a_digest_is_loaded_unchecked() -> None:
    worker, tensors = start(make_worker())
    save(worker, Move(1, 1, 0), Move(1, 2, 1))
    del worker.shared.digests[0, 0]
    worker.shared.record(Move(1, 1, 0))[5] ^= 1
    assert load(worker, Move(1, 3, 0), Move(1, 4, 1), is_checked=True)
    assert block_of(tensors, 4) == block_of(tensors, 2)
    worker.close()


def test_every_end_is_reported_once() -> None:
    worker, _ = start(make_worker())
    save(worker, Move(1, 1, 0))
    assert load(worker, Move(1, 2, 0))
    assert worker.take_results(is_idle=True) == (set(), set(), WorkerReport())
    worker.close()
