"""An engine on virtual time: a scheduler that loads and saves, workers that copy, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.cache import Ask, BlockLease, Publication, ReservedSlots
from kvoffload.client.block_calls import PendingAcquire, PendingSlots, TierWait
from kvoffload.client.memories import MAX_FORMER
from kvoffload.types import HASH_BYTES
from tests.kit.cache.cache_model import make_chain
from tests.simulation.model_entries import PIECES, split
from tests.simulation.process import Process
from tests.simulation.tier_model import MARGIN_NS, WAITS_MS
from tests.simulation.timeline import MILLISECOND_NS

if TYPE_CHECKING:
    from tests.simulation.memory import AnyMemory

BLOCKS = 4
TOKENS = 16
"""Tokens in a block."""
CHAINS = [make_chain(conversation, BLOCKS) for conversation in range(3)]
ACQUIRE_NS = 50 * MILLISECOND_NS


@dataclass(eq=False)
class Job:
    """One load or save, for all workers."""

    memory_id: int
    names: list[bytes]
    addresses: list[int]
    lease: BlockLease | None = None
    slots: ReservedSlots | None = None
    waiting: set[Worker] = field(default_factory=set)
    """Workers that still copy."""
    has_failed: bool = False
    begun_ns: int = 0

    @property
    def held(self) -> BlockLease | ReservedSlots:
        held = self.lease or self.slots
        assert held is not None
        return held

    @property
    def session(self) -> int:
        """That holds the slots, by its number in the memory."""
        return self.held.session


class Worker(Process):
    """Does the copies of its shard."""

    def start(self) -> Worker:
        self.copies: list[Job] = []
        return self

    def start_job(self, job: Job, scheduler: Scheduler) -> None:
        """Copies go on while the process is stopped, and until its exit."""
        if self.stopped is not None and self.is_alive:
            self.stopped.append(lambda: self.start_job(job, scheduler))
            return
        timeline = self.world.timeline
        if not self.is_alive or not self._may_copy(job):
            self.note("does not copy: memory %d is not mapped, or of another session", job.memory_id)
            timeline.after(timeline.between_ms(0.05, 2), scheduler.on_done, job, self, False)
            return
        memory = self.world.memories[job.memory_id]
        assert self.pid in memory.members(job.session), f"{self.name} is not of session {job.session}"
        self.note("%s %s", "reads" if job.lease else "writes", job.addresses)
        self.copies.append(job)
        self.world.ledger.mark(job, 1)
        longest = 1000 if timeline.chance(0.05) else 20
        middle_ns = timeline.between_ms(0.05, longest)
        end_ns = middle_ns + timeline.between_ms(0.05, longest)
        timeline.after(middle_ns, self._copy, job, memory, 0)
        timeline.after(end_ns, self._copy, job, memory, PIECES - 1)
        timeline.after(end_ns, self._end, job, scheduler)

    def _may_copy(self, job: Job) -> bool:
        """The memory is mapped; and this process is of the session that holds the slots, so they wait for its exit."""
        if self.link.memories.find(job.memory_id) is None and job.memory_id in self.mapped[-1 - MAX_FORMER :]:
            # A new server asked for it. Its scheduler had no lease there, and bytes written to its slots are never
            # read. The memory may be in use again by now, adopted from another engine.
            asked_ns = self.asked_ns.get(job.memory_id)
            is_late = asked_ns is not None and (job.slots is not None or job.begun_ns >= asked_ns)
            assert is_late, f"{self.name} has let go of memory too early"
        return self.blocks.may_copy(job.held)

    def end_copies(self) -> None:
        """The process has exited."""
        for job in self.copies:
            self.world.ledger.mark(job, -1)
        self.copies.clear()

    def _copy(self, job: Job, memory: AnyMemory, piece: int) -> None:
        if job not in self.copies:
            return
        for at, (address, name) in enumerate(zip(job.addresses, job.names, strict=True)):
            tag = (self.register.fingerprint, name, self.rank)
            if job.slots is not None:
                ticket = int(job.slots.tickets[at])
                assert memory.is_reserved(ticket), f"{self.name} writes to {address}: its reservation is gone"
                memory.write(address, self.rank, piece, tag)
            else:
                is_right = memory.holds(address, self.rank, piece, tag)
                assert is_right, f"{self.name} reads wrong bytes at {address} of memory {job.memory_id}"

    def _end(self, job: Job, scheduler: Scheduler) -> None:
        if self.stopped is not None and self.is_alive:
            self.stopped.append(lambda: self._end(job, scheduler))
            return
        if job in self.copies:
            self.copies.remove(job)
            self.world.ledger.mark(job, -1)
        if self.is_alive:
            # A save that cannot be published at the memory's own server does not count; its slots are given back.
            is_told = job.slots is None or self.blocks.memory_id == job.memory_id
            if job.slots is not None and is_told:
                self.world.ledger.publish(self, job.slots)
                self.blocks.publish(Publication(job.slots, hashes=b"".join(job.names), shard=self.rank), self.now_ns)
                self.turn()
            self.world.timeline.after(self.world.timeline.between_ms(0.05, 2), scheduler.on_done, job, self, is_told)


class Scheduler(Process):
    """Decides, and holds what the engine holds."""

    workers: list[Worker]

    def start(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.jobs: list[Job] = []
        self.acquires: set[PendingAcquire] = set()
        self.reserves: set[PendingSlots] = set()
        self.world.timeline.after(self.world.timeline.between_ms(1, 30), self._step)

    @property
    def is_idle(self) -> bool:
        return not (self.jobs or self.acquires or self.reserves)

    @property
    def stock(self) -> set[int]:
        """Tickets that lie ready."""
        return {int(ticket) for stock in self.blocks.stocks for ticket in stock.tickets}

    def on_done(self, job: Job, worker: Worker, is_good: bool) -> None:
        """A worker has done its part, or is gone."""
        if not self.is_alive or worker not in job.waiting:
            return
        job.waiting.discard(worker)
        job.has_failed = job.has_failed or not is_good
        if job.waiting:
            return
        self.jobs.remove(job)
        if job.lease is not None:
            assert self.link.memories.find(job.memory_id) is not None, f"{self.name} has let go of memory with a lease"
            self.note("releases lease %d", job.lease.number)
            self.blocks.release(job.lease, self.now_ns)
        elif job.slots is not None and job.has_failed:
            self.note("gives back %s", job.slots.tickets)
            self.blocks.abort(job.slots, self.now_ns)
        self.turn()

    def on_worker_exit(self, worker: Worker) -> None:
        """Hears that a worker has exited: none of its copies runs any more."""
        for job in list(self.jobs):
            self.on_done(job, worker, False)

    # ---- steps ----

    def _step(self) -> None:
        if not self.is_alive or not self.world.is_busy:
            return
        timeline = self.world.timeline
        if self.stopped is None:
            timeline.random.choice((self._load, self._load, self._save, self._save, self._reserve, self._rare))()
            self.turn()
        timeline.after(timeline.between_ms(1, 30), self._step)

    def _load(self) -> None:
        chain, local = self._choose_chain()
        timeline = self.world.timeline

        def watch() -> None:
            if pending.request is not None:
                pending.request.when_over(lambda: timeline.after(0, end))

        def end() -> None:
            if self.is_alive:
                self.blocks.go_on(pending, self.now_ns)
            if not pending.is_over and self.is_alive:
                watch()
                return
            self.acquires.discard(pending)
            found = pending.found
            assert not (is_cancelled and found is not None and found.lease), f"{self.name} has what it has cancelled"
            if found is not None and found.lease is not None and self.is_alive:
                addresses: list[int] = found.groups[0].addresses.tolist()
                job = Job(found.lease.memory_id, names[: len(addresses)], addresses, lease=found.lease)
                self._hand_out(job)

        far, within_ns = None, ACQUIRE_NS
        if timeline.chance(0.15):
            names = split(chain)
            pending = self.blocks.start_acquire_entries(0, chain, self.now_ns, ACQUIRE_NS)
        else:
            names = split(chain)[local // TOKENS :]
            if self.link.has("promote") and timeline.chance(0.7):
                far = TierWait(wait_s=timeline.random.choice(WAITS_MS) / 1e3, token_ns=timeline.random.choice((0, 1)))
                within_ns += int(far.wait_s * 1e9) + ACQUIRE_NS + MARGIN_NS
            pending = self.blocks.start_acquire(Ask(chain, local=local), self.now_ns, ACQUIRE_NS, far=far)
        watch()
        is_cancelled = timeline.chance(0.1)
        if is_cancelled:
            self.note("cancels its acquire")
            self.blocks.cancel(pending, self.now_ns)
        elif pending.request is not None:
            self.acquires.add(pending)
            timeline.after(within_ns + 1, self._check_over, pending, within_ns)

    def _check_over(self, pending: PendingAcquire, within_ns: int) -> None:
        if self.is_alive and self.stopped is None and self.now_ns - self.last_stop_ns > within_ns + 1:
            assert pending.is_over, f"{self.name}: an acquire is not over at its deadline"

    def _save(self) -> None:
        chain, _ = self._choose_chain()
        slots = self.blocks.take(0, len(chain) // HASH_BYTES, self.now_ns)
        if len(slots):
            self._hand_out_save(slots, split(chain)[: len(slots)])

    def _reserve(self) -> None:
        """Reserves slots for named blocks; sometimes without waiting for the answer."""
        timeline = self.world.timeline
        if not timeline.chance(0.5):
            return
        chain, _ = self._choose_chain()

        def end() -> None:
            self.reserves.discard(pending)
            granted = np.flatnonzero(pending.slots.tickets)
            assert not (is_cancelled and len(granted)), f"{self.name} has what it has cancelled"
            if len(granted) and self.is_alive:
                names = split(chain)
                self._hand_out_save(pending.slots[granted], [names[at] for at in granted])

        pending = self.blocks.start_reserve(0, self.now_ns, hashes=chain)
        if pending.request is not None:
            pending.request.when_over(lambda: timeline.after(0, end))
        is_cancelled = timeline.chance(0.2)
        if is_cancelled:
            self.note("cancels its slots")
            self.blocks.cancel_slots(pending, self.now_ns)
        elif not pending.is_over:
            self.reserves.add(pending)

    def _rare(self) -> None:
        if self.world.timeline.chance(0.2):
            self.blocks.invalidate(0, self._choose_chain()[0], self.now_ns)

    # ---- inside ----

    def _hand_out_save(self, slots: ReservedSlots, names: list[bytes]) -> None:
        self._hand_out(Job(slots.memory_id, names, slots.addresses.tolist(), slots=slots))

    def _hand_out(self, job: Job) -> None:
        job.waiting = set(self.workers)
        job.begun_ns = self.now_ns
        assert self.blocks.may_copy(job.held), f"{self.name} has let go of memory that it was given slots in"
        self.jobs.append(job)
        for worker in self.workers:
            self.world.timeline.after(self.world.timeline.between_ms(0.05, 3), worker.start_job, job, self)

    def _choose_chain(self) -> tuple[bytes, int]:
        random = self.world.timeline.random
        blocks = random.randint(1, BLOCKS)
        return random.choice(CHAINS)[: HASH_BYTES * blocks], random.choice((0, 0, 0, 16))
