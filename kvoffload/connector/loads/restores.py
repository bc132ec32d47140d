"""Loads: from asking how much of a prompt can be restored, to the last byte in the engine's blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.cache import AcquiredBlocks, AcquireOutcome, Ask, needed_blocks
from kvoffload.client import TierWait
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.receipt import Sources, split_hit
from kvoffload.connector.common.step_plan import BlockMoves, LoadJob, Place, WantedDigests
from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.measures import Measures
from kvoffload.connector.loads.admission import LoadAdmission
from kvoffload.connector.loads.arrivals import Arrivals
from kvoffload.connector.loads.engine_prefix import EnginePrefix
from kvoffload.connector.loads.judge import LoadJudge
from kvoffload.connector.loads.prompt_notes import PromptNotes, fail_load
from kvoffload.connector.loads.question import Question, WaitingLine
from kvoffload.connector.loads.shared_loads import SharedLoads
from kvoffload.connector.saves.settings import REPORT_WAIT_S
from kvoffload.connector.saves.worth import NULL_BLOCK
from kvoffload.protocol import Miss

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger(__name__)

MAX_EARLY = 32
"""Maximum number of requests for which the cache is asked at their arrival, before the engine schedules them. Their
leases keep blocks from being evicted for others."""
LATE_SHARE = 1 / 4
"""How long a request waits for a late answer, as a share of the time that computing what it asks for would take."""
_LATE_SHARE_S = LATE_SHARE / 1e9
"""The same in seconds for a nanosecond."""
PARKED_SHARE = 2
"""While more than one block in so many waits for loads, no further load is begun."""


@dataclass(frozen=True, kw_only=True)
class RestoreSettings:
    """The settings of one engine's loads."""

    verify_always: bool = False
    always: bool = False
    """Whether every hit is loaded, even if computing it takes less time."""
    promote_wait_s: float = 0.0
    """How long a request waits for blocks in tiers slower than the server's memory, in seconds."""
    arrival_wait_s: float = 0.0
    """How long a request waits for blocks that another engine is saving for it, in seconds."""
    replayed_tokens: int = 0
    """Number of tokens before the end of a hit that the engine computes again. It drops hits that are not longer."""
    shares_loads: bool = True
    """Whether requests wait for another request's load of their prefix: the engine must keep what it has loaded."""


@dataclass(eq=False)
class _Load:
    """A load from its allocation to the report of every rank. `found` is None if it was doomed from the start."""

    found: AcquiredBlocks | None
    names: tuple[tuple[int, bytes], ...] = ()
    """The names of the entries that it reads, by group."""
    blocks: int = 0
    size_bytes: int = 0
    """Size of its records in bytes, over all shards."""
    begun_s: float = 0.0
    tracked: TrackedRequest | None = None
    sources: Sources = ()
    copied_s: float = 0.0  # by the slowest rank so far


class Restores:
    """Owned by the scheduler's thread. A request has one load at a time, and after a failed load no other."""

    def __init__(
        self,
        cache: CacheClient,
        groups: GroupTable,
        *,
        pool: BlockPool,
        settings: RestoreSettings,
        judge: LoadJudge,
        notes: PromptNotes,
        is_ready: Callable[[Place], bool],
        measures: Measures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes its collaborators; `is_ready` returns whether every rank may copy to a place."""
        self._measures = measures or Measures()
        self._clock = clock
        self._cache = cache
        self._groups = groups
        self._pool = pool
        self.settings = settings
        self._judge = judge
        self.notes = notes
        self._is_ready = is_ready
        self._engine_prefix = EnginePrefix(pool, groups)
        self._arrivals = Arrivals(cache, groups, wait_s=settings.arrival_wait_s, measures=self._measures, clock=clock)
        self.admission = LoadAdmission([rule.block_size for rule in groups.table_rules])
        self.shared = SharedLoads(groups, clock=clock)
        self.questions: dict[str, Question] = {}
        self.loads: dict[str, _Load] = {}
        self.unsent: list[LoadJob] = []
        self.doomed: list[str] = []
        self.failed: set[str] = set()
        self._line = WaitingLine(clock)

    @property
    def pending(self) -> int:
        """Number of loads that not all ranks have reported."""
        return len(self.loads)

    @property
    def is_waited_for(self) -> bool:
        """Whether some load may still be reported. Overdue loads do not count, so that the engine does not step for
        ever for one that a rank never reports."""
        if not self.loads:
            return False
        overdue_s = self._clock() - REPORT_WAIT_S
        return any(load.begun_s > overdue_s for load in self.loads.values())

    @property
    def is_quiet(self) -> bool:
        """Whether a step has nothing to settle or to send."""
        return not (self.loads or self.questions or self.unsent or self.doomed or self.admission.reserved)

    @property
    def blocks(self) -> int:
        """Number of the engine's blocks that wait for loads."""
        return sum(load.blocks for load in self.loads.values())

    @property
    def memories(self) -> set[int]:
        """The memories that loads read now, or that planned loads may read."""
        found = [*(load.found for load in self.loads.values()), *(q.pending.found for q in self.questions.values())]
        return {one.lease.memory_id for one in found if one is not None and one.lease is not None}

    def find_sources(self, request_id: str) -> Sources:
        """Returns where the tokens of a request's load come from; empty: none is on its way."""
        load = self.loads.get(request_id)
        return () if load is None else load.sources

    def expect(self, tracked: TrackedRequest) -> None:
        """Asks the cache for a request that has just arrived, so that the answer is there when the engine asks."""
        if not tracked.may_load or len(self.questions) >= MAX_EARLY:
            return
        limit = self._find_limit(tracked, 0)
        if tracked.settings.expect_tokens and self._arrivals.are_awaited(tracked, local=0, limit=limit):
            return
        if self._cache.has_tiers:
            local = self._engine_prefix.find(tracked.request.block_hashes, limit)
            if local < limit:
                self._ask(tracked, local, limit=limit, version=-1)
            return
        boundary = self._cache.find_boundary(Ask(tracked.chain.data, limit=limit, alignment=self._groups.alignment))
        if boundary and not self._engine_prefix.has(tracked.request.block_hashes, boundary):
            self._ask(tracked, 0, limit=boundary, version=-1)

    def match(self, tracked: TrackedRequest, local: int, *, version: int) -> int | None:
        """Returns how many tokens beyond `local` a load would bring: 0 for a miss, None if that is not known yet. May
        be called any number of times; a miss holds as long as `version` and the request are the same."""
        request_id = tracked.request.request_id
        if self._line.is_behind(tracked, self.questions):
            return None
        if request_id in self.failed or request_id in self.loads or not self._is_wanted(tracked, local):
            return 0
        question = self.questions.get(request_id)
        is_early = tracked.settings.expect_tokens and self._arrivals.are_awaited(
            tracked, local=local, limit=self._find_limit(tracked, local)
        )
        if is_early or self._is_shared(question, tracked, local):
            return None
        if question is None or not question.holds(local, version):
            question = self._ask_again(tracked, local, version)
        found = self._hear(question)
        if found is not None and found.is_hit and found.boundary <= local:
            # The engine has computed or found more than the hit while the cache was asked.
            question = self._ask_again(tracked, local, version)
            found = self._hear(question)
        if found is None:
            return None
        if question.miss is None and not self._settle(question, found, local, version):
            return None
        return 0 if question.miss is not None else self._promise(question, found, local)

    def plan(self, tracked: TrackedRequest, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Queues the load of the hit that `match` reported, or of its beginning, for which the engine has allocated
        blocks. The load fails if a shorter hit needs a window or a state that was not acquired."""
        request_id = tracked.request.request_id
        question = self.questions[request_id]
        found = question.pending.found
        assert found is not None
        assert found.lease is not None
        boundary = found.boundary - max(question.reported - external, 0)
        local = boundary - external
        if boundary != self._groups.align(boundary):
            self._doom_unplanned(request_id)
            return
        groups, blocks, addresses, names, digests = [], [], [], [], []
        count = 0
        for group, leased in enumerate(found.groups):
            positions = needed_blocks(self._groups.rules[group], local=local, boundary=boundary)
            part = slice(positions.start - leased.first, positions.stop - leased.first)
            table = block_ids[self._groups.facts[group].index]
            targets = table[positions.start : positions.stop]
            if len(targets) < len(positions) or part.start < 0 or NULL_BLOCK in targets:
                self._doom_unplanned(request_id)
                return
            # Each stage loads its own part of a block; only first stages' groups count blocks.
            count += len(positions) if group in self._groups.other_stages else 0
            groups.append(np.full(len(positions), group, np.int64))
            blocks.append(np.array(targets, np.int64))
            addresses.append(leased.addresses[part])
            digests.append(leased.digests[:, part])
            names.append((group, tracked.chain.names(group, positions)))
        moves = BlockMoves(np.concatenate(groups), np.concatenate(blocks), np.concatenate(addresses))
        wanted = None
        if self.settings.verify_always:
            wanted = WantedDigests(b"".join(rows for _, rows in names), np.concatenate(digests, axis=1))
        self.admission.reserve(request_id, num_tokens=tracked.request.num_tokens, boundary=boundary)
        limit = self._find_limit(tracked, local)
        sources = split_hit(local, boundary, question.find_reaches()) if boundary > local else ()
        self.notes.note(
            tracked,
            local=local,
            boundary=boundary,
            limit=limit,
            reason=self._explain_rest(boundary, found.boundary, limit),
            sources=sources,
        )
        size_bytes = sum(self._groups.stored_bytes[group] for group in moves.groups.tolist())
        self.loads[request_id] = _Load(found, tuple(names), count, size_bytes, self._clock(), tracked, sources)
        self.shared.begin(request_id, tracked.chain, local=local, boundary=boundary)
        tracked.reaches = ()
        del self.questions[request_id]  # its lease is the load's
        place = Place(found.lease.memory_id, found.lease.session)
        self.unsent.append(LoadJob(request_id, place, moves, wanted))

    def doom(self, request_id: str) -> None:
        """Fails a reported hit that cannot be planned: the engine then recomputes the request."""
        self._drop(request_id)
        self.shared.end(request_id)
        self.loads.setdefault(request_id, _Load(None, begun_s=self._clock()))
        self.doomed.append(request_id)

    def take_jobs(self) -> tuple[tuple[LoadJob, ...], tuple[str, ...]]:
        """Takes the jobs and doomed requests to send with this step's plan, each once."""
        if not (self.unsent or self.doomed):
            return (), ()
        jobs, self.unsent = tuple(self.unsent), []
        doomed, self.doomed = tuple(self.doomed), []
        return tuple(job for job in jobs if job.request_id not in doomed), doomed

    def settle(self, running: Container[str]) -> None:
        """Drops the questions and reservations of requests that run now: the engine takes care of them again."""
        if not (self.questions or self.admission.reserved or self.shared.is_used):
            return
        self.shared.settle(running)
        for request_id in self.admission.reserved:
            if request_id in running:
                self.admission.settle(request_id)
        for request_id, question in list(self.questions.items()):
            if request_id in running:
                found = question.pending.found
                if question.miss is None and found is not None and found.is_hit:
                    # The engine did not take it, or the guard refused it.
                    reason = Miss.SKIPPED if question.reported else Miss.NO_ROOM
                    self.note_miss(question.tracked, question.tracked.reused_tokens, reason)
                self._drop(request_id)

    def note_copies(self, copied_s: Mapping[str, float]) -> None:
        """Takes how long ranks took to copy these loads, each reported before or with the load's end."""
        for request_id in copied_s.keys() & self.loads.keys():
            self.loads[request_id].copied_s = max(self.loads[request_id].copied_s, copied_s[request_id])

    def end_loads(self, finished: Iterable[str], failed: Collection[str], *, alive: Container[str]) -> None:
        """Ends loads that every rank has reported. The entries of failed ones are invalidated before the engine asks
        again for a request that is `alive`."""
        self._measures.count("kvoffload_failed_loads_total", len(failed))
        for request_id in failed:
            load = self.loads.get(request_id)
            for group, names in load.names if load is not None else ():
                self._cache.invalidate(group, names)
            if load is not None and load.tracked is not None:
                fail_load(load.tracked)
            # The engine gives its blocks back and asks again. With the policy `fail` it ended before this report.
            self.admission.settle(request_id)
            if request_id in alive:
                self.failed.add(request_id)
        if failed:
            # Other answers may have the same entries.
            self.drop_answers()
        for request_id in finished:
            self.shared.end(request_id)
            load = self.loads.pop(request_id, None)
            if load is not None and load.found is not None and load.found.lease is not None:
                self._cache.release(load.found.lease)
                seconds = self._clock() - load.begun_s
                self._measures.observe("kvoffload_load_seconds", seconds)
                if request_id not in failed and load.tracked is not None:
                    self.notes.end_load(load.tracked, load.blocks, load.size_bytes, seconds)
                    self._judge.note_load(load.size_bytes, load.copied_s)

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended. A load on its way is kept until it is reported."""
        self.admission.settle(request_id)
        self.shared.forget(request_id)
        self._drop(request_id)
        self.failed.discard(request_id)

    def drop_answers(self) -> None:
        """Drops all answers of the cache, so that they are not reported any more."""
        for request_id in list(self.questions):
            self._drop(request_id)

    # ---- inside ----

    def _doom_unplanned(self, request_id: str) -> None:
        logger.warning("request %s: a reported hit could not be planned and is recomputed", request_id)
        self.doom(request_id)

    @staticmethod
    def _explain_rest(boundary: int, found: int, limit: int) -> Miss:
        """Returns why the tokens beyond a load's boundary are not loaded."""
        if boundary < found:
            return Miss.SKIPPED
        return Miss.TOO_SHORT if boundary >= limit else Miss.NEVER_SEEN

    def _is_shared(self, question: Question | None, tracked: TrackedRequest, local: int) -> bool:
        """Whether the request waits for another request's load of what it would load."""
        if not (self.settings.shares_loads and self.shared.is_used):
            return False
        if question is not None and question.miss is not None:
            return False
        found = None if question is None else question.pending.found
        return self.shared.are_awaited(
            tracked.request.request_id,
            tracked.chain,
            local=local,
            limit=self._find_limit(tracked, local),
            found=0 if found is None else found.boundary,
            token_ns=self._judge.token_ns,
        )

    def _is_wanted(self, tracked: TrackedRequest, local: int) -> bool:
        is_wanted = tracked.may_load
        if not is_wanted and not tracked.was_skipped:
            tracked.was_skipped = True
            self.note_miss(tracked, local, Miss.SKIPPED)
        return is_wanted

    def _find_limit(self, tracked: TrackedRequest, local: int) -> int:
        tracked.chain.follow(tracked.request.block_hashes)
        limit = min(self._groups.longest_hit(tracked.request.num_tokens), self._groups.align(tracked.chain.tokens))
        most = tracked.settings.max_load_tokens
        return limit if most is None else min(limit, local + self._groups.align(most))

    def note_miss(self, tracked: TrackedRequest, local: int, reason: Miss) -> None:
        self.notes.note(tracked, local=local, boundary=local, limit=self._find_limit(tracked, local), reason=reason)

    def _ask(self, tracked: TrackedRequest, local: int, *, limit: int, version: int) -> Question:
        tracked.asked_s = tracked.asked_s or self._clock()
        if self._groups.dropped_tokens:
            limit = self._drop_last(tracked, limit)
        far = None
        if self._cache.has_tiers and self.settings.promote_wait_s and not tracked.was_promoted:
            token_ns = 0 if self._is_always_loaded(tracked) else self._judge.token_ns
            far = TierWait(wait_s=self.settings.promote_wait_s, token_ns=token_ns)
            tracked.was_promoted = True
        pending = self._cache.start_acquire(
            Ask(
                tracked.chain.data,
                local=local,
                limit=limit,
                alignment=self._groups.alignment,
                shards=range(max(self._groups.shards)) if self.settings.verify_always else (),
            ),
            far=far,
            wait_s=(limit - local) * self._judge.token_ns * _LATE_SHARE_S,
        )
        question = Question(tracked, local, tracked.request.num_tokens, version, pending)
        self.questions[tracked.request.request_id] = question
        return question

    def _drop_last(self, tracked: TrackedRequest, limit: int) -> int:
        """Returns where the engine's own hit would end: the block that it drops has to be there, too. With slower
        tiers, whose blocks are not known yet, or with windows or states, which are kept where hits end, `limit`
        stays."""
        if self._cache.has_tiers or not self._groups.is_all_prefix:
            return limit
        chain, most = tracked.chain.data, limit + self._groups.dropped_tokens
        matched = self._cache.find_boundary(Ask(chain, limit=most, alignment=self._groups.alignment))
        return min(limit, self._groups.drop(matched))

    def _ask_again(self, tracked: TrackedRequest, local: int, version: int) -> Question:
        self._drop(tracked.request.request_id)
        return self._ask(tracked, local, limit=self._find_limit(tracked, local), version=version)

    def _hear(self, question: Question) -> AcquiredBlocks | None:
        """Returns the answer. None: there is none yet, although the step's budget was spent on waiting for it."""
        pending = question.pending
        return pending.found or self._cache.poll(pending) or self._cache.wait_for(pending)

    def _settle(self, question: Question, found: AcquiredBlocks, local: int, version: int) -> bool:
        """Judges the answer to a question that has no miss yet. A miss is noted, and a lease given back. Returns False
        while the hit waits for workers to join its memory."""
        if found.lease is not None and not self._is_ready(Place(found.lease.memory_id, found.lease.session)):
            # Workers join a new server's memory by themselves, and report it with the next steps.
            if question.may_wait(self._clock()):
                return False
            question.miss = Miss.NOT_SERVED
        else:
            question.miss = self._judge_hit(question, found, local)
        if question.miss is not None:
            # The judge is asked once, also if the cache was asked early.
            question.local, question.version = local, version
            self.note_miss(question.tracked, local, question.miss)
            self._cache.cancel(question.pending)
        return True

    def _promise(self, question: Question, found: AcquiredBlocks, local: int) -> int | None:
        """Returns how many tokens of a hit to report: 0 if the engine has no room for it, None while other requests may
        still free some."""
        if self.loads and self.blocks > self._pool.num_gpu_blocks // PARKED_SHARE:
            # These blocks become usable as their loads end; the bound is for copies that hang.
            return None if question.may_wait(self._clock()) else 0
        num_tokens, tokens = question.tracked.request.num_tokens, found.boundary - local
        # The first block of each block table; what is before it will be null.
        first_blocks = [
            needed_blocks(rule, local=0, boundary=found.boundary).start for rule in self._groups.table_rules
        ]
        free_blocks = self._pool.get_num_free_blocks()
        if self.admission.admits(num_tokens=num_tokens, first_blocks=first_blocks, free_blocks=free_blocks):
            question.reported = tokens
            return tokens
        question.reported = 0
        if self.admission.count_needed(num_tokens, first_blocks) >= self._pool.num_gpu_blocks:
            return 0  # no request gets the null block
        wait_s = tokens * self._judge.token_ns / 1e9
        if question.tracked.settings.expect_tokens:
            wait_s = max(wait_s, self.settings.arrival_wait_s)
        return None if self._line.lets_wait(question, wait_s) else 0

    def _judge_hit(self, question: Question, found: AcquiredBlocks, local: int) -> Miss | None:
        """Returns why the tokens are not loaded; None: they are worth a load."""
        tracked = question.tracked
        if not found.is_hit:
            return self._explain_miss(question, found, local)
        gained = found.boundary - max(local, self.settings.replayed_tokens)
        if gained <= 0:
            return Miss.TOO_SHORT
        if self._is_always_loaded(tracked) or vllm_compat.needs_encoder(tracked.request, range(local, found.boundary)):
            # The judge does not know what an encoder takes, which a load spares as well.
            return None
        size_bytes = 0
        for leased, rule, stored_bytes in zip(found.groups, self._groups.rules, self._groups.stored_bytes, strict=True):
            needed = needed_blocks(rule, local=local, boundary=found.boundary)
            size_bytes += stored_bytes * min(len(needed), len(leased.addresses))
        rest = question.num_tokens - found.boundary
        is_faster = self._judge.favours_load(gained, size_bytes, rest=rest)
        return None if is_faster else Miss.SLOWER_THAN_COMPUTING

    def _is_always_loaded(self, tracked: TrackedRequest) -> bool:
        """Whether hits of the request are loaded even if computing is faster. A prompt that another engine has computed
        for it always is."""
        return self.settings.always or tracked.settings.expect_tokens > 0

    def _explain_miss(self, question: Question, found: AcquiredBlocks, local: int) -> Miss:
        pending = question.pending
        if found.outcome in (AcquireOutcome.OVER_LIMIT, AcquireOutcome.NO_ROOM):
            return Miss.REFUSED
        if not self._cache.is_served:
            return Miss.NOT_SERVED
        if pending.came_late:
            return Miss.TIER_TOO_SLOW
        if pending.request is not None and pending.request.answer is None:
            return Miss.SLOW_TO_ANSWER
        return Miss.TOO_SHORT if self._find_limit(question.tracked, local) <= local else Miss.NEVER_SEEN

    def _drop(self, request_id: str) -> None:
        question = self.questions.pop(request_id, None)
        if question is not None:
            if question.pending.promotion is not None:
                question.tracked.reaches = question.find_reaches()
            self._cache.cancel(question.pending)
