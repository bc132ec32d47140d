"""Loads: from the question how much of a prompt can be restored to the last byte in the engine's blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.cache import Lease, PlainIndex, longest_boundary, needed_blocks
from kvoffload.connector.admission import LoadAdmission
from kvoffload.connector.block_keys import BlockKeys
from kvoffload.connector.step_plan import BlockMove, GroupFacts, LoadJob

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

NULL_BLOCK = 0


@dataclass(frozen=True)
class _Answer:
    """What was said of a request, and at which state of the index it holds."""

    local: int
    num_tokens: int
    version: int
    boundary: int


@dataclass(frozen=True)
class _Load:
    """A load from its allocation to the report of every rank. `lease` is None where it was doomed from the start."""

    lease: Lease | None


class Restores:
    """Owned by the scheduler's thread. A request is loaded once at a time; after a failed load it is never loaded."""

    def __init__(
        self, index: PlainIndex, groups: Sequence[GroupFacts], keys: BlockKeys, *, alignment: int, pool: BlockPool
    ) -> None:
        self._index = index
        self._groups = tuple(groups)
        self._rules = tuple(group.rule for group in groups)
        self._keys = keys
        self._alignment = alignment
        self._pool = pool
        self._admission = LoadAdmission([rule.block_size for rule in self._rules])
        self._answers: dict[str, _Answer] = {}
        self._loads: dict[str, _Load] = {}
        self._unsent: list[LoadJob] = []
        self._failed: set[str] = set()

    @property
    def pending(self) -> int:
        """Loads that have not been reported by all ranks."""
        return len(self._loads)

    def match(self, request: Request, local: int) -> int:
        """Tokens beyond `local` that a load would bring, 0 for a miss. May be asked any number of times."""
        if request.request_id in self._failed or request.request_id in self._loads:
            return 0
        boundary = self._find_boundary(request, local)
        if boundary <= local:
            return 0
        first_blocks = [needed_blocks(rule, local=0, boundary=boundary).start for rule in self._rules]
        is_admitted = self._admission.admits(
            num_tokens=request.num_tokens, first_blocks=first_blocks, free_blocks=self._pool.get_num_free_blocks()
        )
        return boundary - local if is_admitted else 0

    def plan(self, request: Request, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """The engine has allocated blocks for the hit that `match` reported: lease the records, queue the job."""
        answer = self._answers[request.request_id]
        boundary = answer.local + external
        wanted = [
            (group, position)
            for group, facts in enumerate(self._groups)
            for position in needed_blocks(facts.rule, local=answer.local, boundary=boundary)
        ]
        keys = [self._keys.key(request, group, position) for group, position in wanted]
        targets = [_block_at(block_ids[self._groups[group].index], position) for group, position in wanted]
        lease = self._index.acquire(keys) if NULL_BLOCK not in targets else None
        if lease is None:
            logger.warning("request %s: a reported hit could not be planned and is recomputed", request.request_id)
            self.doom(request.request_id)
            return
        moves = tuple(
            BlockMove(group, block, slot) for (group, _), block, slot in zip(wanted, targets, lease.slots, strict=True)
        )
        self._admission.reserve(request.request_id, num_tokens=request.num_tokens, boundary=boundary)
        self._loads[request.request_id] = _Load(lease)
        self._unsent.append(LoadJob(request.request_id, moves))

    def doom(self, request_id: str) -> None:
        """A hit was reported that cannot be planned: it can only fail now, and the engine recomputes the request."""
        self._loads[request_id] = _Load(None)
        self._unsent.append(LoadJob(request_id, (), is_doomed=True))

    def take_jobs(self) -> tuple[LoadJob, ...]:
        """Jobs to send with this step's plan, each once."""
        jobs, self._unsent = tuple(self._unsent), []
        return jobs

    def settle(self, request_ids: Iterable[str]) -> None:
        """These requests run now, or were preempted: what was promised to them is the engine's business again."""
        for request_id in request_ids:
            self._admission.settle(request_id)

    def end_loads(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """Every rank has reported these. Bad entries are forgotten before the engine asks again."""
        for request_id in failed:
            load = self._loads.get(request_id)
            if load is not None and load.lease is not None:
                self._index.invalidate(load.lease.keys)
            # Its blocks are given back, and it asks again. With the policy `fail` it has ended before this report.
            self._admission.settle(request_id)
            if request_id in self._answers:
                self._failed.add(request_id)
        for request_id in finished:
            load = self._loads.pop(request_id, None)
            if load is not None and load.lease is not None:
                self._index.release(load.lease)

    def forget(self, request_id: str) -> None:
        """The request has ended. A load on its way is kept until it is reported."""
        self._admission.settle(request_id)
        self._answers.pop(request_id, None)
        self._failed.discard(request_id)

    def _find_boundary(self, request: Request, local: int) -> int:
        # The engine asks on every step while a request waits; nothing changes unless the index does.
        answer = self._answers.get(request.request_id)
        state = (local, request.num_tokens, self._index.version)
        if answer is None or (answer.local, answer.num_tokens, answer.version) != state:
            boundary = longest_boundary(
                self._rules,
                local=local,
                # Never the whole prompt: one token must be computed, and a recurrent state cannot be rewound for it.
                limit=min(request.num_tokens - 1, self._keys.hashed_tokens(request)),
                is_present=lambda group, position: self._index.lookup(self._keys.key(request, group, position)),
                alignment=self._alignment,
            )
            answer = self._answers[request.request_id] = _Answer(*state, boundary)
        return answer.boundary


def _block_at(blocks: Sequence[int], position: int) -> int:
    return blocks[position] if position < len(blocks) else NULL_BLOCK
