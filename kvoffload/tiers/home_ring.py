"""Which member of a fleet is the home of a record, by its block hash alone.

A ring of points: a member who comes or goes moves its own records and no others.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError, TierError
from kvoffload.hash_rows import as_rows
from kvoffload.tiers.base import FinishedBatch, RecordNames, RecordOutcome, Ticket
from kvoffload.types import HASH_BYTES

POINTS = 1024
"""Points of a member of weight 1. The shares of equal members differ by about 1/32 from each other, one sigma."""
LEAST_WEIGHT, LARGEST_WEIGHT = 1 / 16, 16.0
POINT_LIMIT = 1 << 20
"""The most points of all members together: 8 MiB."""

_DOMAIN = b"kvoffload home 1"
_POINTS_A_DIGEST = 4
_NAME_BYTES = 255
_Words = npt.NDArray[np.uint64]
Homes = npt.NDArray[np.intp]
"""Numbers of members, by their place in `HomeRing.members`."""


@dataclass(frozen=True, kw_only=True)
class HomeMember:
    """A member of a fleet. `weight`: how much it takes relative to a member of weight 1, whatever the others weigh."""

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < len(self.name.encode()) <= _NAME_BYTES:
            raise ConfigError(
                f"a member of a fleet is called {self.name[:40]!r}", remedy=f"a name has 1 to {_NAME_BYTES} bytes"
            )
        if not LEAST_WEIGHT <= self.weight <= LARGEST_WEIGHT:
            raise ConfigError(
                f"member {self.name!r} has weight {self.weight:g}",
                remedy=f"allowed are weights from {LEAST_WEIGHT:g} to {LARGEST_WEIGHT:g}",
            )


class HomeRing:
    """Gives the same homes in every process that makes it of the same members, in any order. Immutable.

    A home is the member of the first point at or behind the hash's own place. If that member is gone, the record's home
    is the next member on the ring, which is the home that the ring without it gives.
    """

    def __init__(self, members: Iterable[HomeMember]) -> None:
        """Places members on the ring. ConfigError: none is given, two have one name, or there are too many points."""
        listed = sorted(members, key=lambda member: member.name)
        if not listed:
            raise ConfigError("a fleet without members has no homes", remedy="name one at least")
        for before, after in itertools.pairwise(listed):
            if before.name == after.name:
                raise ConfigError(f"two members of the fleet are called {after.name!r}", remedy="name each once")
        counts = [round(POINTS * member.weight) for member in listed]
        if sum(counts) > POINT_LIMIT:
            raise ConfigError(
                f"{len(listed)} members have {sum(counts)} points together",
                remedy=f"allowed are {POINT_LIMIT}: give them smaller weights",
            )
        points = np.concatenate(
            [_list_points(member.name, count) for member, count in zip(listed, counts, strict=True)]
        )
        owners = np.repeat(np.arange(len(listed), dtype=np.intp), counts)
        # Two members on one point: the first by name has it.
        order = np.argsort(points, kind="stable")
        self._set(tuple(listed), points[order], owners[order])

    def _set(self, members: tuple[HomeMember, ...], points: _Words, owners: Homes) -> None:
        self._members = members
        self._points = points
        self._owners = np.append(owners, owners[0])
        """Behind the last point the ring begins again."""

    @property
    def members(self) -> tuple[HomeMember, ...]:
        """Returns the members, sorted by name."""
        return self._members

    def homes(self, hashes: bytes) -> Homes:
        """Returns the home of each hash of the blob."""
        return self._owners[np.searchsorted(self._points, _place(hashes))]

    def order(self, block_hash: bytes, count: int) -> tuple[HomeMember, ...]:
        """Returns the first `count` homes of one hash, or all members: each takes it while those before it are gone."""
        at = int(np.searchsorted(self._points, _place(block_hash))[0])
        found: list[int] = []
        owners = self._owners[:-1]
        wanted = min(count, len(self._members))
        for owner in np.concatenate((owners[at:], owners[:at])):
            if len(found) == wanted:
                break
            if int(owner) not in found:
                found.append(int(owner))
        return tuple(self._members[at] for at in found)

    def without(self, names: Iterable[str]) -> HomeRing:
        """Returns the ring without these members, faster than making a new one. ConfigError: no member is left."""
        gone = set(names)
        keeps = np.array([member.name not in gone for member in self._members])
        if not keeps.any():
            raise ConfigError("a fleet without members has no homes", remedy="name one at least")
        stays = keeps[self._owners[:-1]]
        ring = HomeRing.__new__(HomeRing)
        ring._set(
            tuple(member for member, is_kept in zip(self._members, keeps, strict=True) if is_kept),
            self._points[stays],
            (np.cumsum(keeps) - 1)[self._owners[:-1][stays]],
        )
        return ring


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


@lru_cache(maxsize=128)
def _list_points(name: str, count: int) -> _Words:
    """Returns a member's points. The first ones do not depend on the count, so that another weight moves no more than
    it must. They are cached: when a member leaves, those of all others are needed again."""
    start = hashlib.sha256(_DOMAIN + b"\0" + name.encode() + b"\0")
    blob = bytearray()
    for number in range(-(-count // _POINTS_A_DIGEST)):
        digest = start.copy()
        digest.update(struct.pack("<I", number))
        blob += digest.digest()
    return np.frombuffer(bytes(blob), "<u8")[:count].astype(np.uint64)


def _place(hashes: bytes) -> _Words:
    """Returns places on the ring. All 32 bytes count, and are mixed: not every engine's hashes are even in all of their
    bits."""
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
