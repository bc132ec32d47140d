"""A worker side on CPU tensors that vLLM's own code made, and how tests ask it for copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from kvoffload.cache import ReservedSlots
from kvoffload.connector.common.step_plan import (
    BlockMoves,
    LoadJob,
    Place,
    SaveJob,
    StepPlan,
    WantedDigests,
    WeightDigests,
    WorkerReport,
)
from kvoffload.connector.engine.geometry import EngineCache, describe_cache
from kvoffload.connector.engine.pipeline import Exchange
from kvoffload.connector.identity.agreement import SharingSettings
from kvoffload.connector.identity.engine import describe_engine
from kvoffload.connector.worker_side import WorkerSettings, WorkerSide
from kvoffload.errors import ServerError
from kvoffload.keys.identity import Identity
from kvoffload.kvspec import HeadUnits, KVGeometry
from kvoffload.native import finish_digests
from kvoffload.protocol import Register
from kvoffload.transfer import CopyEngine
from tests.kit.connector.engine_configs import full, make_config, make_tensors, make_vllm_config, recurrent
from tests.kit.connector.local_client import LocalClient, LocalPlaces

NUM_BLOCKS = 6
PAGE = 256
MAX_POLLS = 10_000  # each waits up to 2 ms for a copy of a few bytes
Tensors = dict[str, torch.Tensor]
T = TypeVar("T")


class Move(NamedTuple):
    """`slot` is a number that the test gives; the slot is reserved when it is first named."""

    group: int
    block: int
    slot: int


class SharedCache:
    """State that the ranks of one engine share, and that its scheduler would know."""

    def __init__(self) -> None:
        self.opened: list[LocalPlaces] = []
        self.clients: dict[bytes, LocalClient] = {}
        """Clients by fingerprint: an engine that has begun to store some groups apart has another one."""
        self.refusal: ServerError | None = None
        """The answer to every rank that joins; None: it may join."""
        self.registers: list[Register] = []
        self.digests: dict[tuple[int, int], int] = {}
        """Digests of saved records, by slot and shard."""
        self._slots: dict[int, ReservedSlots] = {}

    @property
    def client(self) -> LocalClient:
        """The client of the session that was opened last."""
        return self.opened[-1].client

    @property
    def place(self) -> Place:
        return Place(self.client.memory_id, self.client.session)

    def open(self, register: Register) -> LocalPlaces:
        if self.refusal is not None:
            raise self.refusal
        if register.fingerprint not in self.clients:
            self.clients[register.fingerprint] = LocalClient(register)
            self._slots.clear()
        self.opened.append(LocalPlaces(self.clients[register.fingerprint]))
        self.registers.append(register)
        return self.opened[-1]

    def slot_of(self, move: Move) -> int:
        if move.slot not in self._slots:
            self._slots[move.slot] = self.client.take(move.group, 1)
        return int(self._slots[move.slot].addresses[0])

    def record(self, move: Move, *, shard: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """All bytes that the slot has for this shard."""
        size_bytes = self.client.register.groups[move.group].record_bytes
        return self.client.memory(self.place.memory_id).view(self.slot_of(move) + shard * size_bytes, size_bytes)

    def make_moves(self, moves: tuple[Move, ...]) -> BlockMoves:
        return BlockMoves(
            np.array([move.group for move in moves], np.int64),
            np.array([move.block for move in moves], np.int64),
            np.array([self.slot_of(move) for move in moves], np.uint64),
        )

    def keep_digests(self, moves: tuple[Move, ...], totals: bytes, *, shard: int) -> None:
        """Makes digests of a rank's report, as the scheduler side does."""
        for at, move in enumerate(moves):
            finished = finish_digests(
                totals[16 * at : 16 * at + 16],
                self.client.register.groups[move.group].record_bytes,
                fingerprint=self.client.register.fingerprint,
                block_hashes=name_of(move.slot),
                group=move.group,
                shard=shard,
            )
            self.digests[move.slot, shard] = int.from_bytes(finished, "little")


def name_of(slot: int) -> bytes:
    return sha256(str(slot).encode()).digest()


class TestedWorker(WorkerSide):
    """One rank over a cache in this process."""

    __test__ = False

    def __init__(self, settings: WorkerSettings, shared: SharedCache, exchange: Exchange, replicas: int = 1) -> None:
        super().__init__(settings, shared.open, exchange)
        self.shared = shared
        self.replicas = {"r": replicas, "a": replicas}


def make_cache(num_blocks: int = NUM_BLOCKS) -> tuple[KVGeometry, Tensors]:
    """A recurrent group with padded pages over a full one."""
    config = make_config((["r"], recurrent()), (["a"], full()), num_blocks=num_blocks)
    tensors = make_tensors(config)
    cache = EngineCache(config=config, tensors=tensors, sharing={}, layout="LBHNC", hash_block_size=4)
    return describe_cache(cache), tensors


def identify(geometry: KVGeometry) -> Identity:
    return describe_engine(make_vllm_config(), geometry)


def make_worker(
    *,
    rank: int = 0,
    ranks: int = 1,
    pipeline_ranks: int = 1,
    replicas: int = 1,
    shared: SharedCache | None = None,
    exchange: Exchange | None = None,
    has_late_frees: bool = False,
    units: HeadUnits | None = None,
) -> TestedWorker:
    sharing = SharingSettings(
        hash_block_size=4,
        hash_algorithm="sha256",
        hash_seed="0",
        tensor_ranks=ranks,
        pipeline_ranks=pipeline_ranks,
        units=units,
    )
    settings = WorkerSettings(rank=rank, sharing=sharing, has_late_frees=has_late_frees)
    same = lambda frame: (frame,) * sharing.ranks  # noqa: E731
    held_alike = replicas if units is None else units.replicas
    return TestedWorker(settings, shared or SharedCache(), exchange or same, held_alike)


def start(worker: TestedWorker, weights: WeightDigests | None = None) -> tuple[TestedWorker, Tensors]:
    geometry, tensors = make_cache()
    worker.register(
        geometry,
        tensors,
        scale_views={},
        identify=identify,
        weights=weights or WeightDigests(),
        replicas=worker.replicas,
    )
    fill(tensors)
    return worker, tensors


def fill(tensors: Tensors) -> None:
    """Writes random bytes everywhere; both groups lie on them."""
    flat = memory_of(tensors)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))


def memory_of(tensors: Tensors) -> torch.Tensor:
    storage = next(iter(tensors.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def block_of(tensors: Tensors, block: int, length: int = PAGE) -> list[int]:
    return memory_of(tensors)[block * PAGE : block * PAGE + length].tolist()


def replace_engine(worker: WorkerSide, wrap: Callable[[CopyEngine], T]) -> T:
    """The stand-in that the worker's copies go through from now on."""
    assert worker.engine is not None
    engine = wrap(worker.engine)
    worker.engine = engine  # type: ignore[assignment]
    return engine


def collect(worker: WorkerSide, jobs: int) -> tuple[set[str], set[str], WorkerReport]:
    finished: set[str] = set()
    failed: set[str] = set()
    report = WorkerReport()
    for _ in range(MAX_POLLS):
        if len(finished) + sum(report.saved.values()) >= jobs:
            break
        more, bad, done = worker.take_results(is_idle=True)
        finished |= more
        failed |= bad
        report = report.aggregate(done)
    return finished, failed, report


def save_job(
    worker: TestedWorker, *moves: Move, job: int = 1, writers: Sequence[int] = (), compared: Sequence[bool] = ()
) -> StepPlan:
    """`writers`, `compared`: of each move, where there are ranks with the same bytes."""
    return StepPlan(
        saves=(
            SaveJob(
                job,
                worker.shared.place,
                worker.shared.make_moves(moves),
                np.array(writers, np.uint8) if writers else None,
                np.array(compared, np.bool_) if compared else None,
            ),
        )
    )


def load_job(worker: TestedWorker, *moves: Move, name: str = "r1", is_checked: bool = False) -> StepPlan:
    """Checked against the digests that were saved; a slot that was not saved has none."""
    shared, wanted = worker.shared, None
    if is_checked:
        shards = range(max(group.shards for group in shared.client.register.groups))
        digests = [[shared.digests.get((move.slot, shard), 0) for move in moves] for shard in shards]
        wanted = WantedDigests(b"".join(name_of(move.slot) for move in moves), np.array(digests, np.uint64))
    return StepPlan(loads=(LoadJob(name, shared.place, shared.make_moves(moves), wanted),))


def join_plans(*plans: StepPlan) -> StepPlan:
    return StepPlan(
        loads=tuple(load for plan in plans for load in plan.loads),
        saves=tuple(save for plan in plans for save in plan.saves),
    )


def save(worker: TestedWorker, *moves: Move, job: int = 1, writers: Sequence[int] = ()) -> None:
    plan = save_job(worker, *moves, job=job, writers=writers)
    worker.submit(plan)
    finished, failed, report = collect(worker, 1)
    assert (finished, failed, report.saved, report.failed) == (set(), set(), {job: 1}, frozenset())
    assert worker.records is not None
    part = worker.records.part
    written = tuple(itertools.compress(moves, part.find_written(plan.saves[0])))
    for rank, totals in report.digests.get(job, {}).items():
        assert rank == worker.rank
        reports = part.read_digests(totals, len(written))
        assert reports is not None
        for move, sums in zip(written, reports, strict=True):
            for offset, of_shard in enumerate(sums):
                shard = int(part.shards[move.group]) + offset
                worker.shared.keep_digests((move,), of_shard.tobytes(), shard=shard)


def load(worker: TestedWorker, *moves: Move, name: str = "r1", is_checked: bool = False) -> bool:
    """Loads blocks, and says whether that succeeded."""
    worker.submit(load_job(worker, *moves, name=name, is_checked=is_checked))
    finished, failed, _ = collect(worker, 1)
    assert finished == {name}
    return failed != {name}
