"""The worker side as one of several ranks, and with memories that come and go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np
import torch

from kvoffload.connector.common.orders import NodeOrders
from kvoffload.connector.common.step_plan import (
    BlockMoves,
    GroupFacts,
    LoadJob,
    Place,
    SaveJob,
    StepPlan,
    WantedDigests,
    WeightDigests,
    WorkerReport,
)
from kvoffload.connector.engine.geometry import EngineCache, describe_cache
from kvoffload.connector.engine.pipeline import Stage, decode_stage, encode_stage, join_stages, name_pipeline
from kvoffload.connector.identity.agreement import SharingSettings, agree, make_register, name_node
from kvoffload.connector.worker_side import WorkerSettings
from kvoffload.errors import RegistrationError, ServerError
from kvoffload.kvspec import HeadUnits
from kvoffload.native import digest_record
from kvoffload.protocol import Register
from tests.kit.connector.engine_configs import full, make_config, make_tensors
from tests.kit.connector.local_client import StockedClient
from tests.kit.connector.workers import (
    PAGE,
    Move,
    SharedCache,
    TestedWorker,
    block_of,
    collect,
    identify,
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
    # It has made digests of the records that it compares: the same that the writer makes.
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
        worker.submit(StepPlan(apart=((1, 0),)))
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


def test_groups_of_an_engine_have_as_many_equal_ranks_as_all_their_layers() -> None:
    worker = make_worker(ranks=4, replicas=4)
    worker.replicas = {"a": 2}
    start(worker)
    assert worker.facts is not None
    assert [group.replicas for group in worker.facts.groups] == [1, 2]
    assert [group.shards for group in worker.shared.registers[0].groups] == [4, 2]
    worker.close()


# ---- units of heads ----

LAYERS = ("a", "b")


class Sized(NamedTuple):
    """One rank of an engine whose ranks hold some of the model's heads each."""

    worker: TestedWorker
    tensors: dict[str, torch.Tensor]
    heads: slice

    def block(self, number: int) -> torch.Tensor:
        """Of all layers, as (layer, head, token, content)."""
        return torch.stack([self.tensors[name][number] for name in LAYERS])


def start_sized(shared: SharedCache, ranks: int, *, heads: int = 4) -> list[Sized]:
    """All ranks of an engine, each with its heads of the same numbers in its blocks."""
    units = HeadUnits(heads=heads, ranks=ranks)
    engine = []
    for rank in range(ranks):
        held = max(heads // ranks, 1)
        first = rank * heads // ranks
        config = make_config((LAYERS, full(num_kv_heads=held)), num_blocks=6)
        tensors = make_tensors(config)
        cache = EngineCache(config=config, tensors=tensors, sharing={}, layout="LBHNC", hash_block_size=4)
        geometry = replace(describe_cache(cache), units=units)
        worker = make_worker(rank=rank, ranks=ranks, shared=shared, units=units)
        alike = dict.fromkeys(LAYERS, units.replicas)
        worker.register(geometry, tensors, scale_views={}, identify=identify, replicas=alike)
        for name, numbers in zip(LAYERS, numbers_of(heads), strict=True):
            tensors[name].copy_(numbers[:, first : first + held])
        engine.append(Sized(worker, tensors, slice(first, first + held)))
    return engine


def numbers_of(heads: int) -> torch.Tensor:
    """As (layer, block, head, token, content)."""
    shape = (len(LAYERS), 6, heads, 4, 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("saver", "loader", "heads"), [(1, 2, 4), (2, 1, 4), (4, 2, 4), (2, 2, 4), (1, 4, 2), (4, 1, 2)]
)
def test_ranks_of_any_number_read_what_those_of_another_saved(saver: int, loader: int, heads: int) -> None:
    shared = SharedCache()
    wanted = numbers_of(heads)[:, 1]
    for rank in start_sized(shared, saver, heads=heads):
        save(rank.worker, Move(0, 1, 0), Move(0, 2, 1), writers=[0, max(saver // heads, 1) - 1])
        rank.worker.close()
    records = [shared.record(Move(0, 1, 0), shard=head).tobytes() for head in range(heads)]
    assert records == [wanted[:, head].contiguous().view(torch.uint8).numpy().tobytes() for head in range(heads)]
    assert len({shared.digests[0, head] for head in range(heads)}) == heads
    for rank in start_sized(shared, loader, heads=heads):
        assert load(rank.worker, Move(0, 4, 0), Move(0, 3, 1), is_checked=True)
        assert torch.equal(rank.block(4), wanted[:, rank.heads])
        assert torch.equal(rank.block(3), numbers_of(heads)[:, 2, rank.heads])
        assert torch.equal(rank.block(5), numbers_of(heads)[:, 5, rank.heads])
        rank.worker.close()


def test_a_damaged_unit_is_seen_by_the_ranks_that_load_it_and_by_no_others() -> None:
    shared = SharedCache()
    (whole,) = start_sized(shared, 1)
    save(whole.worker, Move(0, 1, 0))
    shared.record(Move(0, 1, 0), shard=3)[5] ^= 1
    assert not load(whole.worker, Move(0, 2, 0), is_checked=True)
    first, second = start_sized(shared, 2)
    assert load(first.worker, Move(0, 2, 0), is_checked=True)
    assert not load(second.worker, Move(0, 2, 0), is_checked=True)
    for rank in (whole, first, second):
        rank.worker.close()


@pytest.mark.parametrize("heads", [2, 4])
def test_engines_of_any_number_of_ranks_are_one_to_the_server_but_for_that_number(heads: int) -> None:
    shared = SharedCache()
    for ranks in (1, 2, 4):
        for rank in start_sized(shared, ranks, heads=heads):
            rank.worker.close()
    registers = {replace(told, rank=0, ranks=1, report=b"") for told in shared.registers}
    assert len(shared.registers) == 7
    assert len(registers) == 1
    (group,) = shared.registers[0].groups
    assert (group.shards, group.record_bytes) == (heads, 2 * 4 * 32)


def test_a_rank_that_cannot_join_another_session_copies_nothing_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    worker, _ = start(make_worker(ranks=2, replicas=2))
    worker.shared.refusal = ServerError("it is full", remedy="")
    worker.submit(StepPlan(apart=((0, 0), (1, 0))))
    assert "ranks are not stored apart: it is full" in caplog.text
    assert worker.take_results(is_idle=False)[2].places == {0: ()}
    worker.submit(save_job(worker, Move(1, 1, 0)))
    assert collect(worker, 1)[2].failed == {1}
    worker.close()


# ---- stages ----


def beside_a_larger_stage(frame: bytes) -> list[bytes]:
    """The second stage's records have 64 bytes more."""
    return [frame, encode_stage(Stage(fingerprint=b"e" * 32, groups=larger(decode_stage(frame).groups)))]


def larger(groups: tuple[GroupFacts, ...]) -> tuple[GroupFacts, ...]:
    return tuple(replace(group, record_bytes=group.record_bytes + 64) for group in groups)


def test_of_a_pipeline_a_rank_copies_its_own_stages_records() -> None:
    """Groups are numbered by block table, and stage by stage: the second stage has 1 and 3."""
    worker, tensors = start(make_worker(pipeline_ranks=2, exchange=beside_a_larger_stage))
    assert worker.facts is not None
    groups = join_stages([worker.facts.groups, larger(worker.facts.groups)])
    name = name_pipeline([worker.facts.fingerprint, b"e" * 32])
    [told] = worker.shared.registers
    assert replace(told, report=b"", identity=()) == replace(
        make_register(name, groups, worker.settings.sharing), identity=()
    )
    assert told.report.startswith(b"6 blocks, 1 allocations, every byte accounted for")
    assert worker.facts.places == (worker.shared.place,)
    assert worker.take_results(is_idle=False)[2] == WorkerReport()
    mine, others = (Move(2, 1, 0), Move(0, 2, 1)), (Move(3, 1, 2), Move(1, 2, 3))
    for move in others:
        worker.shared.record(move)[:] = 255
    worker.submit(save_job(worker, mine[0], others[0], mine[1], others[1]))
    *_, report = collect(worker, 1)
    assert (report.saved, report.failed) == ({1: 1}, frozenset())
    worker.shared.keep_digests(mine, report.digests[1][0], shard=0)
    assert worker.shared.record(mine[0]).tolist() == block_of(tensors, 1)
    assert worker.shared.record(mine[1]).tolist() == block_of(tensors, 2, 152)
    for move in others:
        assert set(worker.shared.record(move).tolist()) == {255}
    for move in mine:
        record = worker.shared.record(move).tobytes()
        digest = digest_record(record, fingerprint=name, block_hash=name_of(move.slot), group=move.group, shard=0)
        assert worker.shared.digests[move.slot, 0] == digest
    assert load(worker, Move(2, 3, 0), Move(3, 3, 2), Move(0, 4, 1), Move(1, 4, 3), is_checked=True)
    assert block_of(tensors, 3) == block_of(tensors, 1)
    worker.close()


def test_a_job_without_records_of_its_stage_ends_for_a_rank_at_once() -> None:
    worker, tensors = start(make_worker(pipeline_ranks=2, exchange=beside_a_larger_stage))
    engine = replace_engine(worker, PassingEngine)
    before = memory_of(tensors).clone()
    worker.submit(join_plans(save_job(worker, Move(1, 1, 0)), load_job(worker, Move(3, 2, 1), is_checked=True)))
    finished, failed, report = worker.take_results(is_idle=False)
    assert (finished, failed, report.saved, report.digests) == ({"r1"}, set(), {1: 1}, {})
    assert engine.plans == []
    assert memory_of(tensors).equal(before)
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

    def exchange(frame: bytes) -> list[bytes]:
        mine = decode_stage(frame)
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
    engine = agree(facts, worker.settings.sharing)
    of_scheduler = make_register(
        engine.fingerprint, engine.groups, worker.settings.sharing, description=engine.description
    )
    for rank, told in enumerate(shared.registers):
        assert replace(told, report=b"", rank=0) == replace(of_scheduler, rank=0)
        assert told.rank == rank


# ---- several machines ----


class NodeWorker(TestedWorker):
    """The last rank, on the second of two machines, with a client for what the scheduler side wants there."""

    def __init__(self, ranks: int = 2, *, replicas: int = 1, units: HeadUnits | None = None) -> None:
        sharing = SharingSettings(
            hash_block_size=4, hash_algorithm="sha256", hash_seed="0", tensor_ranks=ranks, nodes=2, units=units
        )
        settings = WorkerSettings(rank=ranks - 1, sharing=sharing)
        super().__init__(settings, SharedCache(), lambda frame: (frame,) * ranks, replicas)
        self._open_node = self.open_node
        self.opened: list[StockedClient] = []

    def open_node(self, register: Register, groups: Sequence[GroupFacts]) -> StockedClient:
        assert len(groups) == 2
        self.opened.append(StockedClient(register))
        return self.opened[-1]


def test_the_lowest_rank_of_another_machine_speaks_for_its_server() -> None:
    worker, _ = start(NodeWorker())
    assert isinstance(worker, NodeWorker)
    (client,) = worker.opened
    assert worker.facts is not None
    assert worker.facts.node_report is not None
    assert worker.facts.node_report.state is not None
    assert worker.facts.node_report.state.memory_id == client.memory_id
    assert [group.shards for group in client.register.groups] == [1, 1]
    assert client.register.fingerprint == name_node(worker.facts.fingerprint, 1, 2)
    worker.obey({0: NodeOrders(slots={0: 9}), 1: NodeOrders(slots={0: 2}, retired=(worker.shared.place.memory_id,))})
    report = worker.take_results(is_idle=False)[2]
    assert [len(slots) for slots in report.nodes[1].slots] == [2]
    assert worker.cache is not None
    assert worker.cache.places() == ()
    worker.close()
    assert client.is_closed


@pytest.mark.parametrize(("ranks", "replicas", "shard"), [(2, 1, 0), (4, 1, 1), (4, 2, 0), (4, 4, 0)])
def test_a_rank_takes_the_part_of_its_own_machine(ranks: int, replicas: int, shard: int) -> None:
    """A server counts its shards from 0, the scheduler side all of them."""
    worker, tensors = start(NodeWorker(ranks, replicas=replicas))
    assert isinstance(worker, NodeWorker)
    assert len(worker.opened) == (ranks == 2), "the lowest rank alone"
    shared = worker.shared
    address = shared.slot_of(Move(1, 1, 0))
    places = (Place(1, 1), shared.place)
    moves = BlockMoves(np.array([1]), np.array([1]), np.array([[1 << 60, address]], np.uint64))
    worker.submit(StepPlan(saves=(SaveJob(1, Place(99, 0), moves, places=places),)))
    _, _, report = collect(worker, 1)
    assert (report.failed, set(report.digests[1])) == (frozenset(), {ranks - 1})
    assert shared.record(Move(1, 1, 0), shard=shard).tolist() == block_of(tensors, 1)
    shared.keep_digests((Move(1, 1, 0),), report.digests[1][ranks - 1], shard=shard)
    moves = BlockMoves(np.array([1]), np.array([3]), moves.addresses)
    for is_whole in (True, False):
        digests = np.full((2 * (shard + 1), 1), 7, np.uint64)
        digests[-1] = shared.digests[0, shard] ^ (not is_whole)
        wanted = WantedDigests(name_of(0), digests)
        worker.submit(StepPlan(loads=(LoadJob("a", Place(99, 0), moves, wanted, places),)))
        assert collect(worker, 1)[:2] == ({"a"}, set() if is_whole else {"a"})
    assert block_of(tensors, 3) == block_of(tensors, 1)
    worker.close()


def test_ranks_of_several_machines_write_once_on_each_what_they_all_hold() -> None:
    """There are four ranks with the same bytes, two of them on each machine."""
    worker, tensors = start(NodeWorker(4, replicas=4))
    shared = worker.shared
    assert [group.shards for group in shared.client.register.groups] == [1, 1]
    places = (Place(1, 1), shared.place)
    addresses = np.array([[0, shared.slot_of(Move(1, at, at))] for at in (1, 2)], np.uint64)
    moves = BlockMoves(np.array([1, 1]), np.array([1, 2]), addresses)
    job = SaveJob(1, Place(99, 0), moves, np.array([0, 1], np.uint8), None, places)
    shared.record(Move(1, 1, 1))[:] = 7
    worker.submit(StepPlan(saves=(job,)))
    assert len(collect(worker, 1)[2].digests[1][3]) == 16
    assert shared.record(Move(1, 1, 1)).tolist() == [7] * PAGE
    assert shared.record(Move(1, 2, 2)).tolist() == block_of(tensors, 2)
    worker.close()
