"""Decides which of a request's blocks a later request can use: blocks of full attention, of windows, of states.

A block of full attention helps every request with the same prefix. A window helps only a hit that ends where the window
ends, and a state only one that ends exactly there. So windows are kept for boundaries at which hits are expected:
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
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.tracked_request import NEVER, SaveProgress, TrackedRequest

NULL_BLOCK = 0
GATHERED_TOKENS = 256
"""Number of tokens that a request decodes before they are saved; the rest is saved at its end. Looking at a request
more often would cost more than the saves themselves."""
Tables = Sequence[Sequence[int]]


@dataclass(eq=False)
class SaveRoom:
    """How many blocks a step may still look at and save. Blocks that turn out to be saved already take no slot, so a
    step may look at a few more blocks than there are slots for."""

    slots: list[int]
    """Number of slots that are held ready, by group."""
    most_slots: Sequence[int]
    """Maximum number of slots that are ever held ready, by group."""
    pins: int
    looks: int = 32
    """Number of blocks that may be looked at beyond those for which there are slots."""
    lost: int = 0
    """Number of blocks of windows for which there never will be enough slots."""

    @property
    def is_used_up(self) -> bool:
        """Whether nothing more can be saved for at least one group: a hit needs blocks of all groups."""
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
        """Takes room for all of these blocks or none. Returns whether there was enough; None: there never will be."""
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
    """The boundary that a window belongs to; 0: the blocks are no window."""
    is_noted: bool = False
    """Whether the policy remembers these blocks, so that those without room now are saved later in any case."""

    def list_blocks(self) -> list[int]:
        """Lists the blocks that the engine still has."""
        blocks: list[int] = self.blocks[self.blocks != NULL_BLOCK].tolist()
        return blocks

    def keep_first(self, count: int) -> Candidates:
        """Returns a copy with only the first `count` blocks that the engine still has."""
        is_kept = np.cumsum(self.blocks != NULL_BLOCK) <= count
        return replace(self, blocks=np.where(is_kept, self.blocks, NULL_BLOCK))

    def put_back(self, index: int) -> None:
        """Lets the next step look again at the blocks from this index on, for which there was no room."""
        if self.is_noted:
            return
        progress = self.tracked.progress
        progress.next[self.group] = min(progress.next[self.group], self.positions[index])
        progress.due = 0
        if self.end and self.end not in progress.ends:
            insort(progress.ends, self.end)


def put_back(candidates: Sequence[Candidates], index: int) -> bool:
    """Puts the candidates from `index` on back, to be offered again; `index` counts over all of them."""
    for one in candidates:
        if index < len(one.blocks):
            one.put_back(max(index, 0))
        index -= len(one.blocks)
    return True


class SaveWorth:
    """Decides which blocks are worth saving; pure. `interval` is the number of tokens between the boundaries that the
    engine retains: 0 means none at intervals, None all."""

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
            # A repetition of the prompt computes at least its last token; a prompt that continues it may use all.
            matched = {self._groups.align(prompt_tokens - 1), self._groups.align(prompt_tokens), branch}
            progress.ends = sorted({self._groups.drop(end) for end in matched} - {0})
        self._find_due(progress)
        return progress

    def note_state(self, progress: SaveProgress, boundary: int) -> None:
        """Notes that the engine has handed off a state at this boundary for saving: from now on the blocks that lead up
        to it are of use."""
        progress.states_end = max(progress.states_end, boundary)
        if self._goes_by_ends and boundary not in progress.ends:
            insort(progress.ends, boundary)
        progress.due = 0

    def note_end(self, progress: SaveProgress, tokens: int) -> None:
        """Notes that the request ends with so many tokens computed."""
        if not self._goes_by_ends or self._groups.with_states:
            return
        end = self._groups.drop(self._groups.align(min(tokens, progress.limit)))
        if end and end not in progress.ends:
            insort(progress.ends, end)
            progress.due = 0

    def collect(
        self, tracked: TrackedRequest, full_tokens: int, tables: Tables, room: SaveRoom | None = None
    ) -> list[Candidates]:
        """Returns the blocks up to `full_tokens` that were not looked at before, as far as there is room. If any
        remain, the request is due at once."""
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
        """Collects whole windows, since half a window is useless. Returns whether one has to wait for room."""
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
        # A request loses the blocks behind a moving window, and keeps those of its prefix.
        progress.due = progress.decoded_due = due
        for group in groups.prefixes if not groups.with_states else ():
            size = groups.rules[group].block_size
            progress.due = min(progress.due, (progress.next[group] + 1) * size)
            progress.decoded_due = min(progress.decoded_due, progress.next[group] * size + self._gathered[group])
        if progress.due > progress.limit:
            progress.due = progress.decoded_due = NEVER
