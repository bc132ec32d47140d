"""The connector in the engine's scheduler: decides what to load and save, and never touches a byte of it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from kvoffload.connector.common.block_chain import NO_MASK, BlockChain
from kvoffload.connector.common.receipt import Receipt, Sources
from kvoffload.connector.common.request_settings import NO_SETTINGS, read_settings
from kvoffload.connector.common.step_plan import (
    NOTHING_TO_DO,
    ONLY_A_FORWARD,
    UNASKED,
    GroupKey,
    SaveJob,
    StepPlan,
    WorkerFacts,
    WorkerReport,
    store_apart,
)
from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.measures import Measures
from kvoffload.connector.hints.request_hints import is_kept
from kvoffload.connector.identity.agreement import Rank, refuse_changes
from kvoffload.connector.identity.masks import RequestMasks
from kvoffload.connector.identity.weight_proof import Verdict, WeightProof
from kvoffload.connector.loads.arrivals import count_expected
from kvoffload.connector.loads.engine_prefix import find_branch
from kvoffload.connector.loads.routed_hits import RoutedHits
from kvoffload.connector.scheduler_parts import OpenCache, SchedulerParts, SchedulerSettings, assemble
from kvoffload.connector.serving import Event, Overtime, Serving
from kvoffload.errors import IdentityError

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_NOTES = 20
"""Maximum number of log lines about requests whose parameters cannot be honoured."""


class SchedulerSide:
    """Owned by the scheduler's thread. Hooks come in the order: bind_pool, accept_facts, then requests."""

    def __init__(
        self,
        settings: SchedulerSettings,
        open_cache: OpenCache,
        measures: Measures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._open_cache = open_cache
        self.requests: dict[str, TrackedRequest] = {}
        self._pool: BlockPool | None = None
        self.parts: SchedulerParts | None = None
        self.facts: dict[Rank, WorkerFacts] = {}
        """The facts from which `parts` were assembled, by rank."""
        self.masks = RequestMasks()
        self._proof = WeightProof(clock)
        self.serving = Serving()
        self._overtime = Overtime(clock)
        self._admitted = 0
        """How often a request was given blocks."""
        self._rest = 0
        """Number of steps that need no plan, unless another hook brings work before they are over."""
        self.rested = 0
        """How many of these steps are over."""
        self._notes = 0
        self._heard_warnings = 0
        self._measures = measures or Measures()
        self._routed = RoutedHits(self._measures)

    @property
    def is_open(self) -> bool:
        """Whether the ranks have said what they registered, and the cache was opened."""
        return self.parts is not None

    @property
    def has_pending_saves(self) -> bool:
        """Whether saves hold blocks pinned; these come free by themselves."""
        return self.parts is not None and self.parts.saves.pending > 0

    @property
    def will_free_blocks(self) -> bool:
        """Whether a save's end will free blocks: then the engine should wait for it and not preempt a request."""
        return self.parts is not None and self.parts.saves.will_free_blocks

    @property
    def has_pending_work(self) -> bool:
        """Whether workers or the server owe an answer, so that the engine must go on stepping to hear it."""
        parts = self.parts
        if parts is None:
            return False
        if parts.saves.pending or parts.restores.is_waited_for or parts.hints.pending:
            return True
        if self.serving.is_parting:
            return self.serving.will_part
        if self._overtime.is_joining and not parts.places.are_all_known:
            return True
        if parts.nodes is not None and parts.nodes.is_asking:
            return True
        return self._is_ending(parts) or (parts.saves.has_left and not self._overtime.has_waited)

    @property
    def is_busy(self) -> bool:
        """Whether there will be another step."""
        return bool(self.requests) or self.has_pending_work

    def bind_pool(self, pool: BlockPool) -> None:
        """Takes the engine's block pool. Called once."""
        self._pool = pool

    def accept_facts(self, facts: Mapping[Rank, WorkerFacts]) -> None:
        """Takes what every rank registered. Raises if ranks disagree, and if the cache cannot be opened.

        An engine that wakes calls it again, which tells where its ranks may copy now. If they registered anything else
        than before, all saving and restoring ends, and IdentityError is raised.
        """
        assert self._pool is not None, "the engine binds its pool before the handshake"
        if self.parts is not None:
            self._accept_again(self.parts, facts)
            return
        self.parts = self._assemble(facts)
        claims: Counter[str] = Counter()
        for rank in facts.values():
            claims.update(dict(rank.claims))
        for claim, size_bytes in claims.items():
            self._measures.set("kvoffload_registered_bytes", size_bytes, claim=claim)
        self._proof.begin(
            {rank.rank: rank.weights.proof for rank in facts.values()},
            can_look=all(rank.weights.name for rank in facts.values()),
        )
        self.parts.cache.begin_step()

    def _assemble(self, facts: Mapping[Rank, WorkerFacts]) -> SchedulerParts:
        assert self._pool is not None
        parts = assemble(
            facts,
            self.settings,
            pool=self._pool,
            open_cache=self._open_cache,
            measures=self._measures,
            clock=self._clock,
            is_known=self._is_known,
            find_mask=lambda: self.masks.generation,
        )
        self.facts = dict(facts)
        # The cache that was opened counts from 0.
        self._heard_warnings = 0
        return parts

    def _accept_again(self, parts: SchedulerParts, facts: Mapping[Rank, WorkerFacts]) -> None:
        self._rest = 0
        try:
            refuse_changes(self.facts, facts)
        except IdentityError:
            self.serving.note(Event.FAILED)
            self._taint_all()
            raise
        parts.places.note({rank.rank: rank.places for rank in facts.values()})
        self.serving.note(Event.AWAKE if parts.places.are_all_known else Event.PARTLY_AWAKE)
        self._proof.wake()

    def add_request(self, request: Request) -> None:
        """Takes a request that may be scheduled from now on."""
        self._rest = 0
        parts = self.parts
        if parts is None:
            return
        settings, complaint = NO_SETTINGS, ""
        if request.kv_transfer_params:
            settings, complaint = read_settings(request.kv_transfer_params, vllm_compat.find_session(request))
        if complaint and self._notes < MAX_NOTES:
            self._notes += 1
            logger.warning("request %s: %s", request.request_id, complaint)
        if not self.settings.saves:
            settings = replace(settings, skip_save=True)
        mask = self.masks.find(request, settings)
        tracked = TrackedRequest(
            request,
            BlockChain(parts.groups, mask or NO_MASK),
            settings,
            parts.worth.begin(
                prompt_tokens=request.num_prompt_tokens, limit=settings.find_save_limit(request.num_prompt_tokens)
            ),
            is_tainted=mask is None or not self.serving.is_on,
        )
        self.requests[request.request_id] = tracked
        if settings.expected_hit_tokens:
            self._routed.add(tracked)
        parts.restores.expect(tracked)
        # Last: if reading hints that come from outside fails, the request is known already.
        envelope = vllm_compat.find_hints(request)
        if envelope is not None or settings is not NO_SETTINGS:
            tracked.wishes = parts.hints.read(envelope, settings)
            tracked.is_kept = is_kept(tracked.wishes)
            parts.hints.arrive(tracked)

    def match(self, request: Request, local: int) -> int | None:
        """Returns how many tokens an asynchronous load would bring beyond the engine's own; None: ask again."""
        self._rest = 0
        tracked, parts = self.requests.get(request.request_id), self.parts
        if tracked is None or parts is None:
            return 0
        tracked.reused_tokens = local
        if self._proof.is_open and self.serving.is_on and self._proof.is_waited_for():
            return None
        mask = self.masks.find(request, tracked.settings)
        tracked.is_tainted = mask is None or not self.serving.is_on
        if mask is not None and mask != tracked.chain.mask:
            tracked.chain, tracked.noted_tokens = BlockChain(parts.groups, mask), 0
            parts.restores.forget(request.request_id)
        found = parts.restores.match(tracked, local, version=parts.saves.version)
        # The engine asks about the head of its queue in every step while there is no room for it.
        if found is not None and parts.events is not None and local + found > tracked.noted_tokens:
            parts.events.note_found(tracked, local + found)
            tracked.noted_tokens = local + found
        # The engine asks only about requests without blocks. After a preemption all blocks are looked at again.
        branch = 0 if found is None else find_branch(parts.cache, parts.groups, tracked, local + found)
        tracked.progress = parts.worth.begin(
            prompt_tokens=request.num_prompt_tokens,
            branch=branch,
            limit=tracked.settings.find_save_limit(request.num_prompt_tokens),
        )
        return found

    def admit(self, request: Request) -> None:
        """Notes that the engine has given a request blocks: it runs from now on, or after its load."""
        self._rest = 0
        tracked = self.requests.get(request.request_id)
        if self.parts is not None and tracked is not None:
            self._admitted += 1
            tracked.admitted, tracked.kept_tokens = self._admitted, 0
            self.parts.saves.look_out.admit(tracked)
            if tracked.wishes:
                self.parts.hints.admit(tracked)

    def plan_load(self, request: Request, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Queues a load for the next plan: the engine has allocated blocks for a hit of `external` tokens."""
        self._rest = 0
        tracked = self.requests.get(request.request_id)
        if self.parts is not None and tracked is not None:
            self.parts.restores.plan(tracked, block_ids, external)

    def doom_load(self, request: Request) -> None:
        """Reports the load as failed in the next plan: `plan_load` raised, and the engine expects the hit's tokens."""
        self._rest = 0
        if self.parts is not None:
            self.parts.restores.doom(request.request_id)

    def save_before_preemption(self) -> bool:
        """Returns whether the engine should wait for one step: it is about to preempt a request, which has blocks that
        are not saved, and would give them away in the same step. The plan of this step saves them."""
        parts = self.parts
        running = [
            one
            for one in self.requests.values()
            if one.has_run and one.request.num_computed_tokens and not one.is_tainted
        ]
        if parts is None or not running:
            return False
        if self.settings.by_priority:
            victim = max(running, key=lambda one: (one.request.priority, one.request.arrival_time))
        else:
            victim = max(running, key=lambda one: one.admitted)
        is_due = parts.saves.save_soon(victim)
        if is_due:
            self._rest = 0
        return is_due

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """Returns this step's loads and saves, for every worker, and the orders for other nodes."""
        tokens = output.total_num_scheduled_tokens
        if self.rested < self._rest:
            self.rested += 1
            return ONLY_A_FORWARD if tokens else NOTHING_TO_DO
        parts = self.parts
        if parts is None:
            return NOTHING_TO_DO
        parts.saves.look_out.skip(self.rested)
        self._rest = self.rested = 0
        apart: tuple[GroupKey, ...] = ()
        if self.serving.will_part and not (
            parts.saves.pending or parts.restores.is_waited_for or parts.restores.unsent
        ):
            parts, apart = self._store_apart(parts)
        if parts.saves.pending:
            parts.saves.end_overdue()
        parts.saves.step += 1
        parts.restores.settle(output.num_scheduled_tokens)
        parts.hints.step(parts.saves)
        self._routed.settle(output.num_scheduled_tokens)
        step = parts.times.begin(output, self.requests)
        retired = parts.memories.take_retired()
        parts.cache.begin_step()
        state = output.kv_connector_block_state
        saves: tuple[SaveJob, ...] = ()
        # Planned saves and loads must be sent: from here on, every step has to clean up after its own failure.
        if state is not None and not self.serving.is_parting:
            saves = parts.saves.plan_step(
                self.requests, output.num_scheduled_tokens, state, is_ending=self._is_ending(parts)
            )
        loads, doomed = parts.restores.take_jobs()
        if tokens or saves:
            self._overtime.idle_since_s = None
        elif self._overtime.idle_since_s is None:
            self._overtime.begin_idling()
        sample = self._proof.take_question(has_forward=tokens > 0) if self._proof.is_open else 0
        if not (loads or saves or doomed or retired or apart or sample or parts.nodes):
            if step:
                # No rest after a measured step: if it computes prompts, the next one shows what steps take without.
                return StepPlan(has_forward=tokens > 0, step=step)
            self._rest = self._find_rest(parts)
            return ONLY_A_FORWARD if tokens else NOTHING_TO_DO
        plan = StepPlan(loads, saves, doomed, retired, tokens > 0, step, sample, apart)
        return plan if parts.nodes is None else parts.nodes.complete(plan)

    def rescue_plan(self, output: SchedulerOutput) -> StepPlan:
        """Returns the plan to send when planning failed: queued loads, whose requests would else wait for ever."""
        if self.parts is None:
            return NOTHING_TO_DO
        loads, doomed = self.parts.restores.take_jobs()
        plan = StepPlan(loads, doomed=doomed, has_forward=output.total_num_scheduled_tokens > 0)
        return plan if self.parts.nodes is None else self.parts.nodes.complete(plan)

    def end_transfers(self, finished: Set[str], failed: Set[str], report: WorkerReport | None) -> None:
        """Takes what the workers have reported since the last step: finished and failed loads, and ended saves."""
        parts = self.parts
        if parts is None:
            return
        if parts.times.are_wanted:
            parts.times.end(0 if report is None else report.step)
        if report is None and not finished and not failed:
            return
        self._rest = 0
        try:
            if report is not None:
                if report.nodes and parts.nodes is not None:
                    parts.nodes.hear(report.nodes)
                if report.weights:
                    self._judge_weights(report.weights)
                parts.restores.note_copies(report.copied_s)
            if finished or failed:
                parts.restores.end_loads(finished, failed, alive=self.requests)
        finally:
            # Also if ending loads failed: the blocks of saves that are not ended here would stay pinned for ever.
            if report is not None:
                parts.places.note(report.places)
                if self.serving.is_asleep and parts.places.are_all_known:
                    self.serving.note(Event.AWAKE)
                if report.saved:
                    parts.saves.end_jobs(report)
                    if parts.saves.rank_digests.unequal and not self.serving.is_parting:
                        self._begin_parting(parts)

    def find_sources(self, request: Request) -> Sources:
        """Returns where the tokens of the request's load come from; empty: none is on its way."""
        return () if self.parts is None else self.parts.restores.find_sources(request.request_id)

    def find_receipt(self, request: Request) -> Receipt | None:
        """Returns the receipt of a request that wants one; None: it wants none, or the cache was not asked."""
        tracked = self.requests.get(request.request_id)
        return tracked.receipt if tracked is not None and tracked.settings.receipt else None

    def end_request(self, request: Request, block_ids: Sequence[Sequence[int]]) -> int:
        """Ends a request that has finished or was aborted; its blocks are freed after this. Returns how many of its
        tokens another engine may expect in the cache, if this one computes prompts for others."""
        self._rest = 0
        tracked, parts = self.requests.pop(request.request_id, None), self.parts
        if tracked is not None and tracked.settings.expected_hit_tokens:
            self._routed.forget(request.request_id)
        if parts is None or tracked is None:
            return 0
        parts.restores.forget(request.request_id)
        parts.saves.end_request(tracked, block_ids if tracked.has_run else ())
        if tracked.wishes:
            self._end_hints(parts, tracked)
        if not tracked.has_run:
            # A load, ours or another connector's, may still be filling blocks that the engine counts as computed.
            return 0
        return count_expected(parts.cache, parts.groups, tracked) if self.settings.hands_over else 0

    def _end_hints(self, parts: SchedulerParts, tracked: TrackedRequest) -> None:
        tokens = 0
        if tracked.has_run and not tracked.is_tainted:
            tracked.chain.follow(tracked.request.block_hashes)
            tokens = min(tracked.request.num_computed_tokens, tracked.chain.tokens, tracked.progress.limit)
        parts.hints.end(tracked, tokens)

    def _taint_all(self) -> None:
        """Keeps the blocks of all present requests from being saved."""
        for tracked in self.requests.values():
            tracked.is_tainted = True

    def _begin_parting(self, parts: SchedulerParts) -> None:
        """Begins no further save or load in the present session: ranks that should hold equal bytes do not."""
        self.serving.note(Event.RANKS_DIFFER)
        if not self.settings.sharing.may_part:
            self.serving.note(Event.FAILED)
        self._taint_all()
        parts.let_go()

    def _store_apart(self, former: SchedulerParts) -> tuple[SchedulerParts, tuple[GroupKey, ...]]:
        """Builds all parts again, with the unequal groups stored apart: their blocks get other names, slots with every
        rank's own bytes, and a new session. Returns the new parts, and these groups, for the ranks to do the same.
        Requests that run are not saved any more."""
        unequal = [former.groups.facts[group] for group in sorted(former.saves.rank_digests.unequal)]
        apart = tuple(group.key for group in unequal)
        facts = {
            name: replace(rank, groups=store_apart(rank.groups, apart), places=()) for name, rank in self.facts.items()
        }
        try:
            self.parts = parts = self._assemble(facts)
        except BaseException:
            self.serving.note(Event.FAILED)
            raise
        self.serving.note(Event.STORED_APART)
        parts.saves.follow(former.saves)
        self._overtime.begin_joining()
        former.close()
        return parts, apart

    def _judge_weights(self, weights: Mapping[int, tuple[int, bytes]]) -> None:
        """Takes the ranks' proofs of their weights. If they are the same after a sleep, blocks get back the names that
        they had before it."""
        if any(number == UNASKED for number, _ in weights.values()):
            logger.warning(
                "the weights have changed without a reset of the caches: blocks saved before are not found any more"
            )
            self.clear()
            return
        answer = self._proof.answer(weights)
        if answer is None:
            return
        verdict, has_woken = answer
        if self.parts is not None:
            self.parts.hints.settle(are_same=has_woken and verdict is Verdict.SAME)
        if not has_woken:
            logger.info("weights after the reset: %s", verdict.value)
            return
        if verdict is Verdict.SAME:
            self.masks.take_back()
        found = "is found again" if verdict is Verdict.SAME else "is not found any more"
        logger.info("weights after the sleep: %s; blocks saved before it %s", verdict.value, found)

    def clear(self) -> None:
        """Keeps this engine from finding anything that was saved so far: the weights that made it are gone, or the user
        wants a cold cache.

        Other engines that share the server keep their blocks; this engine's have other names from now on, unless the
        reset is part of a sleep from which the same weights wake. Requests that run hold blocks of the old weights:
        these are not saved, so that no request finds them under the new names.
        """
        self._rest = 0
        self.masks.renew()
        self._proof.reset()
        self._taint_all()
        if self.parts is not None:
            is_mixed = self._has_old_blocks(self.parts)
            self.serving.note(Event.RESET_ALONE if is_mixed else Event.RESET)
            if is_mixed:
                logger.warning(
                    "the connector was reset while the engine's own cache was not: nothing is saved or restored before "
                    "a reset of both (let the engine go idle, and reset again)"
                )
            self.parts.let_go()
            if not self._proof.is_open:
                self.parts.hints.settle(are_same=False)
            self.parts.policy.forget_all()

    def _has_old_blocks(self, parts: SchedulerParts) -> bool:
        """Whether the engine may still find blocks of the old weights in its own cache, for requests to come."""
        assert self._pool is not None
        return parts.restores.pending > 0 or vllm_compat.has_cached_blocks(self._pool)

    def begin_ending(self) -> None:
        """Notes that the engine was told to stop. May be called in a signal handler."""
        self._overtime.begin_ending()
        self._rest = 0

    def _is_ending(self, parts: SchedulerParts) -> bool:
        """Whether the engine ends, and there is still time and something to save before its own cache is gone."""
        return self._overtime.is_ending and parts.policy.is_watching

    def close(self) -> None:
        """Closes the cache: the engine ends."""
        self.masks.close()
        if self.parts is not None:
            self.parts.close()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Returns the events about cached blocks since the last call."""
        if self.parts is None or self.parts.events is None:
            return ()
        return self.parts.events.take()

    def note_gauges(self) -> None:
        """Sets the gauges to their present values. Called just before the engine takes the measurements."""
        parts = self.parts
        if parts is not None:
            parts.hints.count_answers()
            self._measures.set("kvoffload_pinned_blocks", parts.pins.count)
            self._measures.set("kvoffload_leased_blocks", parts.restores.blocks)
            self._measures.set("kvoffload_server_up", int(parts.cache.is_served))
            heard = parts.cache.warnings
            self._measures.count("kvoffload_server_warnings_total", heard - self._heard_warnings)
            self._heard_warnings = heard

    def _is_known(self, tracked: TrackedRequest) -> bool:
        """Whether the blocks of a request still match their names, as far as that may change while it runs."""
        return self.masks.find(tracked.request, tracked.settings) == tracked.chain.mask

    def _find_rest(self, parts: SchedulerParts) -> int:
        """Returns, after a step with nothing to do, how many of the next steps will need no plan if no hook is called
        before."""
        if self.has_pending_saves or parts.groups.with_states or parts.policy.is_watching:
            return 0
        if not (parts.restores.is_quiet and parts.hints.is_quiet):
            return 0
        return parts.saves.look_out.rest_steps
