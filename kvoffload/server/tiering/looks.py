"""Finds which of a request's blocks a tier has that has to be asked, because others write to its place, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.hash_rows import Rows
from kvoffload.server.common.turns import Turns
from kvoffload.server.tiering.settings import TierSpace
from kvoffload.tiers import FinishedBatch, RecordOutcome, Tier

BATCH_NAMES = 1024
"""Number of names that a tier is asked for at once."""
NAMES_UNDER_WAY = 8192
"""Number of names that a tier is asked for at a time, for all requests together, rounded up to whole batches."""
BATCHES_AT_ONCE = 32
"""Number of batches for which a tier is asked in one go, taken or not."""

Found = list[npt.NDArray[np.bool_]]
"""For each group, which of the rows are there."""
Then = Callable[[Found, float], None]
"""Called with what was found, and the time at which it was."""


@dataclass(eq=False)
class _Look:
    """One request's look for blocks."""

    space: TierSpace
    rows: Sequence[Rows]
    found: Found
    then: Then
    deadline_s: float
    owner: str
    batches: Iterator[tuple[int, int, npt.NDArray[np.intp]]] = field(init=False)
    """Batches that are still to be asked for: the group, the shard, and the rows."""
    is_asked: bool = False
    """Whether the tier was asked for all of them."""
    waits_for: set[int] = field(default_factory=set)
    """Batches that have not ended, by the tier's ticket."""

    def __post_init__(self) -> None:
        self.batches = self._cut()

    def _cut(self) -> Iterator[tuple[int, int, npt.NDArray[np.intp]]]:
        for group, wanted in enumerate(self.found):
            at = np.flatnonzero(wanted)
            for first in range(0, len(at), BATCH_NAMES):
                for shard in range(self.space.shards(group)):
                    yield group, shard, at[first : first + BATCH_NAMES]


class TierLooks:
    """Belongs to the thread of the server's core. Nothing here waits."""

    def __init__(self, tier: Tier, *, timeout_s: float) -> None:
        """`timeout_s`: how long the tier may take for one answer; what it has not answered by then is missing."""
        self._tier = tier
        self._timeout_s = timeout_s
        self._asked: dict[int, tuple[_Look, int, npt.NDArray[np.intp]]] = {}
        """Batches under way, by the tier's ticket: the look, the group, and the rows that are asked for."""
        self._under_way = 0
        """Number of names in them."""
        self._looks: set[_Look] = set()
        self._line = Turns[_Look]()
        """Looks of which a part has not been asked for yet."""

    def __len__(self) -> int:
        return len(self._looks)

    def spaces(self) -> set[int]:
        """Returns the identities of which something is asked."""
        return {look.space.number for look in self._looks}

    def next_s(self) -> float | None:
        """Returns the time at which `expire` is due, or None."""
        if self._line and self._under_way < NAMES_UNDER_WAY:
            return 0.0
        return min((look.deadline_s for look in self._looks), default=None)

    def ask(
        self,
        space: TierSpace,
        rows: Sequence[Rows],
        lacking: Found,
        *,
        now_s: float,
        wait_s: float,
        then: Then,
        owner: str = "",
    ) -> None:
        """Looks for blocks. A block counts as there if all its shards are; what cannot be asked or is not answered in
        time counts as missing. `then` is called once, now or later. The tier is asked for a bounded number of names at
        a time, and owners take turns."""
        found = [wanted.copy() for wanted in lacking]
        look = _Look(space, rows, found, then, now_s + wait_s, owner)
        self._looks.add(look)
        self._line.add(owner, look)
        self._ask_more(now_s)

    def _ask_more(self, now_s: float) -> None:
        """Asks the tier for the next batches. Of those that it does not take there may be thousands: the others come
        with the next turn of the loop."""
        for _ in range(BATCHES_AT_ONCE):
            if not self._line or self._under_way >= NAMES_UNDER_WAY:
                return
            _, look = self._line.take()
            batch = next(look.batches, None) if look in self._looks else None
            if batch is None:
                look.is_asked = True
                if not look.waits_for:
                    self._end(look, now_s)
                continue
            self._line.add(look.owner, look)
            group, shard, at = batch
            names = look.space.names(group, look.rows[group][at].tobytes(), shard)
            timeout_s = min(max(look.deadline_s - now_s, 0.0), self._timeout_s)
            ticket = self._tier.look(names, timeout_s=timeout_s)
            if ticket is None:
                look.found[group][at] = False
            else:
                self._asked[ticket] = look, group, at
                self._under_way += len(at)
                look.waits_for.add(ticket)

    def finish(self, batch: FinishedBatch, now_s: float) -> bool:
        """Takes a batch that has ended. False: it is not one of these."""
        asked = self._asked.pop(batch.ticket, None)
        if asked is None:
            return False
        look, group, at = asked
        self._under_way -= len(at)
        look.found[group][at] &= batch.outcomes == RecordOutcome.FOUND
        look.waits_for.discard(batch.ticket)
        if look.is_asked and not look.waits_for:
            self._end(look, now_s)
        self._ask_more(now_s)
        return True

    def expire(self, now_s: float) -> None:
        """Ends looks whose time is over, with nothing found, and goes on asking for the others."""
        for look in [one for one in self._looks if one.deadline_s <= now_s]:
            self._give_up(look, now_s)
        self._ask_more(now_s)

    def end_all(self, now_s: float) -> None:
        for look in list(self._looks):
            self._give_up(look, now_s)

    def _give_up(self, look: _Look, now_s: float) -> None:
        for found in look.found:
            found[:] = False
        self._end(look, now_s)

    def _end(self, look: _Look, now_s: float) -> None:
        if look in self._looks:
            self._looks.discard(look)
            look.then(look.found, now_s)
