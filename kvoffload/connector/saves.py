"""Saves: which blocks became full in this step, and what becomes of them until every rank has their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from kvoffload.cache import EntryKey, PlainIndex
from kvoffload.connector.block_keys import BlockKeys
from kvoffload.connector.pins import BlockPins
from kvoffload.connector.restores import NULL_BLOCK
from kvoffload.connector.step_plan import BlockMove, GroupFacts, SaveJob, WorkerReport
from kvoffload.kvspec import ReuseRule

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState
    from vllm.v1.request import Request


@dataclass
class _Job:
    """A save on its way: what to commit and unpin when `waiting_ranks` have reported."""

    moves: tuple[BlockMove, ...]
    waiting_ranks: int
    has_failed: bool = False


class Saves:
    """Owned by the scheduler's thread. A block is saved once, when it is full, whoever computed it."""

    def __init__(
        self, index: PlainIndex, groups: Sequence[GroupFacts], keys: BlockKeys, *, pins: BlockPins, ranks: int
    ) -> None:
        self._index = index
        self._groups = tuple(groups)
        self._keys = keys
        self._pins = pins
        self._ranks = ranks
        self._group_of_table = {facts.index: group for group, facts in enumerate(groups)}
        self._jobs: dict[int, _Job] = {}
        self._numbers = count(1)
        # Per request and group: the first block that has not been looked at.
        self._next: dict[str, list[int]] = {}

    @property
    def pending(self) -> int:
        """Save jobs that some rank has not reported."""
        return len(self._jobs)

    def plan_step(
        self, requests: Mapping[str, Request], scheduled: Mapping[str, int], state: KVConnectorBlockState
    ) -> tuple[SaveJob, ...]:
        """One job for all blocks that are full after this step, or none."""
        moves: list[BlockMove] = []
        try:
            # States first: they are offered once, while a full block can be saved in a later step too.
            for request_id, offers in state.boundary_state_offloads.items():
                request = requests.get(request_id)
                if request is not None:
                    self._add_boundary_states(moves, request, offers)
            for request_id, tokens in scheduled.items():
                request = requests.get(request_id)
                if request is not None:
                    self._add_full_blocks(moves, request, tokens, state)
        except BaseException:
            # Nobody will report what is not sent: its pins and slots must not wait for that.
            for move in moves:
                self._index.abort(move.slot)
            self._pins.unpin([move.block for move in moves])
            self._next.clear()
            raise
        if not moves:
            return ()
        job = next(self._numbers)
        self._jobs[job] = _Job(tuple(moves), self._ranks)
        return (SaveJob(job, tuple(moves)),)

    def end_jobs(self, report: WorkerReport) -> None:
        """What ranks have done since the last report. The last rank's word commits, or aborts if any rank failed."""
        for number, ranks in report.saved.items():
            job = self._jobs[number]
            job.waiting_ranks -= ranks
            job.has_failed |= number in report.failed
            if job.waiting_ranks > 0:
                continue
            del self._jobs[number]
            # Deepest block first: parents become the more recent ones and outlive their children.
            for move in reversed(job.moves):
                if job.has_failed:
                    self._index.abort(move.slot)
                else:
                    self._index.commit(move.slot)
            self._pins.unpin([move.block for move in job.moves])

    def forget(self, request_id: str) -> None:
        """The request has ended; its saves on the way go on, their blocks are pinned."""
        self._next.pop(request_id, None)

    def _add_full_blocks(
        self, moves: list[BlockMove], request: Request, tokens: int, state: KVConnectorBlockState
    ) -> None:
        # Tokens without a hash are drafts or placeholders; what a hash covers is computed by the end of this step.
        full_tokens = min(request.num_computed_tokens + tokens, self._keys.hashed_tokens(request))
        positions = self._next.setdefault(request.request_id, [0] * len(self._groups))
        ends = [
            0 if facts.rule.reuse is ReuseRule.EXACT_BOUNDARY else full_tokens // facts.rule.block_size
            for facts in self._groups
        ]
        if all(position >= end for position, end in zip(positions, ends, strict=True)):
            return
        tables = state.get_block_ids(request.request_id)
        if tables is None:
            return
        for group, end in enumerate(ends):
            table = tables[self._groups[group].index]
            while positions[group] < min(end, len(table)):
                position = positions[group]
                if not self._add(moves, self._keys.key(request, group, position), table[position]):
                    # No room for pins or slots: the rest is tried again as long as the request runs.
                    break
                positions[group] += 1

    def _add_boundary_states(
        self, moves: list[BlockMove], request: Request, offers: Iterable[tuple[int, int, int]]
    ) -> None:
        """A recurrent state may be saved only from the block and at the boundary that the engine hands off."""
        for table, block, boundary in offers:
            group = self._group_of_table.get(table)
            if group is None or boundary > self._keys.hashed_tokens(request):
                continue
            block_size = self._groups[group].rule.block_size
            if boundary % block_size == 0:
                self._add(moves, self._keys.key(request, group, boundary // block_size - 1), block)

    def _add(self, moves: list[BlockMove], key: EntryKey, block: int) -> bool:
        """False when there is no room now; blocks that need no saving are done."""
        if block == NULL_BLOCK or self._index.holds(key):
            return True
        if not self._pins.has_room(1):
            return False
        slot = self._index.reserve(key)
        if slot is None:
            return False
        self._pins.pin([block])
        moves.append(BlockMove(key.group, block, slot))
        return True
