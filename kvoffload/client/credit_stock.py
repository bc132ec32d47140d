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
KEPT_NS = 1_000_000_000
"""Slots beyond the limit of a stock go back to the server when no save has taken any for so many nanoseconds."""
_NONE = np.empty(0, np.uint64)


class CreditStock:
    """Holds slots of one group, ready to be taken: `high` of them, and for a moment those that a save lacked. It is
    filled up again below half of `high`.

    `whole`: the smallest number of slots that is of use."""

    def __init__(self, group: int, wanted: int, *, slot_bytes: int = 1, whole: int = 1) -> None:
        self.group = group
        self.whole = whole
        self.high = self.most = self.wanted = min(wanted, MAX_SLOTS)
        self.lacking = 0
        """How many slots a save wanted beyond those in stock. They are asked for once, up to `most` in all."""
        self.slot_bytes = max(slot_bytes, 1)
        self.tickets = self._addresses = _NONE
        self.asked = 0
        """How many slots are on their way."""
        self.not_before_ns = 0
        """Time before which no slots are asked for. It is set when a grant was short: the pool has no room until some
        is released."""
        self._untaken_since_ns = 0
        """Since when the stock has held more than `high` without a save taking any; 0: not so now."""
        self.waits_for_save = False
        """Whether slots went back because no save took them. Then no more are asked for until a save takes some: the
        room that they left in the pool would otherwise be asked for again and again."""

    def __len__(self) -> int:
        return len(self.tickets)

    @property
    def is_asking(self) -> bool:
        """Whether slots are on their way."""
        return self.asked > 0

    @property
    def held(self) -> int:
        """Number of slots that are there, or on their way."""
        return len(self.tickets) + self.asked

    def missing(self, now_ns: int) -> int:
        """Returns how many slots to ask for now; 0: enough are there or on their way."""
        if self.is_asking or now_ns < self.not_before_ns:
            return 0
        ready = len(self.tickets)
        if ready < self.lacking:
            return max(min(self.high + self.lacking, max(self.high, self.most)) - ready, 0)
        return self.high - ready if self.is_low else 0

    @property
    def is_low(self) -> bool:
        """Whether the client should ask the server for slots until the stock is full again."""
        return 2 * len(self.tickets) < self.high and not self.waits_for_save

    def surplus(self, now_ns: int) -> int:
        """Returns how many slots to give back: those beyond `high`, after a while in which no save has taken any."""
        beyond = max(len(self.tickets) - self.high, 0)
        if not beyond or not self._untaken_since_ns:
            self._untaken_since_ns = now_ns if beyond else 0
        return beyond if beyond and now_ns >= self._untaken_since_ns + KEPT_NS else 0

    def put(self, tickets: npt.NDArray[np.uint64], addresses: npt.NDArray[np.uint64]) -> None:
        granted = tickets != 0
        self.tickets = np.concatenate([self.tickets, tickets[granted]])
        self._addresses = np.concatenate([self._addresses, addresses[granted]])

    def take(self, memory_id: int, session: int, count: int) -> ReservedSlots:
        """Takes so many slots, or as many as are there."""
        taken = ReservedSlots(memory_id, session, self.group, self.tickets[:count], self._addresses[:count])
        self.tickets, self._addresses = self.tickets[count:], self._addresses[count:]
        self._untaken_since_ns = 0
        self.waits_for_save = False
        return taken

    def take_from(self, memory_id: int, session: int, first: int) -> ReservedSlots:
        """Takes the slots at the address `first` and behind it. That is no use of the stock."""
        is_taken = self._addresses >= np.uint64(first)
        taken = ReservedSlots(memory_id, session, self.group, self.tickets[is_taken], self._addresses[is_taken])
        self.tickets, self._addresses = self.tickets[~is_taken], self._addresses[~is_taken]
        return taken

    def clear(self) -> None:
        """Forgets the slots: they do not belong to this process any more."""
        self.tickets = self._addresses = _NONE
        self.asked = self.lacking = 0
        self.waits_for_save = False


def fit_stocks(stocks: Sequence[CreditStock], pool_bytes: int, *, is_full: bool = False) -> None:
    """Sets the limits of each stock. In a small pool each group gets the same part of what it wants, at least one slot.
    Any group may have what a save lacks of the eighth of the pool, as far as others do not hold it, and up to what the
    group wants."""
    wanted_bytes = max(sum(stock.wanted * stock.slot_bytes for stock in stocks), 1)
    most = min(1.0, pool_bytes / POOL_SHARE / wanted_bytes)
    share = min(1.0, pool_bytes / FULL_POOL_SHARE / wanted_bytes) if is_full else most
    left_bytes = pool_bytes // POOL_SHARE
    for stock in stocks:
        # A stock is filled up below half: enough slots for one whole window are there even then.
        window = min(2 * stock.whole, int(stock.wanted * most)) if stock.whole > 1 else 0
        stock.high = min(stock.wanted, max(int(stock.wanted * share), window, 1))
        left_bytes -= max(stock.high, stock.held) * stock.slot_bytes
    for stock in stocks:
        stock.most = min(stock.wanted, max(stock.high, stock.held) + max(left_bytes, 0) // stock.slot_bytes)
