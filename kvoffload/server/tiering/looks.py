"""Which of a request's blocks a tier has that does not know it by itself, because others write to its place, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.hash_rows import Rows
from kvoffload.server.tiering.terms import TierSpace
from kvoffload.tiers import FinishedBatch, RecordOutcome, Tier

LOOK_TIMEOUT_S = 1.0

Found = list[npt.NDArray[np.bool_]]
"""By group: which of the rows are there."""
Then = Callable[[Found, float], None]
"""What was found, and when it was."""


@dataclass(eq=False)
class _Look:
    """Is what one request has looked for."""

    space: TierSpace
    found: Found
    then: Then
    deadline_s: float
    waits_for: set[int] = field(default_factory=set)
    """Batches: one for each group and shard that anything was asked of."""


class TierLooks:
    """Belongs to the thread of the server's core. Nothing here waits."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._asked: dict[int, tuple[_Look, int, npt.NDArray[np.intp]]] = {}
        """By the tier's ticket: for whom, of which group, and which of its rows."""
        self._looks: set[_Look] = set()

    def __len__(self) -> int:
        return len(self._looks)

    def spaces(self) -> set[int]:
        """Identities of which something is asked."""
        return {look.space.number for look in self._looks}

    def next_s(self) -> float | None:
        """When `expire` is due."""
        return min((look.deadline_s for look in self._looks), default=None)

    def ask(
        self, space: TierSpace, rows: Sequence[Rows], lacking: Found, *, now_s: float, wait_s: float, then: Then
    ) -> None:
        """`then` is called once, now or later; a block is there that has all its shards there. What cannot be asked, or
        is not answered in time, is not there."""
        look = _Look(space, [np.zeros(len(group), np.bool_) for group in rows], then, now_s + wait_s)
        for group, wanted in enumerate(lacking):
            at = np.flatnonzero(wanted)
            hashes = rows[group][at].tobytes()
            tickets = [
                self._tier.look(space.names(group, hashes, shard), timeout_s=min(wait_s, LOOK_TIMEOUT_S))
                for shard in range(space.shards(group) if hashes else 0)
            ]
            for ticket in tickets:
                if ticket is not None:
                    self._asked[ticket] = look, group, at
                    look.waits_for.add(ticket)
            look.found[group][at] = bool(tickets) and None not in tickets
        self._looks.add(look)
        if not look.waits_for:
            self._end(look, now_s)

    def finish(self, batch: FinishedBatch, now_s: float) -> bool:
        """A batch has ended. False: it is not one of these."""
        asked = self._asked.pop(batch.ticket, None)
        if asked is None:
            return False
        look, group, at = asked
        look.found[group][at] &= batch.outcomes == RecordOutcome.FOUND
        look.waits_for.discard(batch.ticket)
        if not look.waits_for:
            self._end(look, now_s)
        return True

    def expire(self, now_s: float) -> None:
        """Those whose time is over know nothing."""
        for look in [one for one in self._looks if one.deadline_s <= now_s]:
            self._give_up(look, now_s)

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
