"""Which of a request's blocks a later request can use: what is saved of full attention, of windows, of states.

A block of full attention helps every request with the same prefix. A window helps only a hit that ends where the window
ends, and a state only one that ends exactly there. So windows are kept for boundaries at which hits are to be expected:
the end of the prompt, the end of the request, where two prompts were seen to part, and wherever the engine itself
retains them. States exist only where the engine hands them off, and in models with states nothing beyond the last one
is of use.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvoffload.cache import needed_blocks
from kvoffload.connector.group_table import GroupTable
from kvoffload.connector.tracked_request import NEVER, SaveProgress, TrackedRequest

NULL_BLOCK = 0
GATHERED_TOKENS = 256
"""What a request decodes is saved in pieces of so many tokens, and at its end: a look at a request costs more than all
that it finds."""
Tables = Sequence[Sequence[int]]


@dataclass(eq=False)
class SaveRoom:
    """How much a step may still look at and save. What it looks at and finds saved already takes no slot, so it may
    look at a few blocks more than there are slots for."""

    slots: list[int]
    """By group, that are held ready."""
    most_slots: Sequence[int]
    """By group, that are held ready at best."""
    pins: int
    looks: int = 32
    """Blocks beyond those that there are slots for."""
    lost: int = 0
    """Blocks of windows that there never will be slots for."""

    @property
    def is_used_up(self) -> bool:
        """Nothing more can be saved, of one group at least: a hit needs blocks of all."""
        return not (self.pins > 0 and all(self.slots))

    def take(self, group: int, count: int) -> int:
        """Returns how many of these blocks to look at."""
        slots = min(count, self.slots[group], self.pins)
        self.slots[group] -= slots
        self.pins -= slots
        looks = min(count - slots, self.looks)
        self.looks -= looks
        return slots + looks

    def take_whole(self, group: int, count: int) -> bool | None:
        """Says whether there are slots for all of these blocks. None: there never will be."""
        if count > self.most_slots[group]:
            self.lost += count
            return None
        is_enough = count <= min(self.slots[group], self.pins)
        if is_enough:
            self.slots[group] -= count
            self.pins -= count
        return is_enough


@dataclass(frozen=True, eq=False)
class Candidates:
    """Blocks of one group and one request that may be saved, in the order of the prefix."""

    tracked: TrackedRequest
    group: int
    positions: range
    blocks: npt.NDArray[np.int64]
    end: int = 0
    """The boundary that a window belongs to."""
    is_noted: bool = False
    """What there is no room for now is saved later in any case."""

    def list_blocks(self) -> list[int]:
        """Those that the engine still has."""
        blocks: list[int] = self.blocks[self.blocks != NULL_BLOCK].tolist()
        return blocks

    def keep_first(self, count: int) -> Candidates:
        """Returns these with the first so many of those blocks alone."""
        is_kept = np.cumsum(self.blocks != NULL_BLOCK) <= count
        return replace(self, blocks=np.where(is_kept, self.blocks, NULL_BLOCK))

    def put_back(self, index: int) -> None:
        """There was no room from this one on: they are looked at again in the next step."""
        if self.is_noted:
            return
        progress = self.tracked.progress
        progress.next[self.group] = min(progress.next[self.group], self.positions[index])
        progress.due = 0
        if self.end and self.end not in progress.ends:
            insort(progress.ends, self.end)


class SaveWorth:
    """Decides what is worth saving; pure. `interval` is the engine's own: tokens between boundaries that it retains; 0
    is none there, None is all."""

    def __init__(self, groups: GroupTable, *, interval: int | None = 0, gathered_tokens: int = GATHERED_TOKENS) -> None:
        self._groups = groups
        self._gathered = [max(gathered_tokens // rule.block_size, 1) * rule.block_size for rule in groups.rules]
        self.interval = 0 if interval is not None and interval % groups.alignment else interval

    @property
    def _keeps_all_windows(self) -> bool:
        return self.interval is None

    @property
    def _goes_by_ends(self) -> bool:
        return bool(self._groups.windows) and not self._keeps_all_windows

    def begin(self, *, prompt_tokens: int, branch: int = 0, limit: int | None = None) -> SaveProgress:
        """Begins the progress of a request without blocks. `branch`: where it parts from what is cached, 0 if that is
        not known. `limit`: tokens beyond which nothing is saved."""
        progress = SaveProgress(
            next=[0] * len(self._groups), interval_end=self.interval or 0, limit=NEVER if limit is None else limit
        )
        if self._goes_by_ends and not self._groups.with_states:
            # A repetition of the prompt computes its last token at least; what continues it may use all of it.
            matched = {self._groups.align(prompt_tokens - 1), self._groups.align(prompt_tokens), branch}
            progress.ends = sorted({self._groups.drop(end) for end in matched} - {0})
        self._find_due(progress)
        return progress

    def note_state(self, progress: SaveProgress, boundary: int) -> None:
        """A state was handed off at this boundary, which is to be saved: what leads up to it is of use from now on."""
        progress.states_end = max(progress.states_end, boundary)
        if self._goes_by_ends and boundary not in progress.ends:
            insort(progress.ends, boundary)
        progress.due = 0

    def note_end(self, progress: SaveProgress, tokens: int) -> None:
        """The request ends with so many tokens computed."""
        if not self._goes_by_ends or self._groups.with_states:
            return
        end = self._groups.drop(self._groups.align(min(tokens, progress.limit)))
        if end and end not in progress.ends:
            insort(progress.ends, end)
            progress.due = 0

    def collect(
        self, tracked: TrackedRequest, full_tokens: int, tables: Tables, room: SaveRoom | None = None
    ) -> list[Candidates]:
        """Everything below `full_tokens` that was not looked at before, as far as there is room. What there is none
        for makes the request due at once."""
        progress, groups = tracked.progress, self._groups
        full_tokens = min(full_tokens, progress.limit)
        found: list[Candidates] = []
        useful = min(full_tokens, progress.states_end) if groups.with_states else full_tokens
        everywhere = (*groups.prefixes, *groups.windows) if self._keeps_all_windows else groups.prefixes
        is_behind = False
        for group in everywhere:
            end = (useful if group in groups.prefixes else full_tokens) // groups.rules[group].block_size
            begin = progress.next[group]
            if begin < end:
                stop = end if room is None else begin + room.take(group, end - begin)
                is_behind |= stop < end
                found += self._take(tracked, group, range(begin, stop), tables)
        if groups.windows and not self._keeps_all_windows:
            is_behind |= self._collect_windows(found, tracked, full_tokens, tables, room)
        self._find_due(progress)
        if is_behind:
            progress.due = 0
        return found

    def _collect_windows(
        self,
        found: list[Candidates],
        tracked: TrackedRequest,
        full_tokens: int,
        tables: Tables,
        room: SaveRoom | None,
    ) -> bool:
        """Collects whole windows: half of one is of use to nobody. Whether one has to wait for room."""
        progress, groups = tracked.progress, self._groups
        while self.interval and progress.interval_end <= full_tokens and not groups.with_states:
            if progress.interval_end not in progress.ends:
                insort(progress.ends, progress.interval_end)
            progress.interval_end += self.interval
        while progress.ends and progress.ends[0] <= full_tokens:
            end = progress.ends[0]
            windows: list[tuple[int, range]] = []
            for group in groups.windows:
                needed = needed_blocks(groups.rules[group], local=0, boundary=end)
                missing = range(max(needed.start, progress.next[group]), needed.stop)
                if missing:
                    windows.append((group, missing))
            answers = [True if room is None else room.take_whole(group, len(missing)) for group, missing in windows]
            if False in answers:
                return True
            del progress.ends[0]
            for (group, missing), is_taken in zip(windows, answers, strict=True):
                if is_taken:
                    found += self._take(tracked, group, missing, tables, end)
        return False

    def _take(
        self, tracked: TrackedRequest, group: int, positions: range, tables: Tables, end: int = 0
    ) -> list[Candidates]:
        table = tables[self._groups.facts[group].index]
        positions = range(positions.start, min(positions.stop, len(table)))
        if not positions:
            return []
        tracked.progress.next[group] = positions.stop
        return [Candidates(tracked, group, positions, np.array(table[positions.start : positions.stop], np.int64), end)]

    def _find_due(self, progress: SaveProgress) -> None:
        groups = self._groups
        due = progress.ends[0] if progress.ends else NEVER
        if groups.windows and not groups.with_states:
            if self._keeps_all_windows:
                for group in groups.windows:
                    due = min(due, (progress.next[group] + 1) * groups.rules[group].block_size)
            elif self.interval:
                due = min(due, progress.interval_end)
        # A window moves on, and its blocks with it; a prefix stays.
        progress.due = progress.decoded_due = due
        for group in groups.prefixes if not groups.with_states else ():
            size = groups.rules[group].block_size
            progress.due = min(progress.due, (progress.next[group] + 1) * size)
            progress.decoded_due = min(progress.decoded_due, progress.next[group] * size + self._gathered[group])
        if progress.due > progress.limit:
            progress.due = progress.decoded_due = NEVER
