"""Records of a tier that turned out to be bad: they are removed there, and not asked for in the meantime."""

from __future__ import annotations

from collections import OrderedDict
from itertools import groupby, islice

import numpy as np
import numpy.typing as npt

from kvoffload.tiers import FinishedBatch, RecordNames, RecordOutcome, Tier, TierState
from kvoffload.types import HASH_BYTES

_REMOVE_TIMEOUT_S = 10.0
RETRIED_AT_ONCE = 64
MAX_BAD = 65_536
"""Number of records that are remembered as bad. Beyond it the oldest are forgotten here; the tier has most likely
removed them."""

_NUMBER_BYTES = 4


class BadRecords:
    """Belongs to the thread of the server's core, except for `leave_out`."""

    def __init__(self, tier: Tier, *, limit: int = MAX_BAD) -> None:
        self._tier = tier
        self._limit = limit
        # Finding the first key of a plain dict takes longer with each key that was removed before it. Keys are bytes:
        # a search for garbage would walk over 65,536 tuples, and tuples that replace others do not count as new.
        self._bad: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        """Those of them that the tier is to remove, and is not removing."""
        self._removing: dict[int, list[bytes]] = {}
        """Records that the tier is removing, by its ticket."""

    def __len__(self) -> int:
        return len(self._bad)

    def add(self, names: RecordNames) -> None:
        """Adds records, which the tier removes as soon as it can."""
        keys = _keys(names)
        self._bad.update(dict.fromkeys(keys))
        while len(self._bad) > self._limit:
            oldest, _ = self._bad.popitem(last=False)
            self._waiting.pop(oldest, None)
        self._remove(names, keys)

    def retry(self) -> None:
        """Tries again to remove some of those that could not be removed yet. The event loop calls it periodically."""
        retried = list(islice(self._waiting, RETRIED_AT_ONCE))
        for head, found in groupby(retried, lambda key: key[:-HASH_BYTES]):
            keys = list(found)
            fingerprint, numbers = head[: -2 * _NUMBER_BYTES], head[-2 * _NUMBER_BYTES :]
            names = RecordNames(
                fingerprint=fingerprint,
                hashes=b"".join(key[-HASH_BYTES:] for key in keys),
                group=int.from_bytes(numbers[:_NUMBER_BYTES], "big"),
                shard=int.from_bytes(numbers[_NUMBER_BYTES:], "big"),
            )
            self._remove(names, keys)

    def finish(self, batch: FinishedBatch) -> bool:
        """Takes a batch that has ended. False: it is not one of these. Records that were removed may be written
        again."""
        keys = self._removing.pop(batch.ticket, None)
        if keys is None:
            return False
        places = self._tier.health()
        ends = set()
        if not any(place.state in (TierState.OPENING, TierState.ABSENT) for place in places):
            ends.add(RecordOutcome.MISSING)  # else it may be in a place that cannot be reached now
        if len(places) == 1:
            ends.add(RecordOutcome.REMOVED)  # else another place may have it, too
        for key, outcome in zip(keys, batch.outcomes.tolist(), strict=True):
            if outcome in ends:
                self._bad.pop(key, None)
                self._waiting.pop(key, None)
            elif key in self._bad:
                self._waiting[key] = None
        return True

    def _remove(self, names: RecordNames, keys: list[bytes]) -> None:
        ticket = self._tier.remove(names, timeout_s=_REMOVE_TIMEOUT_S)
        if ticket is None:
            self._waiting.update((key, None) for key in keys if key in self._bad)
            return
        self._removing[ticket] = keys
        for key in keys:
            self._waiting.pop(key, None)

    def leave_out(self, names: RecordNames, found: npt.NDArray[np.bool_]) -> None:
        """Marks bad records as not found, even if the tier says that it has them. From any thread."""
        if self._bad:
            for at, key in enumerate(_keys(names)):
                found[at] &= key not in self._bad


def _keys(names: RecordNames) -> list[bytes]:
    """Returns a key for each record: fingerprint, group, shard and hash."""
    head = names.fingerprint + b"".join(one.to_bytes(_NUMBER_BYTES, "big") for one in (names.group, names.shard))
    return [head + names.hashes[at : at + HASH_BYTES] for at in range(0, len(names.hashes), HASH_BYTES)]
