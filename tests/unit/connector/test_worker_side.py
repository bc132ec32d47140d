"""The worker side on CPU tensors that vLLM's own code made: bytes there and back, faults, and nothing kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

from kvoffload.connector.geometry import EngineCache, describe_cache
from kvoffload.connector.identity import describe_engine
from kvoffload.connector.step_plan import BlockMove, LoadJob, SaveJob, StepPlan, WorkerReport
from kvoffload.connector.worker_side import MAX_FAULT_LINES, WorkerSide
from kvoffload.errors import IdentityError, RegistrationError, SelfTestError
from kvoffload.keys.identity import Identity
from kvoffload.kvspec import KVGeometry
from kvoffload.transfer.plain_copy import PlainCopy
from tests.unit.connector.engine_configs import full, make_config, make_tensors, make_vllm_config, recurrent

NUM_BLOCKS = 6
PAGE = 256
Tensors = dict[str, torch.Tensor]


def make_cache(num_blocks: int = NUM_BLOCKS) -> tuple[KVGeometry, Tensors]:
    """A recurrent group with padded pages over a full one."""
    config = make_config((["r"], recurrent()), (["a"], full()), num_blocks=num_blocks)
    tensors = make_tensors(config)
    cache = EngineCache(config=config, tensors=tensors, sharing={}, layout="LBHNC", hash_block_size=4)
    return describe_cache(cache), tensors


def identify(geometry: KVGeometry) -> Identity:
    return describe_engine(make_vllm_config(), geometry)


@pytest.fixture
def make_worker() -> Callable[..., WorkerSide]:
    return lambda **changes: WorkerSide(**{"self_test": True, "verify_always": False, **changes})


def start(worker: WorkerSide) -> tuple[WorkerSide, Tensors]:
    geometry, tensors = make_cache()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    fill(tensors)
    return worker, tensors


def fill(tensors: Tensors) -> None:
    """Random bytes everywhere; both groups lie on them."""
    flat = memory_of(tensors)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))


def memory_of(tensors: Tensors) -> torch.Tensor:
    storage = next(iter(tensors.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def block_of(tensors: Tensors, block: int, length: int = PAGE) -> list[int]:
    return memory_of(tensors)[block * PAGE : block * PAGE + length].tolist()


def collect(worker: WorkerSide, jobs: int) -> tuple[set[str], set[str], WorkerReport]:
    finished: set[str] = set()
    failed: set[str] = set()
    report = WorkerReport()
    while len(finished) + sum(report.saved.values()) < jobs:
        more, bad, done = worker.take_results(is_idle=True)
        finished |= more
        failed |= bad
        report = report.aggregate(done)
    return finished, failed, report


def save(worker: WorkerSide, *moves: BlockMove, job: int = 1) -> None:
    worker.submit(StepPlan(saves=(SaveJob(job, moves),)))
    assert collect(worker, 1) == (set(), set(), WorkerReport({job: 1}))


def load(worker: WorkerSide, *moves: BlockMove, name: str = "r1") -> bool:
    """Whether it succeeded."""
    worker.submit(StepPlan(loads=(LoadJob(name, moves),)))
    finished, failed, _ = collect(worker, 1)
    assert finished == {name}
    return failed != {name}


def test_saved_blocks_come_back_into_other_blocks(make_worker: Callable[..., WorkerSide]) -> None:
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


def test_a_save_takes_the_bytes_of_the_moment_it_runs_and_keeps_them(make_worker: Callable[..., WorkerSide]) -> None:
    worker, tensors = start(make_worker())
    wanted = block_of(tensors, 1)
    save(worker, BlockMove(1, 1, 0))
    memory_of(tensors).fill_(7)
    assert load(worker, BlockMove(1, 1, 0))
    assert block_of(tensors, 1) == wanted
    worker.close()


def test_facts_name_stored_groups_by_their_place_in_the_block_tables(make_worker: Callable[..., WorkerSide]) -> None:
    worker, _ = start(make_worker())
    assert worker.facts is not None
    assert [(group.index, group.record_bytes) for group in worker.facts.groups] == [(0, 152), (1, PAGE)]
    assert worker.facts.num_blocks == NUM_BLOCKS
    geometry, _ = make_cache()
    assert worker.facts.fingerprint == identify(geometry).fingerprint()
    worker.close()


def test_the_self_test_leaves_every_byte_as_it_was(make_worker: Callable[..., WorkerSide]) -> None:
    geometry, tensors = make_cache()
    fill(tensors)
    before = memory_of(tensors).clone()
    worker = make_worker()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    assert torch.equal(memory_of(tensors), before)
    worker.close()


def test_two_blocks_are_enough_for_the_self_test(make_worker: Callable[..., WorkerSide]) -> None:
    geometry, tensors = make_cache(num_blocks=2)
    worker = make_worker()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    worker.close()


def test_a_copy_that_loses_bytes_does_not_start(
    make_worker: Callable[..., WorkerSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainCopy, "load", lambda *given: None)
    geometry, tensors = make_cache()
    worker = make_worker()
    with pytest.raises(SelfTestError):
        worker.register(geometry, tensors, scale_views={}, identify=identify)
    assert not worker.registration.is_registered
    assert worker.facts is None


def test_an_engine_that_cannot_be_identified_is_not_held(make_worker: Callable[..., WorkerSide]) -> None:
    def refuse(geometry: KVGeometry) -> Identity:
        raise IdentityError("no revision", remedy="give one")

    geometry, tensors = make_cache()
    worker = make_worker()
    with pytest.raises(IdentityError):
        worker.register(geometry, tensors, scale_views={}, identify=refuse)
    assert not worker.registration.is_registered
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    worker.close()


def test_a_record_that_is_not_there_fails_its_load_only(make_worker: Callable[..., WorkerSide]) -> None:
    worker, tensors = start(make_worker())
    save(worker, BlockMove(1, 1, 0))
    assert not load(worker, BlockMove(1, 2, 0), BlockMove(1, 3, 99), name="bad")
    assert load(worker, BlockMove(1, 2, 0), name="good")
    assert block_of(tensors, 2) == block_of(tensors, 1)
    worker.close()


def test_a_doomed_load_is_reported_as_failed_and_touches_nothing(make_worker: Callable[..., WorkerSide]) -> None:
    worker, tensors = start(make_worker())
    before = memory_of(tensors).clone()
    worker.submit(StepPlan(loads=(LoadJob("a", (), is_doomed=True),)))
    assert collect(worker, 1)[:2] == ({"a"}, {"a"})
    assert torch.equal(memory_of(tensors), before)
    worker.close()


@pytest.mark.parametrize("block", [0, NUM_BLOCKS, -1])
def test_a_block_that_nobody_may_touch_fails_the_job(make_worker: Callable[..., WorkerSide], block: int) -> None:
    """The null block above all: every request reads it."""
    worker, tensors = start(make_worker())
    save(worker, BlockMove(1, 1, 0))
    before = memory_of(tensors).clone()
    assert not load(worker, BlockMove(1, block, 0))
    assert torch.equal(memory_of(tensors), before)
    worker.submit(StepPlan(saves=(SaveJob(5, (BlockMove(1, block, 4),)),)))
    assert collect(worker, 1)[2] == WorkerReport({5: 1}, frozenset({5}))
    worker.close()


def test_a_failing_copy_is_a_failed_job_and_the_next_one_works(
    make_worker: Callable[..., WorkerSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = start(make_worker())

    def fail(*given: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(PlainCopy, "save", fail)
        worker.submit(StepPlan(saves=(SaveJob(1, (BlockMove(1, 1, 0),)),)))
        assert collect(worker, 1)[2] == WorkerReport({1: 1}, frozenset({1}))
    save(worker, BlockMove(1, 1, 1), job=2)
    with monkeypatch.context() as patch:
        patch.setattr(PlainCopy, "load", fail)
        assert not load(worker, BlockMove(1, 2, 1))
    assert load(worker, BlockMove(1, 2, 1))
    worker.close()


def test_jobs_are_reported_as_failed_when_the_device_takes_no_event(
    make_worker: Callable[..., WorkerSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = start(make_worker())

    def fail() -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(worker, "_record_event", fail)
    worker.submit(StepPlan(loads=(LoadJob("a", ()),), saves=(SaveJob(3, (BlockMove(1, 1, 0),)),)))
    assert collect(worker, 2) == ({"a"}, {"a"}, WorkerReport({3: 1}, frozenset({3})))
    worker.close()


def test_the_log_lines_of_failing_copies_are_bounded(
    make_worker: Callable[..., WorkerSide], caplog: pytest.LogCaptureFixture
) -> None:
    worker, _ = start(make_worker())
    worker.submit(StepPlan(loads=tuple(LoadJob(str(i), (), is_doomed=True) for i in range(MAX_FAULT_LINES + 5))))
    assert len(collect(worker, MAX_FAULT_LINES + 5)[1]) == MAX_FAULT_LINES + 5
    lines = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert len(lines) == MAX_FAULT_LINES
    assert lines[-1].endswith("no further ones are logged")
    worker.close()


@pytest.mark.parametrize(("verify_always", "is_found"), [(True, True), (False, False)])
def test_a_flipped_byte_is_found_on_every_load_if_asked(
    make_worker: Callable[..., WorkerSide], verify_always: bool, is_found: bool
) -> None:
    worker, _ = start(make_worker(verify_always=verify_always))
    save(worker, BlockMove(1, 1, 0))
    worker._records._records[0][100] ^= 1
    assert load(worker, BlockMove(1, 2, 0)) == (not is_found)
    worker.close()


def test_every_end_is_reported_once(make_worker: Callable[..., WorkerSide]) -> None:
    worker, _ = start(make_worker())
    save(worker, BlockMove(1, 1, 0))
    assert load(worker, BlockMove(1, 2, 0))
    assert worker.take_results(is_idle=True) == (set(), set(), WorkerReport())
    worker.close()


def test_dropped_records_are_forgotten_and_dropping_is_not_reported(make_worker: Callable[..., WorkerSide]) -> None:
    worker, _ = start(make_worker())
    save(worker, BlockMove(1, 1, 0), BlockMove(1, 2, 1))
    worker.submit(StepPlan(drops=(0, 77)))
    save(worker, BlockMove(1, 3, 2), job=2)
    assert not load(worker, BlockMove(1, 4, 0), name="dropped")
    assert load(worker, BlockMove(1, 4, 1), name="kept")
    worker.close()


def test_records_survive_a_sleep_of_the_engine(make_worker: Callable[..., WorkerSide]) -> None:
    """Registered anew at other addresses, what was saved before is loaded into the new cache."""
    worker, tensors = start(make_worker())
    wanted = block_of(tensors, 1)
    save(worker, BlockMove(1, 1, 0))
    worker.unregister()
    assert worker.facts is None
    geometry, fresh = make_cache()
    worker.register(geometry, fresh, scale_views={}, identify=identify)
    assert load(worker, BlockMove(1, 3, 0))
    assert block_of(fresh, 3) == wanted
    worker.close()


def test_registering_twice_without_unregistering_is_refused(make_worker: Callable[..., WorkerSide]) -> None:
    worker, _ = start(make_worker())
    geometry, tensors = make_cache()
    with pytest.raises(RegistrationError):
        worker.register(geometry, tensors, scale_views={}, identify=identify)
    worker.close()


@pytest.mark.parametrize("last_job", ["none", "good", "failing in its copy"])
def test_after_unregistering_nothing_of_ours_holds_the_engines_memory(
    make_worker: Callable[..., WorkerSide],
    last_job: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A job that failed and was not asked about yet must not hold it either."""
    worker, tensors = start(make_worker())
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors.values()]
    views = [weakref.ref(tensor) for tensor in tensors.values()]
    if last_job == "good":
        worker.submit(StepPlan(saves=(SaveJob(1, (BlockMove(1, 1, 0),)),)))
    elif last_job != "none":
        monkeypatch.setattr(torch.Tensor, "index_select", lambda *given: [][:1].pop())
        worker.submit(StepPlan(saves=(SaveJob(1, (BlockMove(1, 1, 0), BlockMove(1, 3, 1))),)))
    worker.unregister()
    monkeypatch.undo()
    assert [record.getMessage() for record in caplog.records if "still referenced" in record.getMessage()] == []
    del tensors
    gc.collect()
    assert [view() for view in views] == [None, None]
    assert [storage() for storage in storages] == [None, None]
    worker.close()
    assert len(worker._records) == 0


def test_what_was_on_its_way_ends_before_the_memory_is_let_go(make_worker: Callable[..., WorkerSide]) -> None:
    worker, tensors = start(make_worker())
    wanted = block_of(tensors, 1)
    worker.submit(StepPlan(saves=(SaveJob(1, (BlockMove(1, 1, 0),)),), loads=(LoadJob("a", (BlockMove(1, 2, 0),)),)))
    worker.unregister()
    assert block_of(tensors, 2) == wanted
    assert collect(worker, 2) == ({"a"}, set(), WorkerReport({1: 1}))


def test_jobs_without_a_registered_cache_fail(make_worker: Callable[..., WorkerSide]) -> None:
    worker, _ = start(make_worker())
    worker.unregister()
    worker.submit(StepPlan(loads=(LoadJob("a", (BlockMove(1, 2, 0),)),)))
    geometry, tensors = make_cache()
    worker.register(geometry, tensors, scale_views={}, identify=identify)  # the thread runs again
    assert collect(worker, 1)[:2] == ({"a"}, {"a"})
    worker.close()
