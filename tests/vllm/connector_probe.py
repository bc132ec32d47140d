"""Looks into a running connector, on the scheduler's side and in the workers, and damages its records on purpose.

Functions that take a `worker` run there (`Engine.ask_workers`); those that take an `engine` may be called from a test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload.native import sha256
from tests.vllm import pool_probe
from tests.vllm.engine import Engine, Json, make_prompt
from tests.vllm.pool_probe import Entry

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvoffload.connector.common.step_plan import LoadJob
    from kvoffload.connector.facade import KVOffloadConnector
    from kvoffload.connector.scheduler_side import SchedulerSide
    from kvoffload.connector.worker_side import WorkerSide

# A server that has to wait for its turn on a busy machine must not decide what a test finds, nor what steps took there.
PATIENCE = {"acquire_deadline": "20s", "load_policy": "always"}
SERVED_TIMEOUT_S = 120.0


def transfer(**overrides: object) -> dict[str, object]:
    """The engine argument that selects our connector with these settings. `policy` is kv_load_failure_policy, `role` is
    kv_role."""
    policy, role = overrides.pop("policy", None), overrides.pop("role", "kv_both")
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"memory": "512MiB", **PATIENCE, **overrides},
        **({"kv_load_failure_policy": policy} if policy else {}),
    }


INSPECTED = {"scheduler_cls": "tests.vllm.inspected_scheduler.InspectedAsyncScheduler"}
"""For an engine with its own processes that a test looks into."""
INSPECTED_SYNC = {"scheduler_cls": "tests.vllm.inspected_scheduler.InspectedScheduler"}
"""The same where the scheduler has to know the tokens: stages of a pipeline take theirs from it on a CPU, and drafts
from the prompt come to it."""
TWO_RANKS = {"tensor_parallel_size": 2, "max_num_batched_tokens": 700, **INSPECTED}
"""For the GDN model with its own processes: the tests that need two ranks share one engine, it takes long to start."""
TWO_STAGES = {
    "pipeline_parallel_size": 2,
    "max_num_batched_tokens": 700,
    **INSPECTED_SYNC,
}


def resolve_connector(_worker: Any = None) -> str:
    """Returns what this process's factory makes of our name. Takes a worker so that `Engine.ask_workers` can run it
    there."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        found = KVConnectorFactory.get_connector_class_by_name("KVOffloadConnector")
    except ValueError:  # unknown name
        return ""
    return f"{found.__module__}.{found.__qualname__}"


# ---- scheduler ----


def scheduler_connector(engine: Engine) -> KVOffloadConnector:
    """The connector's scheduler side, of an engine in this process."""
    return find_ours(engine.core.scheduler.connector)


def find_ours(connector: Any) -> KVOffloadConnector:
    """A connector, or the one of its children that is ours."""
    from kvoffload.connector.facade import KVOffloadConnector

    (ours,) = (one for one in getattr(connector, "sub_connectors", [connector]) if isinstance(one, KVOffloadConnector))
    return ours


def prepare(engine: Engine) -> None:
    """Prepares an engine. Is called when an engine has started: what it publishes is known from then on, and arrives in
    a drain."""
    config = engine.llm.llm_engine.vllm_config
    if config.kv_transfer_config is None:
        return
    if not engine.has_own_processes:
        _await_private_server(engine)
        pool_probe.follow(_side(engine))
        engine.settle = lambda: pool_probe.settle(_side(engine))
    elif config.scheduler_config.scheduler_cls is not None:
        engine.settle = lambda: ask_core(engine, "settle_pool")


def _await_private_server(engine: Engine) -> None:
    """Where the machine's other work holds it up for long, the engine starts without it and is served later."""
    side: Any = _side(engine)
    clients: list[Any] = [side.parts.cache, worker_side().cache]
    if not all(callable(client.settings.socket) for client in clients):
        return
    assert all(client.wait_until_served(SERVED_TIMEOUT_S) for client in clients), [one.fault for one in clients]
    if not side.parts.places.are_all_known:
        # Workers say so with the next step.
        prompt = make_prompt(seed=0, length=2)
        if engine.llm.runner_type == "pooling":
            engine.llm.embed([{"prompt_token_ids": prompt}] * 2, use_tqdm=False)
            engine.drain()
        else:
            engine.generate(prompt, max_tokens=2)


def ask_core(engine: Engine, method: str, *args: object) -> Any:
    """A method of the engine's core, which may run in another process."""
    if engine.has_own_processes:
        return engine.llm.llm_engine.engine_core.call_utility(method, *args)  # type: ignore[attr-defined]
    return getattr(engine.core, method)(*args)


def drain(engine: Engine) -> None:
    """Waits until the connector owes nothing: no save, no load, no pin. The engine has no requests meanwhile."""
    engine.drain()
    if not engine.has_own_processes:
        assert not scheduler_connector(engine).has_pending_push_work()


def pool_stats(engine: Engine) -> dict[str, int]:
    """Counts of the server's pool, of all that ever was in it. For an engine in this process, as what follows."""
    return pool_probe.count_pool(_side(engine))


def tenants(engine: Engine) -> dict[str, int]:
    return pool_probe.count_tenants(_side(engine))


def held(engine: Engine) -> dict[str, int]:
    """Counts the requests, transfers and blocks that the scheduler side keeps."""
    return pool_probe.count_held(_side(engine))


def pins(engine: Engine) -> int:
    """Source blocks that are pinned now."""
    return held(engine)["pins"]


def leased_blocks(engine: Engine) -> int:
    """Records that loads on their way read."""
    parts: Any = _side(engine).parts
    found = [load.found for load in parts.restores.loads.values() if load.found is not None]
    return sum(len(group.addresses) for one in found for group in one.groups)


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


def entries(engine: Engine) -> list[Entry]:
    """All blocks that a request can find now, in the order of their saves. An engine with its own processes has to be
    INSPECTED."""
    if engine.has_own_processes:
        return [Entry(*entry) for entry in ask_core(engine, "list_entries")]
    return pool_probe.follow(_side(engine)).entries()


def names(engine: Engine) -> set[tuple[int, str]]:
    """(group, name) of the same, without a check of their bytes. For an engine in this process."""
    return {(group, name.hex()) for group, name in pool_probe.follow(_side(engine)).names()}


@contextmanager
def watch_loads(engine: Engine) -> Iterator[list[int]]:
    """Collects how many tokens each load that is planned meanwhile brings. For an engine in this process."""
    side = _side(engine)
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
    parts = _side(engine).parts
    assert parts is not None
    restores = parts.restores
    seen: list[LoadJob] = []
    take_jobs = restores.take_jobs

    def watched() -> tuple[tuple[LoadJob, ...], tuple[str, ...]]:
        jobs, doomed = take_jobs()
        seen.extend(jobs)
        return jobs, doomed

    restores.take_jobs = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del restores.take_jobs  # type: ignore[method-assign]


def _side(engine: Engine) -> SchedulerSide:
    side = scheduler_connector(engine).scheduler_side
    assert side is not None
    return side


# ---- workers ----


def worker_side() -> WorkerSide:
    """This process's worker side; for functions that run in a worker."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    side = find_ours(get_kv_transfer_group()).worker_side
    assert side is not None
    return side


def completeness_report(_worker: Any) -> Json:
    """Returns the registration's proof: by owner, how the bytes of each allocation are accounted for."""
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


def record(group: int, address: int) -> npt.NDArray[np.uint8]:
    """This rank's part of a record, as it lies in the server's memory; for functions that run in a worker."""
    side: Any = worker_side()
    memory, records = side.cache.memory(side.cache.memory_id), side.records
    size_bytes = records.part.run * records.record_bytes[group]
    view: npt.NDArray[np.uint8] = memory.view(address + records.begin_of(group), size_bytes)
    return view


def record_digests(_worker: Any, records: Sequence[tuple[int, int]]) -> Json:
    """SHA-256 of these records' bytes, each given as (group, address)."""
    return [sha256(record(group, address).data).hex() for group, address in records]


def block_digests(_worker: Any, group: int, blocks: Sequence[int]) -> Json:
    """SHA-256 of what the group's blocks hold in the engine's cache now, as a record of each would be."""
    import torch

    from tests.kit.transfer.plain_copy import PlainCopy

    side = worker_side()
    assert side.records is not None
    page_map, first = side.registration.page_map, int(side.records.own_groups[group])
    records = []
    for number in range(first, first + side.records.part.run):
        records.append(torch.empty((len(blocks), page_map.groups[number].record_bytes), dtype=torch.uint8))
        PlainCopy(page_map, side.registration.memory).save(number, list(blocks), records[-1])
    return [sha256(row.numpy().data).hex() for row in torch.cat(records, dim=1)]


def zero_record(worker: Any, group: int, address: int, rank: int | None = None, size_bytes: int | None = None) -> Json:
    """Overwrites the first bytes of a record with zeros, or all, in one rank or all. How many bytes that changed."""
    if rank not in (None, worker.rank):
        return 0
    content = record(group, address)
    _originals[group, address] = content.copy()
    changed = int(np.count_nonzero(content[:size_bytes]))
    content[:size_bytes] = 0
    return changed


def _put_back(_worker: Any) -> Json:
    while _originals:
        (group, address), content = _originals.popitem()
        record(group, address)[:] = content
    return True


# In a worker: what zero_record has overwritten.
_originals: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}


@contextmanager
def zeroed(engine: Engine, entry: Entry, *, rank: int | None = None, size_bytes: int | None = None) -> Iterator[None]:
    """Makes this record zeros in that rank (None: in all) within the block; afterwards it has its old bytes. With
    `size_bytes` only so many bytes at its beginning.

    The change is not noticed, because digests are checked only if the engine has `verify` set to "always".
    """
    changed = sum(engine.ask_workers(zero_record, entry.group, entry.address, rank, size_bytes))
    assert changed > 0, "the record was zeros already"
    try:
        yield
    finally:
        engine.ask_workers(_put_back)


def flip_bit(_worker: Any, group: int, address: int, position: int) -> Json:
    """Inverts one bit of a record, as a fault of the memory would: its digest stays what it was."""
    record(group, address)[position] ^= 1
    return True


def _worker_faults(_worker: Any) -> Json:
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    return dict(find_ours(get_kv_transfer_group()).faults)
