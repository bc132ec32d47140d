"""A worker side on CPU tensors that vLLM's own code made, and how tests ask it for copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from kvoffload.connector.geometry import EngineCache, describe_cache
from kvoffload.connector.identity import describe_engine
from kvoffload.connector.step_plan import BlockMove, LoadJob, SaveJob, StepPlan, WorkerReport
from kvoffload.connector.worker_side import WorkerSide
from kvoffload.keys.identity import Identity
from kvoffload.kvspec import KVGeometry
from kvoffload.transfer import CopyEngine
from tests.unit.connector.engine_configs import full, make_config, make_tensors, make_vllm_config, recurrent

NUM_BLOCKS = 6
PAGE = 256
MAX_POLLS = 10_000  # each waits up to 2 ms for a copy of a few bytes
Tensors = dict[str, torch.Tensor]
T = TypeVar("T")


def make_cache(num_blocks: int = NUM_BLOCKS) -> tuple[KVGeometry, Tensors]:
    """A recurrent group with padded pages over a full one."""
    config = make_config((["r"], recurrent()), (["a"], full()), num_blocks=num_blocks)
    tensors = make_tensors(config)
    cache = EngineCache(config=config, tensors=tensors, sharing={}, layout="LBHNC", hash_block_size=4)
    return describe_cache(cache), tensors


def identify(geometry: KVGeometry) -> Identity:
    return describe_engine(make_vllm_config(), geometry)


def make_worker(**changes: bool) -> WorkerSide:
    return WorkerSide(**{"self_test": True, "verify_always": False, **changes})


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


def replace_engine(worker: WorkerSide, wrap: Callable[[CopyEngine], T]) -> T:
    """The stand-in that the worker's copies go through from now on."""
    assert worker._engine is not None
    engine = wrap(worker._engine)
    worker._engine = engine  # type: ignore[assignment]
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


def save(worker: WorkerSide, *moves: BlockMove, job: int = 1) -> None:
    worker.submit(StepPlan(saves=(SaveJob(job, moves),)))
    assert collect(worker, 1) == (set(), set(), WorkerReport({job: 1}))


def load(worker: WorkerSide, *moves: BlockMove, name: str = "r1") -> bool:
    """Whether it succeeded."""
    worker.submit(StepPlan(loads=(LoadJob(name, moves),)))
    finished, failed, _ = collect(worker, 1)
    assert finished == {name}
    return failed != {name}
