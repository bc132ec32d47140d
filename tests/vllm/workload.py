"""Drives an engine step by step, holds its copies, and watches what becomes of blocks. Watching and looking is for
engines in this process only.

Nothing here measures time: a wait is a number of engine steps, a copy that must not end yet is held by a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvoffload.cache import Publication
from kvoffload.types import HASH_BYTES
from tests.kit.transfer.stand_ins import HeldEngine
from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine

if TYPE_CHECKING:
    from vllm import RequestOutput

    from kvoffload.connector.common.step_plan import BlockMoves, LoadJob, SaveJob, StepPlan, WorkerReport
    from kvoffload.protocol import Miss

MAX_STEPS = 5_000  # without a forward a step waits 2 ms for a copy, so this is far beyond any copy's time


class Run:
    """Requests under way in one engine, by name. Greedy, exactly as many tokens as asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.outputs: dict[str, RequestOutput] = {}
        """Requests that have ended by themselves."""
        self.ids: dict[str, str] = {}
        """The engine's own ids."""
        self.steps = 0

    def add(self, name: str, prompt: list[int], *, max_tokens: int = 4, logprobs: int | None = None) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, detokenize=False
        )
        self.ids[name] = self._engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def add_all(self, prompts: Mapping[str, list[int]], *, max_tokens: int = 4) -> None:
        for name, prompt in prompts.items():
            self.add(name, prompt, max_tokens=max_tokens)

    def abort(self, *names: str) -> None:
        self._engine.llm.llm_engine.abort_request(list(names))

    @property
    def is_done(self) -> bool:
        return not self._engine.llm.llm_engine.has_unfinished_requests()

    def step(self) -> None:
        self.steps += 1
        for output in self._engine.llm.llm_engine.step():
            if output.finished:
                self.outputs[output.request_id] = output  # type: ignore[assignment]

    def step_until(self, is_reached: Callable[[], bool], *, max_steps: int = MAX_STEPS) -> None:
        for _ in range(max_steps):
            if is_reached():
                return
            self.step()
        state = "" if self._engine.has_own_processes else describe_scheduler(self._engine)
        self.abort(*(self.ids.keys() - self.outputs.keys()))  # the engine is others' too
        raise AssertionError(f"not reached after {max_steps} steps; {state}")

    def finish(self, *, max_steps: int = MAX_STEPS) -> None:
        """Goes on until every request has ended."""
        self.step_until(lambda: self.is_done, max_steps=max_steps)

    def tokens(self, name: str) -> list[int]:
        return list(self.outputs[name].outputs[0].token_ids)


def serve(engine: Engine, prompts: Mapping[str, list[int]], *, max_tokens: int = 4) -> Run:
    """All of them at once, to their ends, and the connector's work too."""
    run = Run(engine)
    run.add_all(prompts, max_tokens=max_tokens)
    run.finish()
    engine.drain()
    return run


def serve_alone(engine: Engine, prompts: Mapping[str, list[int]], *, max_tokens: int = 4) -> dict[str, RequestOutput]:
    """One after the other, so that none is under pressure, each cold. Leaves all caches empty."""
    outputs = {}
    for name, prompt in prompts.items():
        outputs[name] = engine.generate(prompt, max_tokens=max_tokens, logprobs=2)
        engine.forget()
    return outputs


def decided_tokens(output: RequestOutput, *, margin: float = 0.25) -> list[int]:
    """The first tokens, up to where the runner-up comes so close that another chunk shape might choose it.

    Every cache hit and every preemption is a prefill in other chunks. In bfloat16 that changes nothing for the dense
    and the window model here, but for the GDN model the difference between two tokens' logprobs, by up to 0.1.
    """
    tokens = []
    for token, candidates in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or (), strict=True):
        best, *others = sorted((entry.logprob for entry in candidates.values()), reverse=True)
        if others and best - others[0] < margin:
            break
        tokens.append(token)
    return tokens


@dataclass
class ScheduleLog:
    """A log of the engine's scheduler since it is watched."""

    scheduled_tokens: list[int] = field(default_factory=list)
    """Tokens scheduled in each step."""
    preempted: list[str] = field(default_factory=list)
    """The request of each preemption."""
    refused: int = 0
    """Hits that the admission guard kept back."""


@contextmanager
def watch_scheduler(engine: Engine) -> Iterator[ScheduleLog]:
    log = ScheduleLog()
    scheduler = engine.core.scheduler
    admission = connector_side(engine).parts.restores.admission
    schedule, admits = scheduler.schedule, admission.admits

    def watched_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        log.scheduled_tokens.append(output.total_num_scheduled_tokens)
        log.preempted += output.preempted_req_ids or ()
        return output

    def watched_admits(**kwargs: Any) -> bool:
        is_admitted = admits(**kwargs)
        log.refused += not is_admitted
        return is_admitted

    scheduler.schedule, admission.admits = watched_schedule, watched_admits
    try:
        yield log
    finally:
        del scheduler.schedule, admission.admits


@contextmanager
def noting_misses(engine: Engine) -> Iterator[dict[str, int]]:
    """Collects computed tokens by reason."""
    notes = connector_side(engine).parts.restores.notes
    note = notes.note
    seen: dict[str, int] = {}

    def watched(tracked: Any, *, boundary: int, reason: Miss, **more: int) -> None:
        seen[reason.label] = seen.get(reason.label, 0) + tracked.request.num_tokens - boundary
        note(tracked, boundary=boundary, reason=reason, **more)

    notes.note = watched
    try:
        yield seen
    finally:
        del notes.note


@dataclass
class BlockLedger:
    """Digests of blocks: when their save was planned, in the record, and in the blocks that they were restored to."""

    planned: dict[int, str] = field(default_factory=dict)
    """Contents planned for each record by its address, read in the engine's own thread right after the step that filled
    the block. A slot that was given back may be planned again."""
    saved: dict[int, bool] = field(default_factory=dict)
    """Whether the record that came to an address has the planned contents."""
    published: dict[tuple[int, bytes], set[str]] = field(default_factory=dict)
    """Contents planned for records, by the group and name under which they were published."""
    restored: list[bool] = field(default_factory=list)
    """Whether each restored block holds the contents published under its name. Addresses do not count: a server moves
    records."""


@contextmanager
def watch_blocks(engine: Engine) -> Iterator[BlockLedger]:
    """Watches blocks from before the first save on; the worker side's jobs are wrapped meanwhile. A load that is not
    verified does not tell names: its records must be where they were saved."""
    assert not engine.has_own_processes
    ledger = BlockLedger()
    side = probe.worker_side()
    client: Any = connector_side(engine).parts.cache
    submit, take_results, publish = side.submit, side.take_results, client.publish
    loads: dict[str, LoadJob] = {}
    saves: dict[int, SaveJob] = {}

    def watched_submit(plan: StepPlan) -> None:
        for job in plan.saves:
            ledger.planned.update(_digests(job.moves))
        loads.update((job.request_id, job) for job in plan.loads)
        saves.update((job.job, job) for job in plan.saves)
        submit(plan)

    def watched_results(*, is_idle: bool) -> tuple[set[str], set[str], WorkerReport]:
        """Looks at what has ended when the worker hears that copies have ended: before it tells the engine."""
        finished, failed, report = take_results(is_idle=is_idle)
        for request_id in finished:
            load = loads.pop(request_id, None)
            if load is not None and request_id not in failed:
                note_load(load)
        for number in report.saved:
            save = saves.pop(number, None)
            if save is not None and number not in report.failed:
                note_save(save)
        return finished, failed, report

    def note_load(job: LoadJob) -> None:
        groups = job.moves.groups.tolist()
        names = [None] * len(groups) if job.wanted is None else _cut_names(job.wanted.hashes)
        for group, name, (address, found) in zip(groups, names, _digests(job.moves).items(), strict=True):
            known = {ledger.planned.get(address)} if name is None else ledger.published.get((group, name), set())
            ledger.restored.append(found in known)

    def note_save(job: SaveJob) -> None:
        addresses = job.moves.addresses.tolist()
        records = probe.record_digests(None, list(zip(job.moves.groups.tolist(), addresses, strict=True)))
        assert isinstance(records, list)
        for address, digest in zip(addresses, records, strict=True):
            ledger.saved[address] = ledger.saved.get(address, True) and digest == ledger.planned[address]

    def watched_publish(publication: Publication) -> bool:
        slots = publication.slots
        for name, address in zip(_cut_names(bytes(publication.hashes)), slots.addresses.tolist(), strict=True):
            ledger.published.setdefault((slots.group, name), set()).add(ledger.planned[address])
        return bool(publish(publication))

    side.submit, side.take_results = watched_submit, watched_results  # type: ignore[method-assign]
    client.publish = watched_publish
    try:
        yield ledger
    finally:
        engine.drain()
        del side.submit, side.take_results  # type: ignore[method-assign]
        client.publish = publish


@contextmanager
def held_copies(engine: Engine) -> Iterator[Callable[[], None]]:
    """In every worker, copies submitted from now on wait until the yielded function is called, or the block is left."""

    def release() -> None:
        engine.ask_workers(_release_copies)

    engine.ask_workers(_hold_copies)
    try:
        yield release
    finally:
        release()


def _hold_copies(_worker: Any) -> bool:
    held_engine().hold()
    return True


def _release_copies(_worker: Any) -> bool:
    held_engine().release()
    return True


def held_engine() -> HeldEngine:
    """Returns what this worker's copies go through; it is put there when it is first asked for, while no copy is on its
    way."""
    side: Any = probe.worker_side()
    if not isinstance(side.engine, HeldEngine):
        assert not side.is_copying
        side.engine = HeldEngine(side.engine)
    return side.engine


def connector_side(engine: Engine) -> Any:
    """The scheduler side, whose parts tests look at."""
    return probe.scheduler_connector(engine).scheduler_side


def free_blocks(engine: Engine) -> int:
    """Counts the blocks that no request holds."""
    return engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def all_blocks(engine: Engine) -> int:
    """Blocks that can be held: the null block never is."""
    return engine.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1


def assert_nothing_is_held(engine: Engine, *, lost_leases: int = 0) -> None:
    """Asserts after a drain that no block, pin, lease, reservation or memory of a request is left, and no fault was
    counted.

    `lost_leases`: how many may be left whose answers were lost with a server; of slots the engine knows it.
    """
    pool = probe.pool_stats(engine)
    pool["leases"] = max(pool["leases"] - lost_leases, 0)
    pool["reserved"] = max(pool["reserved"] - engine.lost_slots, 0)
    left = {
        **probe.held(engine),
        **{name: pool[name] for name in ("leases", "reserved", "quarantined")},
        "blocks": all_blocks(engine) - free_blocks(engine),
        "engine_requests": len(engine.core.scheduler.requests),
    }
    assert not any(left.values()), left
    assert probe.faults(engine) == {}
    assert engine.llm.reset_prefix_cache(), "the engine's own prefix cache could not be reset"


def describe_scheduler(engine: Engine) -> str:
    """Describes the waiting requests, for the message of a test that fails."""
    scheduler = engine.core.scheduler
    found = scheduler.requests.items()
    requests = {name: f"{request.status.name} {request.num_computed_tokens}" for name, request in found}
    return f"{free_blocks(engine)} free blocks, {probe.held(engine)}, requests {requests}"


def _cut_names(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def _digests(moves: BlockMoves) -> dict[int, str]:
    """By address, what its block holds now, in the order of the moves, which is that of groups."""
    found: dict[int, str] = {}
    for group in sorted(set(moves.groups.tolist())):
        mine = moves.groups == group
        digests = probe.block_digests(None, group, moves.blocks[mine].tolist())
        assert isinstance(digests, list)
        found.update(zip(moves.addresses[mine].tolist(), map(str, digests), strict=True))
    return found
