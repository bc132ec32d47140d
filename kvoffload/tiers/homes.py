"""Which member of a fleet is the home of a record, by its block hash alone.

Rendezvous hashing: each member has a score for each hash, and the one with the highest is its home. A member who comes
or goes moves its own records and no others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError, TierError
from kvoffload.hash_rows import as_rows
from kvoffload.tiers.base import FinishedBatch, RecordNames, RecordOutcome, Ticket
from kvoffload.types import HASH_BYTES

_DOMAIN = b"kvoffload home 2"
_AT_ONCE = 1024
"""Number of hashes whose scores are made together: with 64 members they take 512 KiB."""
_FLEETS = 16
"""Number of fleets whose seeds are kept: members come and go."""
_Words = npt.NDArray[np.uint64]
Homes = npt.NDArray[np.intp]
"""Places of members in a list."""


def find_homes(members: tuple[str, ...], hashes: bytes) -> Homes:
    """Returns the place of each hash's home among the members, which are sorted. It is the same on every machine.

    If a home is gone, the list without it gives the member with the next score. ConfigError: there is no member.
    TierError: the blob is no hashes.
    """
    if not members:
        raise ConfigError("a fleet without members has no homes", remedy="name one at least")
    mixed, seeds = _mix_hashes(hashes), _list_seeds(members)
    homes = np.empty(len(mixed), np.intp)
    for at in range(0, len(mixed), _AT_ONCE):
        part = slice(at, at + _AT_ONCE)
        homes[part] = _mix(mixed[part, None] ^ seeds).argmax(axis=1)
    return homes


@dataclass(frozen=True, kw_only=True, eq=False)
class HomeBatch:
    """The records of a batch that have one home. `places` are theirs in the batch, in its order."""

    home: int
    places: Homes
    names: RecordNames


def split_by_home(names: RecordNames, homes: Homes) -> list[HomeBatch]:
    """Splits records by home; each is in one of the parts."""
    if not len(names):
        return []
    if (homes == homes[0]).all():
        return [HomeBatch(home=int(homes[0]), places=np.arange(len(names)), names=names)]
    order = np.argsort(homes, kind="stable")
    found, begins = np.unique(homes[order], return_index=True)
    return [
        HomeBatch(
            home=int(home),
            places=places,
            names=RecordNames(
                fingerprint=names.fingerprint,
                hashes=pick_hashes(names.hashes, places),
                group=names.group,
                shard=names.shard,
            ),
        )
        for home, places in zip(found, np.split(order, begins[1:]), strict=True)
    ]


def pick_hashes(hashes: bytes, places: Homes) -> bytes:
    """Returns the hashes at these places of a blob, in this order; none of an empty blob, such as a batch's
    `parents`."""
    if not hashes:
        return b""
    if len(places) * HASH_BYTES == len(hashes) and np.array_equal(places, np.arange(len(places))):
        return hashes
    return np.frombuffer(hashes, dtype=f"V{HASH_BYTES}")[places].tobytes()


def join_homes(
    ticket: Ticket, count: int, parts: Sequence[tuple[HomeBatch, FinishedBatch]], *, otherwise: RecordOutcome
) -> FinishedBatch:
    """Joins the outcomes of a batch's parts to those of the whole batch of `count` records. Records of a missing part
    get `otherwise`."""
    digests = np.zeros(count, np.uint64)
    if len(parts) == 1 and len(parts[0][1].outcomes) == count:
        [(_, whole)] = parts
        found = whole.digests if len(whole.digests) else digests
        parents = whole.parents or bytes(count * HASH_BYTES)
        return FinishedBatch(ticket=ticket, outcomes=whole.outcomes, digests=found, parents=parents)
    outcomes = np.full(count, otherwise, np.uint8)
    rows = np.zeros((count, HASH_BYTES), np.uint8)
    for batch, finished in parts:
        if len(finished.outcomes) != len(batch.places):
            raise TierError(f"{len(batch.places)} records went to a home, {len(finished.outcomes)} came back")
        outcomes[batch.places] = finished.outcomes
        if len(finished.digests):
            digests[batch.places] = finished.digests
        if finished.parents:
            rows[batch.places] = as_rows(finished.parents)
    return FinishedBatch(ticket=ticket, outcomes=outcomes, digests=digests, parents=rows.tobytes())


@lru_cache(maxsize=_FLEETS)
def _list_seeds(members: tuple[str, ...]) -> _Words:
    """Returns one number for each member, from its name alone."""
    digests = [hashlib.sha256(_DOMAIN + b"\0" + name.encode()).digest() for name in members]
    return np.array([int.from_bytes(digest[:8], "little") for digest in digests], np.uint64)


def _mix_hashes(hashes: bytes) -> _Words:
    """Returns a number for each hash. All 32 bytes count, and are mixed: not every engine's hashes are even in all of
    their bits."""
    if len(hashes) % HASH_BYTES:
        raise TierError(f"{len(hashes)} bytes are no hashes", remedy=f"a hash has {HASH_BYTES}")
    words = np.frombuffer(hashes, "<u8").reshape(-1, HASH_BYTES // 8).astype(np.uint64)
    mixed = np.zeros(len(words), np.uint64)
    for column in range(words.shape[1]):
        mixed = _mix(mixed ^ words[:, column])
    return mixed


def _mix(numbers: _Words) -> _Words:
    """The finaliser of SplitMix64."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
