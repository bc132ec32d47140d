"""Slots that were reserved ahead, so that planning a save asks nobody. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.cache import ReservedSlots

_NONE = np.empty(0, np.uint64)
_LEAST = 8


class CreditStock:
    """One group's. At most `high` slots; it is filled up again below half of that."""

    def __init__(self, group: int, high: int, *, slot_bytes: int = 1) -> None:
        self.group = group
        self._most = self._high = high
        self._slot_bytes = slot_bytes
        self._tickets = self._addresses = _NONE
        self.is_asking = False
        self.not_before_ns = 0
        """The last answer brought less than was asked for: there is no room before somebody releases some."""

    def __len__(self) -> int:
        return len(self._tickets)

    def missing(self, now_ns: int) -> int:
        """How many to ask for now; 0: enough are there or on their way."""
        if self.is_asking or now_ns < self.not_before_ns or 2 * len(self._tickets) >= self._high:
            return 0
        return self._high - len(self._tickets)

    def put(self, tickets: npt.NDArray[np.uint64], addresses: npt.NDArray[np.uint64]) -> None:
        granted = tickets != 0
        self._tickets = np.concatenate([self._tickets, tickets[granted]])
        self._addresses = np.concatenate([self._addresses, addresses[granted]])

    def take(self, memory_id: int, session: int, count: int) -> ReservedSlots:
        """As many as are there."""
        taken = ReservedSlots(memory_id, session, self.group, self._tickets[:count], self._addresses[:count])
        self._tickets, self._addresses = self._tickets[count:], self._addresses[count:]
        return taken

    def fit(self, share_bytes: int) -> None:
        """Of a small pool no more than that is held ready, and some slots always."""
        self._high = min(self._most, max(share_bytes // self._slot_bytes, _LEAST))

    def clear(self) -> None:
        """They are not ours any more."""
        self._tickets = self._addresses = _NONE
        self.is_asking = False


def plan_stocks(slot_bytes: Sequence[int], *, stock_bytes: int) -> list[CreditStock]:
    """One for each group: so many slots as have `stock_bytes`, at least 8, at most 4096."""
    return [
        CreditStock(group, min(max(stock_bytes // max(size, 1), _LEAST), 4096), slot_bytes=max(size, 1))
        for group, size in enumerate(slot_bytes)
    ]
