"""The connector in the engine's scheduler: decides what to load and save, and never touches a byte of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.cache import PlainIndex
from kvoffload.connector.block_keys import BlockKeys
from kvoffload.connector.pins import BlockPins
from kvoffload.connector.restores import Restores
from kvoffload.connector.saves import Saves
from kvoffload.connector.step_plan import StepPlan, WorkerFacts, WorkerReport
from kvoffload.errors import IdentityError, UnsupportedError
from kvoffload.keys.identity import compare_identities
from kvoffload.units import format_size

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

PIN_SHARE = 8
"""At most one block in so many is pinned for saving, but always one of each group: a hit needs all of them."""
MAX_STEPS_WAITED = 200
"""Steps without an ended save after which the engine is no longer asked to wait for pins: a copy may hang for ever."""


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What the scheduler side is given: from settings and from the engine's configuration."""

    memory_bytes: int
    """For the records of all ranks together."""
    ranks: int
    hash_block_size: int
    hit_alignment: int


class SchedulerSide:
    """Owned by the scheduler's thread. Hooks come in the order: bind_pool, accept_facts, then requests."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._requests: dict[str, Request] = {}
        self._pool: BlockPool | None = None
        self._index: PlainIndex | None = None
        self._restores: Restores | None = None
        self._saves: Saves | None = None
        self._steps_waited = 0

    @property
    def index(self) -> PlainIndex | None:
        """None until the workers have told what they registered; until then everything is a miss."""
        return self._index

    @property
    def has_pending_saves(self) -> bool:
        """Blocks are pinned; they come free by themselves."""
        return self._saves is not None and self._saves.pending > 0

    @property
    def will_free_blocks(self) -> bool:
        """Waiting for pins is better than preempting somebody, as long as saves do end."""
        return self.has_pending_saves and self._steps_waited < MAX_STEPS_WAITED

    @property
    def has_pending_work(self) -> bool:
        """Workers owe an answer: the engine must go on stepping to hear it."""
        return self.has_pending_saves or (self._restores is not None and self._restores.pending > 0)

    def bind_pool(self, pool: BlockPool) -> None:
        """The engine's block pool, once."""
        self._pool = pool

    def accept_facts(self, facts: Mapping[tuple[int, int], WorkerFacts]) -> None:
        """What every rank registered, by (pipeline rank, tensor rank). Raises where ranks disagree."""
        assert self._pool is not None, "the engine binds its pool before the handshake"
        first = _agree(facts, self._limits.ranks)
        groups = first.groups
        # Ranks of a pipeline hold different layers: what a slot costs is the largest record of any rank.
        record_bytes = [max(rank.groups[i].record_bytes for rank in facts.values()) for i in range(len(groups))]
        keys = BlockKeys(
            hash_block_size=self._limits.hash_block_size, block_sizes=[group.rule.block_size for group in groups]
        )
        capacity_bytes = self._limits.memory_bytes // self._limits.ranks
        index = PlainIndex(record_bytes=record_bytes, capacity_bytes=capacity_bytes)
        pins = BlockPins(self._pool, limit=max(len(groups), first.num_blocks // PIN_SHARE))
        self._restores = Restores(index, groups, keys, alignment=self._limits.hit_alignment, pool=self._pool)
        self._saves = Saves(index, groups, keys, pins=pins, ranks=self._limits.ranks)
        self._index = index
        per_token = sum(size / group.rule.block_size for size, group in zip(record_bytes, groups, strict=True))
        logger.info(
            "kvoffload keeps %s of KV cache in host memory for %d rank(s): groups %s, %.0f bytes per token and rank",
            format_size(self._limits.memory_bytes),
            self._limits.ranks,
            ", ".join(f"{group.name} ({group.rule.reuse}, {group.rule.block_size} tokens)" for group in groups),
            per_token,
        )

    def add_request(self, request: Request) -> None:
        """A request that may be scheduled from now on."""
        self._requests[request.request_id] = request

    def match(self, request: Request, local: int) -> int:
        """Tokens that an asynchronous load would bring beyond the engine's own."""
        if self._restores is None or self._saves is None:
            return 0
        # Only a request without blocks is asked about. If it was preempted, all its blocks are looked at again.
        self._saves.forget(request.request_id)
        return self._restores.match(request, local)

    def plan_load(self, request: Request, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Blocks were allocated; with `external` tokens a load is queued for the next plan."""
        if self._restores is not None and external > 0:
            self._restores.plan(request, block_ids, external)

    def doom_load(self, request: Request) -> None:
        """`plan_load` raised: the hit was reported, so the load must be seen to fail."""
        if self._restores is not None:
            self._restores.doom(request.request_id)

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """This step's loads, saves and drops, for every worker."""
        if self._restores is None or self._saves is None or self._index is None:
            return StepPlan()
        self._steps_waited = self._steps_waited + 1 if self.has_pending_saves else 0
        self._restores.settle(output.num_scheduled_tokens)
        state = output.kv_connector_block_state
        saves = self._saves.plan_step(self._requests, output.num_scheduled_tokens, state) if state is not None else ()
        # Drops last: they hold what this step's saves have evicted. A leased slot is never evicted.
        return StepPlan(self._restores.take_jobs(), saves, self._index.take_drops())

    def rescue_plan(self) -> StepPlan:
        """What must be sent although planning failed: queued loads, or their requests would wait for ever."""
        return StepPlan(self._restores.take_jobs() if self._restores is not None else ())

    def end_transfers(self, *, finished: set[str], failed: set[str], report: WorkerReport | None) -> None:
        """What the workers have reported since the last step."""
        if self._restores is not None:
            self._restores.end_loads(finished, failed)
        if self._saves is not None and report is not None:
            self._saves.end_jobs(report)
            self._steps_waited = 0

    def forget_request(self, request: Request) -> None:
        """The request has ended. Nothing delays the release of its blocks: saves have pinned their own."""
        self._requests.pop(request.request_id, None)
        if self._restores is not None:
            self._restores.forget(request.request_id)
        if self._saves is not None:
            self._saves.forget(request.request_id)

    def clear(self) -> None:
        """Forget every record: the weights they were made with are gone."""
        if self._index is not None:
            self._index.clear()


def _agree(facts: Mapping[tuple[int, int], WorkerFacts], ranks: int) -> WorkerFacts:
    if len(facts) != ranks:
        raise UnsupportedError(
            f"{len(facts)} of {ranks} ranks registered KV caches", remedy="run all ranks of an engine on one machine"
        )
    ordered = sorted(facts.items())
    (first_rank, first), others = ordered[0], ordered[1:]
    for rank, other in others:
        if other.fingerprint != first.fingerprint:
            differences = compare_identities(first.description, other.description)  # type: ignore[arg-type]
            raise IdentityError(
                f"ranks {first_rank} and {rank} differ in {'; '.join(map(str, differences))}",
                remedy="start all ranks with the same model and settings",
            )
        if [(group.index, group.rule) for group in other.groups] != [(g.index, g.rule) for g in first.groups]:
            raise IdentityError(
                f"ranks {first_rank} and {rank} have different KV cache groups",
                remedy="start all ranks with the same model and settings",
            )
    return first
