"""Records of a tier that were not what they should be: removed there, and not asked for again in the meantime."""

from __future__ import annotations

from itertools import islice

import numpy as np
import numpy.typing as npt

from kvoffload.tiers import FinishedBatch, RecordNames, RecordOutcome, Tier, TierState
from kvoffload.types import HASH_BYTES

_REMOVE_TIMEOUT_S = 10.0
RETRIED_AT_ONCE = 64
MAX_BAD = 65_536
"""Beyond it the oldest are forgotten here; the tier has most likely removed them."""

_Key = tuple[bytes, int, int, bytes]


class BadRecords:
    """Belongs to the thread of the server's core, but `leave_out`."""

    def __init__(self, tier: Tier, *, limit: int = MAX_BAD) -> None:
        self._tier = tier
        self._limit = limit
        self._bad: dict[_Key, None] = {}
        self._removing: dict[int, list[_Key]] = {}
        """By the tier's ticket."""

    def __len__(self) -> int:
        return len(self._bad)

    def add(self, names: RecordNames) -> None:
        """They are removed there as soon as that is possible."""
        keys = _keys(names)
        self._bad.update(dict.fromkeys(keys))
        while len(self._bad) > self._limit:
            del self._bad[next(iter(self._bad))]
        self._remove(names, keys)

    def retry(self) -> None:
        """Is called now and then: what could not be removed yet is tried again, some of it at a time."""
        under_way = {key for keys in self._removing.values() for key in keys}
        waiting = (key for key in self._bad if key not in under_way)
        for key in list(islice(waiting, RETRIED_AT_ONCE)):
            fingerprint, group, shard, name = key
            self._remove(RecordNames(fingerprint=fingerprint, hashes=name, group=group, shard=shard), [key])

    def finish(self, batch: FinishedBatch) -> bool:
        """A batch has ended. False: it is not one of these. What is removed may be written again."""
        keys = self._removing.pop(batch.ticket, None)
        if keys is None:
            return False
        places = self._tier.health()
        ends = set()
        if not any(place.state in (TierState.OPENING, TierState.ABSENT) for place in places):
            ends.add(RecordOutcome.MISSING)  # else it may be where nobody can look now
        if len(places) == 1:
            ends.add(RecordOutcome.REMOVED)  # else there may be one more of them
        for key, outcome in zip(keys, batch.outcomes.tolist(), strict=True):
            if outcome in ends:
                self._bad.pop(key, None)
        return True

    def _remove(self, names: RecordNames, keys: list[_Key]) -> None:
        ticket = self._tier.remove(names, timeout_s=_REMOVE_TIMEOUT_S)
        if ticket is not None:
            self._removing[ticket] = keys

    def leave_out(self, names: RecordNames, found: npt.NDArray[np.bool_]) -> None:
        """Whatever the tier says of them, they are not there. From any thread."""
        if self._bad:
            for at, key in enumerate(_keys(names)):
                found[at] &= key not in self._bad


def _keys(names: RecordNames) -> list[_Key]:
    ends = range(0, len(names.hashes), HASH_BYTES)
    return [(names.fingerprint, names.group, names.shard, names.hashes[at : at + HASH_BYTES]) for at in ends]
