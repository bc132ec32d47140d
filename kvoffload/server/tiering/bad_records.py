"""Records of a tier that turned out to be bad: they are removed there, and not asked for in the meantime."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvoffload.tiers import FinishedBatch, RecordNames, RecordOutcome, Tier, TierState
from kvoffload.types import HASH_BYTES

_REMOVE_TIMEOUT_S = 10.0
RETRIED_AT_ONCE = 64
MAX_BAD = 65_536
"""Number of records that are remembered as bad. Beyond it the oldest are forgotten here; the tier has most likely
removed them."""

_Key = tuple[bytes, int, int, bytes]


class BadRecords:
    """Belongs to the thread of the server's core, except for `leave_out`."""

    def __init__(self, tier: Tier, *, limit: int = MAX_BAD) -> None:
        self._tier = tier
        self._limit = limit
        # Finding the first key of a plain dict takes longer with each key that was removed before it.
        self._bad: OrderedDict[_Key, None] = OrderedDict()
        self._removing: dict[int, list[_Key]] = {}
        """Records that the tier is removing, by its ticket."""

    def __len__(self) -> int:
        return len(self._bad)

    def add(self, names: RecordNames) -> None:
        """Adds records, which the tier removes as soon as it can."""
        keys = _keys(names)
        self._bad.update(dict.fromkeys(keys))
        while len(self._bad) > self._limit:
            self._bad.popitem(last=False)
        self._remove(names, keys)

    def retry(self) -> None:
        """Tries again to remove some of those that could not be removed yet. The event loop calls it periodically."""
        under_way = {key for keys in self._removing.values() for key in keys}
        waiting = (key for key in self._bad if key not in under_way)
        for key in list(islice(waiting, RETRIED_AT_ONCE)):
            fingerprint, group, shard, name = key
            self._remove(RecordNames(fingerprint=fingerprint, hashes=name, group=group, shard=shard), [key])

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
        return True

    def _remove(self, names: RecordNames, keys: list[_Key]) -> None:
        ticket = self._tier.remove(names, timeout_s=_REMOVE_TIMEOUT_S)
        if ticket is not None:
            self._removing[ticket] = keys

    def leave_out(self, names: RecordNames, found: npt.NDArray[np.bool_]) -> None:
        """Marks bad records as not found, even if the tier says that it has them. From any thread."""
        if self._bad:
            for at, key in enumerate(_keys(names)):
                found[at] &= key not in self._bad


def _keys(names: RecordNames) -> list[_Key]:
    ends = range(0, len(names.hashes), HASH_BYTES)
    return [(names.fingerprint, names.group, names.shard, names.hashes[at : at + HASH_BYTES]) for at in ends]
