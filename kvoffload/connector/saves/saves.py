"""Saves: which blocks are saved in this step, and what becomes of them until every rank has their bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvoffload.cache import Publication, ReservedSlots
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.step_plan import BlockMoves, Place, SaveJob, WorkerReport
from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.measures import Measures
from kvoffload.connector.saves.group_save import GroupSave, join_parts, place_parts, without_blocks
from kvoffload.connector.saves.leaving import LeavingRequests
from kvoffload.connector.saves.look_out import LookOut
from kvoffload.connector.saves.named_blocks import NamedBlocks
from kvoffload.connector.saves.pins import BlockPins
from kvoffload.connector.saves.policy import SavePolicy
from kvoffload.connector.saves.rank_digests import RankDigests
from kvoffload.connector.saves.settings import SaveSettings
from kvoffload.connector.saves.worth import NULL_BLOCK, Candidates, SaveRoom, SaveWorth, put_back
from kvoffload.kvspec import ReuseRule
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState

logger = logging.getLogger(__name__)

MAX_STEPS_WAITED = 200
"""Steps after which the engine is no longer asked to wait for what a save has pinned."""
NoteSaved = Callable[[TrackedRequest, int, range, bytes], None]
Keep = Callable[[Sequence[Candidates], int], bool]


@dataclass(eq=False)
class _Job:
    """A save on its way: what to publish and unpin when `waiting_ranks` have reported."""

    sent: SaveJob
    parts: list[GroupSave]
    told: list[GroupSave]
    """The same parts, in the order in which they are published."""
    waiting_ranks: int
    begun_s: float
    begun_step: int
    is_dropped: bool = False
    """Whether the save is not published at its end: it failed on some rank, or was dropped."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """The digests that each rank has reported, by rank."""


@dataclass(eq=False)
class _Look:
    """A step's findings: blocks to save, how far each request was looked at, and which have to wait for room."""

    candidates: list[Candidates] = field(default_factory=list)
    looked_at: list[tuple[TrackedRequest, int]] = field(default_factory=list)
    waiting: list[TrackedRequest] = field(default_factory=list)


class Saves:
    """Owned by the scheduler's thread. A block that is worth saving is saved once, whichever request computed it."""

    def __init__(
        self,
        cache: CacheClient,
        groups: GroupTable,
        worth: SaveWorth,
        *,
        pins: BlockPins,
        settings: SaveSettings,
        policy: SavePolicy,
        is_ready: Callable[[Place], bool],
        is_known: Callable[[TrackedRequest], bool],
        note_saved: NoteSaved | None = None,
        look_out: LookOut | None = None,
        measures: Measures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_ready`: whether every rank may copy there. `is_known`: whether the blocks of a request with an adapter
        still hold what their names say. `note_saved` hears of blocks that are about to be saved, by group, positions
        in their request, and names."""
        self._note_saved = note_saved
        self._is_ready = is_ready
        self._is_known = is_known
        self.policy = policy
        self.look_out = look_out or LookOut()
        self._measures = measures or Measures()
        self.clock = clock
        self._cache = cache
        self.groups = groups
        self._worth = worth
        self._pins = pins
        self._settings = settings
        self.rank_digests = RankDigests(groups.facts, settings.sharing)
        self._jobs: dict[int, _Job] = {}
        """The jobs that ranks have yet to report, by number, in the order in which they began."""
        self._overdue: dict[int, _Job] = {}
        """Jobs that are not waited for any more. Their slots stay theirs: a copy may still write to them."""
        self._numbers = count(1)
        self.last_job = 0
        """The number of the job that began last."""
        self._on_the_way: list[set[int]] = [set() for _ in groups.facts]
        """The first 64-bit words of the names of blocks that are being saved, by group."""
        self._ended: list[Candidates] = []
        """Blocks of requests that have ended since the last plan, and states for which the last plan had no slots. They
        are pinned, and the next plan saves them."""
        self._leaving = LeavingRequests(cache, groups, worth)
        self.version = 0
        """A number that changes whenever something was published."""
        self._next_under_way = 0
        """Number of blocks being saved that the engine was about to take."""
        self.step = 0
        """Number of steps planned so far; while a save is pending, every step is planned. The caller sets it."""

    @property
    def pending(self) -> int:
        """Number of save jobs that some rank has not reported, and one more if blocks wait for the next plan."""
        return len(self._jobs) + bool(self._ended)

    @property
    def oldest_job(self) -> int:
        """The number of the job that is on its way the longest; 0: none is. Jobs are numbered as they begin."""
        return next(iter(self._jobs), 0)

    @property
    def blocks_under_way(self) -> int:
        """How many blocks are being saved, of all groups."""
        return sum(map(len, self._on_the_way))

    @property
    def has_left(self) -> bool:
        """Whether blocks of ended requests wait for slots, and will be saved as soon as there are some."""
        return self.policy.is_watching and self.policy.saves_at_once

    @property
    def will_free_blocks(self) -> bool:
        """Whether a block that the engine could use comes free when a save ends. Saves that have not ended for many
        steps do not count: their copies may hang for ever."""
        if any(self._pins.holds_alone(one.list_blocks()) for one in self._ended):
            return True
        return any(
            self._pins.holds_alone(part.named.blocks.tolist())
            for job in self._jobs.values()
            if self.step < job.begun_step + MAX_STEPS_WAITED
            for part in job.parts
        )

    @property
    def memories(self) -> set[int]:
        """The memories that saves go to now."""
        jobs = [*self._jobs.values(), *self._overdue.values()]
        return {part.slots.memory_id for job in jobs for part in job.parts}

    def plan_step(
        self,
        requests: Mapping[str, TrackedRequest],
        scheduled: Mapping[str, int],
        state: KVConnectorBlockState,
        *,
        is_ending: bool = False,
    ) -> tuple[SaveJob, ...]:
        """Returns a job for all blocks to save after this step (one for each place), or none. `is_ending`: there may be
        no time later for blocks that the engine still holds."""
        room = self._find_room() if self.look_out.has_waiting or self.policy.is_watching else None
        has_room = room is None or not room.is_used_up
        # While the pool has room, what was left is saved at once; so is what there may be no time for later.
        takes_all = is_ending or self.policy.saves_at_once
        found: Sequence[NamedBlocks] = ()
        if has_room and self.policy.is_watching:
            found = self.policy.find_all() if takes_all else self.policy.find(self._next_under_way)
        due = self.look_out.begin_step(scheduled, has_room=has_room)
        if due and not self._is_ready(Place(self._cache.memory_id, self._cache.session)):
            # Not every rank may copy there yet: until all may, these requests are looked at once in a round.
            for one in due:
                self.look_out.put_off(one)
            due = []
        if not (due or self._leaving or self._ended or found or state.boundary_state_offloads):
            return ()
        parts: list[GroupSave] = []
        look = _Look()
        ended = self._take_ended() if self._ended else []
        try:
            if ended:
                self._reserve(ended, parts, keep=self._keep)
            self._reserve(self._leaving.collect(requests, scheduled, state), parts, keep=self._keep_or_put_back)
            # States first: the engine offers them once, while a full block can be saved in a later step too.
            for request_id, offers in state.boundary_state_offloads.items():
                tracked = requests.get(request_id)
                if tracked is not None and self._may_save(tracked):
                    if tracked not in due and request_id in scheduled:
                        due.append(tracked)
                    states = self.policy.choose(list(self._find_states(tracked, offers)))
                    self._reserve(states, parts, keep=self._keep_states)
            if not self.policy.saves_at_once:
                room = None
            elif due and (room is None or ended):
                room = self._find_room()
            self._look_at(due, scheduled, state, room, look)
            self._reserve(self.policy.choose(look.candidates), parts, keep=put_back)
            for tracked in look.waiting:
                self.look_out.wait(tracked)
            for tracked, full in look.looked_at:
                self.look_out.note(tracked, full)
            for named in found:
                parts += self._reserve_named(named, self._look_again, is_next=not takes_all)
        except BaseException:
            # No rank will report a job that is not sent, so its pins and slots are given back here.
            self._give_up(parts)
            put_back(look.candidates, 0)
            for tracked in due:
                self.look_out.wait(tracked)
            self.policy.look_again()
            raise
        return self._make_jobs(parts) if parts else ()

    def save_soon(self, tracked: TrackedRequest) -> bool:
        """Returns whether the next plan saves blocks of a request that the engine is about to preempt."""
        return self._may_save(tracked) and self._leaving.add(tracked, self._on_the_way)

    def end_request(self, tracked: TrackedRequest, tables: Sequence[Sequence[int]]) -> None:
        """Pins those blocks of a request that are worth saving, for the engine is about to free them; the next plan
        saves them. Without `tables` none is worth saving."""
        self.look_out.forget(tracked.request.request_id)
        if not tables or not self._may_save(tracked):
            return
        computed = tracked.request.num_computed_tokens
        tracked.chain.follow(tracked.request.block_hashes)
        self._worth.note_end(tracked.progress, min(computed, tracked.chain.tokens))
        if computed >= tracked.progress.due:
            for one in self.policy.choose(self._collect(tracked, computed, tables)):
                self._pin_ended(one)

    def end_jobs(self, report: WorkerReport) -> None:
        """Takes what ranks have done since the last report. The last rank's word publishes, or aborts if any rank
        failed."""
        for number, ranks in report.saved.items():
            job = self._jobs.get(number) or self._overdue.get(number)
            if job is None:
                continue
            job.waiting_ranks -= ranks
            job.is_dropped |= number in report.failed
            job.digests.update(report.digests.get(number, {}))
            if job.waiting_ranks > 0:
                continue
            if self._overdue.pop(number, None) is not None:
                self._give_up(job.parts)
                continue
            del self._jobs[number]
            # Records without the digests of every shard could never be checked.
            sums = None if job.is_dropped else self.rank_digests.gather(job.sent, job.digests)
            if number in report.failed:
                self._measures.count("kvoffload_failed_saves_total")
            if sums is None:
                self._give_up(job.parts)
            else:
                try:
                    self._publish(job, sums)
                finally:
                    self._forget(job.parts)

    def end_overdue(self) -> None:
        """Drops jobs that some rank has not reported for too long, so that the engine gets its blocks back."""
        while self._jobs:
            number, job = next(iter(self._jobs.items()))
            waits_s = self.clock() - job.begun_s
            if waits_s < self._settings.report_wait_s:
                return
            logger.warning(
                "save job %d is dropped: after %.0f s %d of %d ranks have not reported it",
                number,
                waits_s,
                job.waiting_ranks,
                self._settings.sharing.ranks,
            )
            self._measures.count("kvoffload_failed_saves_total")
            self._drop(job)
            self._overdue[number] = self._jobs.pop(number)

    def drop_all(self) -> None:
        """Drops all saves that are under way, because the weights change: none is published, and their blocks are
        unpinned."""
        for job in self._jobs.values():
            self._drop(job)
        self._take_ended()
        self.rank_digests.compare_again()
        self.version += 1

    def follow(self, former: Saves) -> None:
        """Continues the job numbers of former saves, whose jobs some rank may still report."""
        self._numbers, self.last_job = former._numbers, former.last_job

    # ---- inside ----

    def _drop(self, job: _Job) -> None:
        """Unpins a job's blocks and marks it as not to be published. Its copy may still read these blocks after the
        engine has overwritten them, but into slots that are never published."""
        job.is_dropped = True
        self._forget(job.parts)
        job.parts = [without_blocks(part) for part in job.parts]

    def _may_save(self, tracked: TrackedRequest) -> bool:
        if tracked.request.lora_request is not None and not self._is_known(tracked):
            tracked.is_tainted = True
        return not (tracked.is_tainted or tracked.settings.skip_save)

    def _look_at(
        self,
        due: Sequence[TrackedRequest],
        scheduled: Mapping[str, int],
        state: KVConnectorBlockState,
        room: SaveRoom | None,
        look: _Look,
    ) -> None:
        """Looks at requests as long as there is room. Blocks beyond it wait for a later step, and cost this one
        nothing."""
        for tracked in due:
            full = tracked.request.num_computed_tokens + scheduled[tracked.request.request_id]
            if full >= tracked.progress.due and self._may_save(tracked):
                if room is not None and room.is_used_up:
                    look.waiting.append(tracked)
                    continue
                tables = vllm_compat.block_tables(state, tracked.request.request_id)
                if tables is not None:
                    look.candidates += self._collect(tracked, full, tables, room)
            look.looked_at.append((tracked, full))
        if room is not None:
            self._measures.count("kvoffload_dropped_saves_total", room.lost, reason="no_slot")

    def _find_room(self) -> SaveRoom:
        groups = range(len(self.groups))
        slots = self._cache.ready_slots()
        if self.groups.is_staged:
            for first, others in self.groups.other_stages.items():
                slots[first] = min(slots[group] for group in (first, *others))
        if not self.groups.is_all_prefix:
            for group in groups:
                # States take slots before this room is divided, and wait for slots by themselves.
                if self.groups.rules[group].reuse is ReuseRule.EXACT_BOUNDARY:
                    slots[group] = self._pins.room
        return SaveRoom(
            slots=slots,
            most_slots=[self._cache.most_slots(group) for group in groups],
            pins=self._pins.room,
        )

    def _collect(
        self,
        tracked: TrackedRequest,
        full_tokens: int,
        tables: Sequence[Sequence[int]],
        room: SaveRoom | None = None,
    ) -> list[Candidates]:
        # Tokens without a hash are drafts or placeholders; what a hash covers is computed by the end of this step.
        tracked.chain.follow(tracked.request.block_hashes)
        return self._worth.collect(tracked, min(full_tokens, tracked.chain.tokens), tables, room)

    def _find_states(self, tracked: TrackedRequest, offers: Iterable[tuple[int, int, int]]) -> Iterator[Candidates]:
        """A recurrent state may be saved only from the block and at the boundary that the engine hands off."""
        tracked.chain.follow(tracked.request.block_hashes)
        for table, block, boundary in offers:
            group = self.groups.of_table.get(table)
            if group is None or boundary > min(tracked.chain.tokens, tracked.progress.limit):
                continue
            block_size = self.groups.rules[group].block_size
            if boundary % block_size == 0:
                self._worth.note_state(tracked.progress, boundary)
                end = boundary // block_size
                yield Candidates(tracked, group, range(end - 1, end), np.array([block], np.int64))

    def _pin_ended(self, candidates: Candidates) -> None:
        """Pins blocks of an ended request as far as there are pins; the rest is not offered again."""
        room, blocks = self._pins.room, candidates.list_blocks()
        if len(blocks) > room:
            if not self.policy.keep([candidates]):
                self._measures.count("kvoffload_dropped_saves_total", len(blocks) - room, reason="no_pin")
                self._note_lost(candidates, room)
            candidates = candidates.keep_first(room)
            blocks = blocks[:room]
        if blocks:
            self._pins.pin(blocks)
            self._ended.append(candidates)

    def _note_lost(self, candidates: Candidates, room: int) -> None:
        """Without a block of a window its boundary is lost; what lies before it was saved for other boundaries."""
        at = 0
        if candidates.group in self.groups.prefixes:
            at = candidates.positions[int(np.flatnonzero(candidates.blocks != NULL_BLOCK)[room])]
        tokens = at * self.groups.rules[candidates.group].block_size
        candidates.tracked.lost_from = min(candidates.tracked.lost_from, tokens)

    def _take_ended(self) -> list[Candidates]:
        """Takes the blocks that ended requests have left, and unpins them: the engine cannot take a block before the
        plan returns to it."""
        ended, self._ended = self._ended, []
        for one in reversed(ended):
            # Apart: requests may share blocks, and not every vLLM need take a block twice in one call.
            self._pins.unpin(one.list_blocks())
        return ended

    def _reserve(self, candidates: Sequence[Candidates], parts: list[GroupSave], *, keep: Keep) -> None:
        """Adds pins and slots to `parts` for blocks that the policy has chosen, as far as there is room. Each part is
        the caller's as soon as it is added, also if a later one fails. `keep` takes the candidates of a group and the
        index of the first block without room, and returns whether it is offered again."""
        for group, tenant in sorted({(one.group, one.tracked.settings.tenant) for one in candidates}):
            mine = [one for one in candidates if (one.group, one.tracked.settings.tenant) == (group, tenant)]
            names = [one.tracked.chain.names(group, one.positions) for one in mine]
            if self._note_saved is not None:
                for one, hashes in zip(mine, names, strict=True):
                    self._note_saved(one.tracked, group, one.positions, hashes)
            named = NamedBlocks(
                group,
                b"".join(names),
                b"".join(one.tracked.chain.parents(group, one.positions) for one in mine),
                np.concatenate([one.blocks for one in mine]),
                tenant,
            )
            parts += self._reserve_named(named, partial(keep, mine))

    def _reserve_named(
        self, named: NamedBlocks, put_back: Callable[[int], bool], *, is_next: bool = False
    ) -> list[GroupSave]:
        """Pins and reserves slots for blocks that are not saved yet. `put_back` takes the index of the first block for
        which there is no room, and returns whether it is offered again: if not, it and those after it are dropped, and
        counted."""
        group, is_staged = named.group, self.groups.is_staged
        wanted = (named.blocks != NULL_BLOCK) & ~self._cache.lookup(group, named.hashes)
        if is_staged:
            wanted = self._want_whole(named, wanted)
        is_watching = self.policy.is_watching
        if is_watching:
            self.policy.settle(named.blocks[~wanted])
        if not wanted.any():
            return []
        if not self._is_ready(Place(self._cache.memory_id, self._cache.session)):
            put_back(int(wanted.argmax()))
            return []
        index, words = self._choose_new(named, np.flatnonzero(wanted))
        if not len(index):
            return []
        room = min(len(index), self._pins.room)
        slots = self._cache.take(group, room)
        beside: Sequence[ReservedSlots] = ()
        if is_staged:
            slots, *beside = self._take_beside(slots, room)
        if len(slots) < len(index):
            self._on_the_way[group].difference_update(words[len(slots) :])
            if not put_back(int(index[len(slots)])):
                self._measures.count("kvoffload_dropped_saves_total", len(index) - room, reason="no_pin")
                self._measures.count("kvoffload_dropped_saves_total", room - len(slots), reason="no_slot")
        if not len(slots):
            return []
        chosen = named.choose(index[: len(slots)])
        self._pins.pin(chosen.blocks.tolist())
        self._next_under_way += len(slots) if is_next else 0
        if is_watching:
            self.policy.settle(chosen.blocks)
        parts = [GroupSave(chosen, words[: len(slots)], slots, is_next)]
        return self._save_beside(parts[0], beside) if is_staged else parts

    def _want_whole(self, named: NamedBlocks, wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Returns which blocks are wanted: if one of the stages lacks a block, all of them save it."""
        for stage in self.groups.other_stages[named.group]:
            wanted = wanted | ((named.blocks != NULL_BLOCK) & ~self._cache.lookup(stage, named.hashes))
        return wanted

    def _take_beside(self, first: ReservedSlots, count: int) -> list[ReservedSlots]:
        """Takes slots for a block's stages, equally many for each: records of one stage alone are of no use."""
        taken = [first, *(self._cache.take(stage, count) for stage in self.groups.other_stages[first.group])]
        # A server may have been followed by another between two of them.
        places = {(slots.memory_id, slots.session) for slots in taken}
        count = min(map(len, taken)) if len(places) == 1 else 0
        for slots in taken:
            if len(slots) > count:
                self._cache.abort(slots[count:])
        return [slots[:count] for slots in taken]

    def _save_beside(self, first: GroupSave, others: Sequence[ReservedSlots]) -> list[GroupSave]:
        """Returns the first stage's save, and those of the other stages for the same blocks."""
        beside = [replace(first.named, group=slots.group) for slots in others]
        return [
            first,
            *(
                GroupSave(named, [], slots, first.is_next, is_first=False)
                for named, slots in zip(beside, others, strict=True)
            ),
        ]

    def _keep(self, candidates: Sequence[Candidates], _index: int) -> bool:
        return self.policy.keep(candidates)

    def _keep_or_put_back(self, candidates: Sequence[Candidates], index: int) -> bool:
        return self.policy.keep(candidates) or put_back(candidates, index)

    def _keep_states(self, candidates: Sequence[Candidates], index: int) -> bool:
        """Pins states, which have one block each, from `index` on. The next plan saves them: their slots were asked for
        just now, and the engine does not offer them again."""
        if not self.policy.keep(candidates):
            for one in candidates[index:]:
                self._pin_ended(one)
        return True

    def _look_again(self, _index: int) -> bool:
        self.policy.look_again()
        return True

    def _choose_new(self, named: NamedBlocks, index: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], list[int]]:
        """Returns the indices of blocks that are not being saved already, each block once, with the first words of
        their names. From now on these blocks count as being saved."""
        on_the_way = self._on_the_way[named.group]
        firsts = np.frombuffer(named.hashes, np.uint64)[:: HASH_BYTES // 8]
        words: list[int] = firsts[index].tolist()
        if on_the_way.isdisjoint(words):
            before = len(on_the_way)
            on_the_way.update(words)
            if len(on_the_way) == before + len(words):
                return index, words
            on_the_way.difference_update(words)
        chosen = []
        for at, word in zip(index.tolist(), words, strict=True):
            if word not in on_the_way:
                on_the_way.add(word)
                chosen.append((at, word))
        return np.array([at for at, _ in chosen], np.intp), [word for _, word in chosen]

    def _make_jobs(self, parts: list[GroupSave]) -> tuple[SaveJob, ...]:
        """Makes one job for each place: a new server may have followed the former one between two parts."""
        jobs = []
        places = dict.fromkeys([Place(part.slots.memory_id, part.slots.session) for part in parts])
        for place in places:
            mine = told = parts
            if len(places) > 1:
                mine = told = [part for part in parts if (part.slots.memory_id, part.slots.session) == place]
            if len(mine) > 1:
                mine = join_parts(mine)
                told = sorted(place_parts(mine), key=self._is_published_later)
            number = self.last_job = next(self._numbers)
            moves = BlockMoves(
                np.repeat([part.named.group for part in mine], [len(part.slots) for part in mine]),
                np.concatenate([part.named.blocks for part in mine]),
                np.concatenate([part.slots.addresses for part in mine]),
            )
            names = [part.named.hashes for part in mine]
            writers, compared = self.rank_digests.choose_writers(moves.groups, names)
            job = SaveJob(number, place, moves, writers, compared)
            self._jobs[number] = _Job(job, mine, told, self._settings.sharing.ranks, self.clock(), self.step)
            jobs.append(job)
        return tuple(jobs)

    def _is_published_later(self, part: GroupSave) -> bool:
        """Whether a part is published after the blocks of full attention. The cache considers a window or a state
        useless until it has the block of full attention there, and would evict it first."""
        return self.groups.rules[part.named.group].reuse is not ReuseRule.PREFIX

    def _publish(self, job: _Job, sums: npt.NDArray[np.uint64]) -> None:
        self._measures.observe("kvoffload_save_seconds", self.clock() - job.begun_s)
        for part in job.told:
            named, records, shards = part.named, len(part.slots), self.groups.shards[part.named.group]
            is_told = self._cache.publish(
                Publication(
                    part.slots,
                    hashes=named.hashes,
                    parents=named.parents,
                    digests=self._settings.finish(named, sums[:, part.begin : part.begin + records], shards),
                    shards=self._settings.sharing.nodes * shards,
                    tenant=named.tenant,
                )
            )
            if is_told:
                size_bytes = records * self._settings.count_bytes(named.group, shards)
                self._measures.count("kvoffload_saved_bytes_total", size_bytes)
            elif part.is_first:
                self._measures.count("kvoffload_dropped_saves_total", records, reason="no_server")
        self.version += 1

    def _give_up(self, parts: Sequence[GroupSave]) -> None:
        for part in parts:
            self._cache.abort(part.slots)
        self._forget(parts)

    def _forget(self, parts: Sequence[GroupSave]) -> None:
        # The last one first: what the engine takes next is put before what was put there already.
        for part in reversed(parts):
            if not part.is_first:
                continue
            self._on_the_way[part.named.group].difference_update(part.words)
            self._pins.unpin(part.named.blocks.tolist(), is_next=part.is_next)
            self._next_under_way -= len(part.named.blocks) if part.is_next else 0
