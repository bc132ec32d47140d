"""Slots that were reserved ahead, so that planning a save needs no call to the server. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.cache import ReservedSlots

POOL_SHARE = 8
"""At most one part in so many of a pool is held ready, all groups together: nothing else can use it meanwhile."""
FULL_POOL_SHARE = 32
"""The same for a pool that is full: there, slots held ready take the place of blocks."""
MAX_SLOTS = 32_768
"""The most slots that are held ready for one group."""
_NONE = np.empty(0, np.uint64)
_LEAST = 8


class CreditStock:
    """Holds slots of one group, ready to be taken: at most `high`; it is filled up again below half of that.

    `whole`: the smallest number of slots that is of use."""

    def __init__(self, group: int, wanted: int, *, slot_bytes: int = 1, whole: int = 1) -> None:
        self.group = group
        self.whole = whole
        self.high = self.most = self.wanted = min(wanted, MAX_SLOTS)
        self.lacking = 0
        """How many slots a save wanted beyond those in stock. They are asked for once, up to `most` in all."""
        self.slot_bytes = max(slot_bytes, 1)
        self.tickets = self._addresses = _NONE
        self.is_asking = False
        self.not_before_ns = 0
        """Time before which no slots are asked for. It is set when a grant was short: the pool has no room until some
        is released."""

    def __len__(self) -> int:
        return len(self.tickets)

    def missing(self, now_ns: int) -> int:
        """Returns how many slots to ask for now; 0: enough are there or on their way."""
        if self.is_asking or now_ns < self.not_before_ns:
            return 0
        ready = len(self.tickets)
        if ready < self.lacking:
            return max(min(self.high + self.lacking, max(self.high, self.most)) - ready, 0)
        return self.high - ready if 2 * ready < self.high else 0

    def put(self, tickets: npt.NDArray[np.uint64], addresses: npt.NDArray[np.uint64]) -> None:
        granted = tickets != 0
        self.tickets = np.concatenate([self.tickets, tickets[granted]])
        self._addresses = np.concatenate([self._addresses, addresses[granted]])

    def take(self, memory_id: int, session: int, count: int) -> ReservedSlots:
        """Takes so many slots, or as many as are there."""
        taken = ReservedSlots(memory_id, session, self.group, self.tickets[:count], self._addresses[:count])
        self.tickets, self._addresses = self.tickets[count:], self._addresses[count:]
        return taken

    def clear(self) -> None:
        """Forgets the slots: they do not belong to this process any more."""
        self.tickets = self._addresses = _NONE
        self.is_asking = False
        self.lacking = 0


def fit_stocks(stocks: Sequence[CreditStock], pool_bytes: int, *, is_full: bool = False) -> None:
    """Sets the limit of each stock. In a small pool each group gets the same part of what it wants, and always some."""
    wanted_bytes = max(sum(stock.wanted * stock.slot_bytes for stock in stocks), 1)
    most = min(1.0, pool_bytes / POOL_SHARE / wanted_bytes)
    share = min(1.0, pool_bytes / FULL_POOL_SHARE / wanted_bytes) if is_full else most
    for stock in stocks:
        # A stock is filled up below half: enough slots for one whole piece are there even then.
        stock.most = int(stock.wanted * most)
        whole = min(2 * stock.whole, stock.most)
        stock.high = min(stock.wanted, max(int(stock.wanted * share), whole, _LEAST))
