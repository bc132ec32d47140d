"""Looks into a running connector, on the scheduler's side and in the workers, and damages its records on purpose.

Functions that take a `worker` run there (`Engine.ask_workers`); those that take an `engine` may be called from a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvoffload.native import digest_run, sha256
from tests.vllm.engine import Engine, Json

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvoffload.connector.facade import KVOffloadConnector
    from kvoffload.connector.step_plan import LoadJob
    from kvoffload.connector.worker_side import WorkerSide

T = TypeVar("T")


def transfer(**overrides: object) -> dict[str, object]:
    """The engine argument that selects our connector with these settings. `policy` is kv_load_failure_policy."""
    policy = overrides.pop("policy", None)
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"memory": "1GiB", **overrides},
        **({"kv_load_failure_policy": policy} if policy else {}),
    }


TWO_RANKS = {"tensor_parallel_size": 2, "max_num_batched_tokens": 700}
"""For the GDN model with its own processes: the tests that need two ranks share one engine, it takes long to start."""


# ---- scheduler ----


def scheduler_connector(engine: Engine) -> KVOffloadConnector:
    """The connector's scheduler side, of an engine in this process."""
    connector = engine.core.scheduler.connector
    assert connector is not None
    return connector  # type: ignore[return-value]


def ask_scheduler(engine: Engine, function: Callable[..., T], *args: object) -> T:
    """`function(connector, *args)` with the scheduler side of an engine in this process.

    No call of a test reaches the scheduler of an engine with its own processes; what went wrong there is in the
    connector log (`plugin_log.read_connector_log`), and a pin that is left makes `Engine.reset_local` fail.
    """
    return function(scheduler_connector(engine), *args)


def drain(engine: Engine) -> None:
    """Until the connector owes nothing: no save, no load, no pin. The engine has no requests meanwhile."""
    engine.drain()
    if not engine.has_own_processes:
        assert not scheduler_connector(engine).has_pending_push_work()


def clear(engine: Engine) -> None:
    """Forgets every record, as a change of weights does, and every prefix of the engine's own."""
    engine.forget()


def index_stats(engine: Engine) -> dict[str, int]:
    """The fields of IndexStats."""
    return ask_scheduler(engine, _index_stats)


def pins(engine: Engine) -> int:
    """Source blocks that are pinned now."""
    return ask_scheduler(engine, lambda connector: connector._scheduler._saves._pins.count)


def pending(engine: Engine) -> dict[str, int]:
    """Transfers that some rank has not reported, and what the admission guard still reserves."""
    return ask_scheduler(engine, _pending)


def faults(engine: Engine) -> dict[str, int]:
    """Faults that were answered as misses, by hook: of all workers, and of a scheduler in this process."""
    sides = engine.ask_workers(_worker_faults)
    if not engine.has_own_processes:
        sides.append(scheduler_connector(engine).faults)
    total: dict[str, int] = {}
    for side in sides:
        for hook, number in side.items():
            total[hook] = total.get(hook, 0) + number
    return total


def entries(engine: Engine) -> list[tuple[int, str, int]]:
    """(group, block hash, slot) of every readable entry, oldest slot first."""
    return ask_scheduler(engine, _entries)


@contextmanager
def watch_loads(engine: Engine) -> Iterator[list[int]]:
    """Collects how many tokens each load that is planned meanwhile brings. For an engine in this process."""
    side = scheduler_connector(engine)._scheduler
    assert side is not None
    seen: list[int] = []
    plan_load = side.plan_load

    def watched(request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        seen.append(external)
        plan_load(request, block_ids, external)

    side.plan_load = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del side.plan_load  # type: ignore[method-assign]


@contextmanager
def watch_load_jobs(engine: Engine) -> Iterator[list[LoadJob]]:
    """Collects the jobs of loads that are planned meanwhile: which record goes to which block."""
    side = scheduler_connector(engine)._scheduler
    assert side is not None
    restores = side._restores
    assert restores is not None
    seen: list[LoadJob] = []
    take_jobs = restores.take_jobs

    def watched() -> tuple[LoadJob, ...]:
        jobs = take_jobs()
        seen.extend(jobs)
        return jobs

    restores.take_jobs = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del restores.take_jobs  # type: ignore[method-assign]


def _index_stats(connector: KVOffloadConnector) -> dict[str, int]:
    assert connector._scheduler is not None
    assert connector._scheduler.index is not None
    stats = connector._scheduler.index.stats
    return {name: getattr(stats, name) for name in stats.__dataclass_fields__}


def _pending(connector: KVOffloadConnector) -> dict[str, int]:
    side = connector._scheduler
    assert side is not None
    assert side._saves is not None
    assert side._restores is not None
    reserved = sum(side._restores._admission._rest.values())
    return {"saves": side._saves.pending, "loads": side._restores.pending, "reserved_blocks": reserved}


def _entries(connector: KVOffloadConnector) -> list[tuple[int, str, int]]:
    index = connector._scheduler.index if connector._scheduler is not None else None
    assert index is not None
    readable = (entry for key, entry in index._by_key.items() if index.lookup(key))
    return [(entry.key.group, entry.key.block_hash.hex(), entry.slot) for entry in readable]


# ---- workers ----


def worker_side() -> WorkerSide:
    """This process's worker side; for functions that run in a worker."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    side = get_kv_transfer_group()._worker  # type: ignore[attr-defined]
    assert side is not None
    return side


def completeness_report(_worker: Any) -> Json:
    """The registration's proof: by owner, how the bytes of each allocation are accounted for."""
    report = worker_side().registration.report
    return {
        "text": str(report),
        "num_blocks": report.num_blocks,
        "storage_bytes": [flat.untyped_storage().nbytes() for flat in worker_side().registration.memory.values()],
        "allocations": [
            {
                "size_bytes": allocation.size_bytes,
                "page_bytes": allocation.page_bytes,
                "excluded_bytes": allocation.excluded_bytes,
                "padding_bytes": allocation.padding_bytes,
                "layers": dict(allocation.layers),
            }
            for allocation in report.allocations
        ],
        "elsewhere": [list(pair) for pair in report.elsewhere],
    }


def record_bytes(_worker: Any) -> Json:
    """The size of a record, group by group as the connector counts them."""
    facts = worker_side().facts
    assert facts is not None
    return [group.record_bytes for group in facts.groups]


def record_digests(_worker: Any) -> Json:
    """SHA-256 of each record's bytes, by slot."""
    records = worker_side()._records._records
    return {str(slot): sha256(record.memory.data).hex() for slot, record in records.items()}


def block_digests(_worker: Any, group: int, blocks: Sequence[int]) -> Json:
    """SHA-256 of what the group's blocks hold in the engine's cache now, as a record of each would be."""
    import torch

    from kvoffload.transfer.plain_copy import PlainCopy

    side = worker_side()
    page_map, number = side.registration.page_map, int(side._group_numbers[group])
    rows = torch.empty((len(blocks), page_map.groups[number].record_bytes), dtype=torch.uint8)
    PlainCopy(page_map, side.registration.memory).save(number, list(blocks), rows)
    return [sha256(row.numpy().data).hex() for row in rows]


def zero_slots(worker: Any, slots: Sequence[int], rank: int | None = None) -> Json:
    """Overwrites records with zeros, unnoticed by digests, in one rank or all. How many bytes that changed."""
    if rank not in (None, worker.rank):
        return 0
    changed = 0
    for slot in slots:
        memory = worker_side()._records._records[slot].memory
        _originals[slot] = memory.copy()
        changed += int(np.count_nonzero(memory))
        _overwrite(slot, np.zeros_like(memory))
    return changed


def _put_back(_worker: Any) -> Json:
    while _originals:
        _overwrite(*_originals.popitem())
    return True


def _overwrite(slot: int, content: npt.NDArray[np.uint8]) -> None:
    record = worker_side()._records._records[slot]
    record.memory[:] = content
    if record.digest is not None:
        record.digest = digest_run(content.data)


# In a worker: what zero_slots has overwritten.
_originals: dict[int, npt.NDArray[np.uint8]] = {}


@contextmanager
def zeroed(engine: Engine, slots: Sequence[int], *, rank: int | None = None) -> Iterator[None]:
    """Within it, these records are zeros in that rank (None: in all); afterwards they are what they were."""
    changed = sum(engine.ask_workers(zero_slots, slots, rank))
    assert changed > 0, "the records were zeros already"
    try:
        yield
    finally:
        engine.ask_workers(_put_back)


def flip_byte(_worker: Any, slot: int, position: int) -> Json:
    """Inverts one byte of a record, as a fault of the memory would: its digest stays what it was."""
    worker_side()._records._records[slot].memory[position] ^= 255
    return True


def flip_bit(_worker: Any, slot: int, position: int) -> Json:
    """The same with one bit."""
    worker_side()._records._records[slot].memory[position] ^= 1
    return True


def zero_group(engine: Engine, group: int) -> int:
    """Overwrites all kept records of one group with zeros, in every rank. How many bytes that changed."""
    slots = [slot for index, _, slot in entries(engine) if index == group]
    return sum(engine.ask_workers(zero_slots, slots))


def restored_digests(engine: Engine) -> Mapping[tuple[int, str], list[str]]:
    """(group, block hash) -> its record's digest in each rank, for every readable entry."""
    ranks = engine.ask_workers(record_digests)
    return {(group, name): [rank[str(slot)] for rank in ranks] for group, name, slot in entries(engine)}


def _worker_faults(_worker: Any) -> Json:
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    return get_kv_transfer_group().faults  # type: ignore[attr-defined]
