"""The worker side as one of several ranks, and with memories that come and go."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np

from kvoffload.connector.engine.pipeline import Stage, decode_stage, encode_stage, name_pipeline
from kvoffload.connector.identity.agreement import agree, make_register
from kvoffload.connector.step_plan import StepPlan, WeightDigests, WorkerReport
from kvoffload.errors import RegistrationError, ServerError
from kvoffload.native import digest_record
from tests.kit.connector.workers import (
    PAGE,
    Move,
    SharedCache,
    block_of,
    collect,
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
from tests.kit.transfer.stand_ins import HeldEngine, PassingEngine

# ---- several ranks ----


def test_each_rank_has_its_part_of_a_slot() -> None:
    shared = SharedCache()
    ranks = [start(make_worker(rank=rank, ranks=2, shared=shared)) for rank in range(2)]
    ranks[1][1]["a"].add_(1)
    before = [memory_of(tensors).clone() for _, tensors in ranks]
    for worker, _ in ranks:
        save(worker, Move(1, 1, 0), Move(0, 2, 1))
    assert not np.array_equal(shared.record(Move(1, 1, 0)), shared.record(Move(1, 1, 0), shard=1))
    for (worker, tensors), saved in zip(ranks, before, strict=True):
        memory_of(tensors).fill_(0)
        assert load(worker, Move(1, 3, 0), Move(0, 4, 1), is_checked=True)
        assert block_of(tensors, 3) == saved[PAGE : 2 * PAGE].tolist()
        assert block_of(tensors, 4, 152) == saved[2 * PAGE : 2 * PAGE + 152].tolist()
        worker.close()


def test_what_one_rank_finds_damaged_another_may_load() -> None:
    shared = SharedCache()
    (first, _), (second, _) = (start(make_worker(rank=rank, ranks=2, shared=shared)) for rank in range(2))
    for worker in (first, second):
        save(worker, Move(1, 1, 0))
    shared.record(Move(1, 1, 0), shard=1)[0] ^= 1
    assert load(first, Move(1, 3, 0), is_checked=True)
    assert not load(second, Move(1, 3, 0), is_checked=True)
    first.close()
    second.close()


def test_of_ranks_that_hold_the_same_bytes_one_writes_a_block_and_all_read() -> None:
    shared = SharedCache()
    ranks = [start(make_worker(rank=rank, ranks=4, replicas=2, shared=shared)) for rank in range(4)]
    moves, wanted = (Move(1, 1, 0), Move(1, 2, 1)), [block_of(ranks[0][1], block) for block in (1, 2)]
    for worker, _ in ranks:
        save(worker, *moves, writers=[1, 0])
    for rank, (worker, tensors) in enumerate(ranks):
        for move, block in zip(moves, wanted, strict=True):
            assert shared.record(move, shard=rank // 2).tolist() == block
        memory_of(tensors).fill_(0)
        assert load(worker, Move(1, 3, 0), Move(1, 4, 1), is_checked=True)
        assert [block_of(tensors, block) for block in (3, 4)] == wanted
        worker.close()


def test_a_rank_touches_no_record_that_another_writes() -> None:
    shared = SharedCache()
    ranks = [start(make_worker(rank=rank, ranks=2, replicas=2, shared=shared)) for rank in range(2)]
    engine = replace_engine(ranks[1][0], PassingEngine)
    save(ranks[1][0], Move(1, 1, 0), writers=[0])
    assert engine.plans == []
    shared.record(Move(1, 1, 0))[:] = 7
    ranks[1][0].submit(save_job(ranks[1][0], Move(1, 1, 0), Move(1, 2, 1), writers=[0, 1], compared=[True, True]))
    _, _, report = collect(ranks[1][0], 1)
    assert shared.record(Move(1, 1, 0)).tolist() == [7] * PAGE
    assert shared.record(Move(1, 2, 1)).tolist() == block_of(ranks[1][1], 2)
    # What it compares it has made digests of: the same that the writer makes.
    ranks[0][0].submit(save_job(ranks[0][0], Move(1, 1, 0), Move(1, 2, 1), writers=[0, 1], compared=[True, True]))
    assert collect(ranks[0][0], 1)[2].digests[1][0] == report.digests[1][1]
    assert len(report.digests[1][1]) == 2 * 16
    for worker, _ in ranks:
        worker.close()


def test_ranks_that_store_a_group_apart_do_so_in_another_session() -> None:
    shared = SharedCache()
    ranks = [start(make_worker(rank=rank, ranks=2, replicas=2, shared=shared)) for rank in range(2)]
    former, wanted = shared.client, []
    for worker, tensors in ranks:
        memory_of(tensors).add_(worker.rank)
        wanted.append(block_of(tensors, 1))
        worker.submit(StepPlan(apart=(1,)))
    assert wanted[0] != wanted[1]
    assert shared.client is not former
    assert all(places.is_closed is (places.client is former) for places in shared.opened)
    assert [group.shards for group in shared.client.register.groups] == [1, 2]
    for worker, tensors in ranks:
        # The scheduler side hears where it may copy now.
        assert worker.take_results(is_idle=False)[2].places == {worker.rank: (shared.place,)}
        save(worker, Move(1, 1, 0))
        memory_of(tensors).fill_(0)
        assert load(worker, Move(1, 2, 0), is_checked=True)
        assert block_of(tensors, 2) == wanted[worker.rank]
    for worker, _ in ranks:
        worker.unregister()
        start(worker)  # as after a sleep
        assert worker.facts is not None
        assert [group.replicas for group in worker.facts.groups] == [2, 1]
        worker.close()


def test_a_rank_that_cannot_join_another_session_copies_nothing_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    worker, _ = start(make_worker(ranks=2, replicas=2))
    worker.shared.refusal = ServerError("it is full", remedy="")
    worker.submit(StepPlan(apart=(0, 1)))
    assert "ranks are not stored apart: it is full" in caplog.text
    assert worker.take_results(is_idle=False)[2].places == {0: ()}
    worker.submit(save_job(worker, Move(1, 1, 0)))
    assert collect(worker, 1)[2].failed == {1}
    worker.close()


def test_groups_of_an_engine_have_as_many_equal_ranks_as_all_their_layers() -> None:
    worker = make_worker(ranks=4, replicas=4)
    worker.replicas = {"a": 2}
    start(worker)
    assert worker.facts is not None
    assert [group.replicas for group in worker.facts.groups] == [1, 2]
    assert [group.shards for group in worker.shared.registers[0].groups] == [4, 2]
    worker.close()


def beside_a_larger_stage(frame: bytes) -> list[bytes]:
    """The second stage's records have 64 bytes more."""
    stage = decode_stage(frame)
    sizes = tuple(size + 64 for size in stage.record_bytes)
    return [frame, encode_stage(Stage(fingerprint=b"e" * 32, record_bytes=sizes, replicas=stage.replicas))]


def test_records_of_a_pipeline_are_filled_up_with_zeros_to_the_largest() -> None:
    """What was in the slot before must be in no digest: whoever loads it would find another."""
    worker, tensors = start(make_worker(pipeline_ranks=2, exchange=beside_a_larger_stage))
    assert worker.facts is not None
    groups = tuple(replace(group, record_bytes=group.record_bytes + 64) for group in worker.facts.groups)
    name = name_pipeline([worker.facts.fingerprint, b"e" * 32])
    [told] = worker.shared.registers
    assert replace(told, report=b"") == make_register(name, groups, worker.terms.sharing)
    assert told.report.startswith(b"6 blocks, 1 allocations, every byte accounted for")
    assert worker.facts.places == (worker.shared.place,)
    assert worker.take_results(is_idle=False)[2] == WorkerReport()
    for move in (Move(1, 1, 0), Move(0, 2, 1)):
        for shard in range(2):
            worker.shared.record(move, shard=shard)[:] = 255
    save(worker, Move(1, 1, 0), Move(0, 2, 1))
    assert worker.shared.record(Move(1, 1, 0)).tolist() == block_of(tensors, 1) + [0] * 64
    assert worker.shared.record(Move(0, 2, 1)).tolist() == block_of(tensors, 2, 152) + [0] * 64
    assert worker.shared.record(Move(1, 1, 0), shard=1).tolist() == [255] * (PAGE + 64)
    for number, move in enumerate((Move(1, 3, 0), Move(0, 4, 1))):
        record = worker.shared.record(move)
        digest = digest_record(record, fingerprint=name, block_hash=name_of(number), group=move.group, shard=0)
        assert worker.shared.digests[number, 0] == digest
    assert load(worker, Move(1, 3, 0), Move(0, 4, 1), is_checked=True)
    assert block_of(tensors, 3) == block_of(tensors, 1)
    worker.close()


def test_a_stage_beside_one_that_cannot_register_does_not_start() -> None:
    worker = make_worker(pipeline_ranks=2, exchange=lambda frame: [frame, encode_stage(Stage(fault="no memory"))])
    with pytest.raises(RegistrationError, match="rank 1 of the engine did not register: no memory"):
        start(worker)
    assert worker.facts is None
    assert not worker.registration.is_registered
    assert worker.shared.registers == []


def test_a_cache_that_is_registered_anew_asks_no_other_stage() -> None:
    """They have said all, and may be at something else."""
    frames: list[bytes] = []

    def exchange(frame: bytes) -> list[bytes]:
        frames.append(frame)
        return beside_a_larger_stage(frame)

    worker, _ = start(make_worker(pipeline_ranks=2, exchange=exchange))
    worker.unregister()
    start(worker)
    assert len(frames) == len(worker.shared.registers) == 1
    worker.close()


# ---- memory that comes and goes ----


def test_where_it_may_copy_is_told_when_it_changes() -> None:
    worker, _ = start(make_worker())
    assert worker.facts is not None
    first = worker.shared.place
    assert worker.facts.places == (first,)
    assert worker.take_results(is_idle=False)[2] == WorkerReport()
    worker.shared.client.serve_anew()
    assert worker.take_results(is_idle=False)[2] == WorkerReport(places={0: (first, worker.shared.place)})
    worker.submit(StepPlan(retired=(first.memory_id,)))
    assert worker.take_results(is_idle=False)[2] == WorkerReport(places={0: (worker.shared.place,)})
    worker.close()


def test_a_memory_that_is_retired_with_a_plan_serves_the_jobs_of_that_plan() -> None:
    worker, tensors = start(make_worker())
    save(worker, Move(1, 1, 0))
    plan = load_job(worker, Move(1, 2, 0))
    worker.submit(replace(plan, retired=(worker.shared.place.memory_id,)))
    assert collect(worker, 1)[:2] == ({"r1"}, set())
    assert block_of(tensors, 2) == block_of(tensors, 1)
    assert not load(worker, Move(1, 3, 0), name="late")
    worker.close()


def test_a_memory_stays_mapped_while_a_copy_uses_it() -> None:
    worker, _ = start(make_worker())
    save(worker, Move(1, 1, 0))
    engine = replace_engine(worker, HeldEngine)
    engine.hold()
    worker.submit(load_job(worker, Move(1, 2, 0)))
    client = worker.shared.client
    memory_id = client.memory_id
    mapped = weakref.ref(client.memory(memory_id))
    client.serve_anew()
    worker.submit(StepPlan(retired=(memory_id,)))
    del client.sessions[memory_id]
    gc.collect()
    assert mapped() is not None
    engine.release()
    assert collect(worker, 1)[:2] == ({"r1"}, set())
    gc.collect()
    assert mapped() is None
    worker.close()


def test_the_end_of_a_worker_parts_from_the_cache() -> None:
    worker, _ = start(make_worker())
    worker.close()
    worker.close()
    assert [places.is_closed for places in worker.shared.opened] == [True]
    worker.submit(StepPlan(doomed=("a",), retired=(1,)))
    assert worker.take_results(is_idle=True)[:2] == ({"a"}, {"a"})


@pytest.mark.parametrize("pipeline_ranks", [1, 2])
def test_all_ranks_join_the_engine_of_their_weights_that_the_scheduler_side_opens(pipeline_ranks: int) -> None:
    """Each knows only its own weights, so they tell each other, stage by stage."""
    weights = [bytes([97 + rank]) * 32 for rank in range(2 * pipeline_ranks)]
    sizes: list[tuple[int, ...]] = []

    def exchange(frame: bytes) -> list[bytes]:
        mine = decode_stage(frame)
        sizes.append(mine.record_bytes)
        assert mine.weights in weights
        return [encode_stage(replace(mine, weights=one)) for one in weights]

    facts = {}
    shared = SharedCache()
    for rank, digest in enumerate(weights):
        worker = make_worker(rank=rank, ranks=2, pipeline_ranks=pipeline_ranks, shared=shared, exchange=exchange)
        start(worker, weights=WeightDigests(digest, b""))
        assert worker.facts is not None
        facts[divmod(rank, 2)] = worker.facts
        worker.close()
    engine = agree(facts, worker.terms.sharing)
    of_scheduler = make_register(
        engine.fingerprint, engine.groups, worker.terms.sharing, description=engine.description
    )
    for rank, told in enumerate(shared.registers):
        assert replace(told, report=b"", rank=0) == replace(of_scheduler, rank=0)
        assert told.rank == rank
