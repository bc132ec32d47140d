"""The rules of a cache in plain Python, and values that tests of caches share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.cache import CacheGeometry, CacheGroup, CacheSettings, GroupRule, LocalCache, longest_boundary
from kvoffload.kvspec import ReuseRule
from kvoffload.types import Fingerprint
from kvoffload.units import MIB

KIB = 1 << 10

# Attention, a window and a state over one chain; the state's record is larger than an extent of SMALL.
HYBRID = CacheGeometry(
    hash_block_size=16,
    groups=(
        CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=1000, shards=2),
        CacheGroup(rule=GroupRule(block_size=32, reuse=ReuseRule.WINDOW, window=64), record_bytes=4096),
        CacheGroup(rule=GroupRule(block_size=64, reuse=ReuseRule.EXACT_BOUNDARY), record_bytes=40 * KIB),
    ),
)
PLAIN = CacheGeometry(
    hash_block_size=16, groups=(CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=4096),)
)
SMALL = CacheSettings(memory_bytes=MIB, segment_bytes=512 * KIB, extent_bytes=16 * KIB, entry_limit=4096, policy="lru")


def fingerprint(name: str) -> Fingerprint:
    """Makes the fingerprint of an identity that has only a name."""
    return Fingerprint(hashlib.sha256(name.encode()).digest())


def make_chain(conversation: int, blocks: int) -> bytes:
    """The hashes of a conversation's first blocks; a longer chain begins with a shorter one."""
    return b"".join(hashlib.sha256(f"{conversation}/{i}".encode()).digest() for i in range(blocks))


def block_hashes(chain: bytes, geometry: CacheGeometry, group: int) -> list[bytes]:
    """The names of a group's blocks: the hash that covers the last token of each."""
    stride = geometry.groups[group].rule.block_size // geometry.hash_block_size
    ends = range(stride - 1, len(chain) // 32, stride)
    return [chain[32 * end : 32 * end + 32] for end in ends]


def record_pattern(space: tuple[int, int], block_hash: bytes, shard: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes that the record of a block must have: a function of its name, so they need not be remembered."""
    seed = hashlib.sha256(repr((space, shard)).encode() + block_hash).digest()
    return np.resize(np.frombuffer(seed, dtype=np.uint8), size_bytes)


def slot_bytes(geometry: CacheGeometry, group: int) -> int:
    """Returns the bytes of one entry, all shards."""
    return geometry.groups[group].record_bytes * geometry.groups[group].shards


def write_record(
    cache: LocalCache, geometry: CacheGeometry, space: tuple[int, int], block_hash: bytes, address: int, shard: int
) -> None:
    """Writes a record, as a worker does under a reservation."""
    size = geometry.groups[space[1]].record_bytes
    cache.view(address + shard * size, size)[:] = record_pattern(space, block_hash, shard, size)


def has_pattern(
    cache: LocalCache, geometry: CacheGeometry, space: tuple[int, int], block_hash: bytes, address: int
) -> bool:
    """Whether a slot holds all shards of just this block."""
    group = geometry.groups[space[1]]
    return all(
        np.array_equal(
            cache.view(address + shard * group.record_bytes, group.record_bytes),
            record_pattern(space, block_hash, shard, group.record_bytes),
        )
        for shard in range(group.shards)
    )


@dataclass
class ModelLease:
    """Slots that a session may read until it releases the lease, even if their names are dropped."""

    session: int
    slots: dict[int, tuple[int, int, bytes]]
    """Address -> namespace, group, hash."""
    unnamed: set[tuple[int, int, bytes]] = field(default_factory=set)
    """Blocks that were invalidated since. Another copy under such a name is not the copy that this lease reads."""


@dataclass
class ModelReservation:
    """A slot that a session writes to."""

    session: int
    space: tuple[int, int]
    address: int
    ticket: int
    named: bytes | None = None
    shards: set[int] = field(default_factory=set)


class CacheModel:
    """Keeps the blocks that must be readable. The test tells it of evictions, which may only hit blocks without a
    lease."""

    def __init__(self) -> None:
        self.readable: set[tuple[int, int, bytes]] = set()
        self.leases: dict[int, ModelLease] = {}
        self.reservations: dict[int, ModelReservation] = {}

    def boundary(self, name_space: int, geometry: CacheGeometry, chain: bytes, local: int, limit: int) -> int:
        """Finds the boundary by the plain rules."""
        names = [block_hashes(chain, geometry, group) for group in range(len(geometry.groups))]
        return longest_boundary(
            [group.rule for group in geometry.groups],
            local=local,
            limit=min(limit, len(chain) // 32 * geometry.hash_block_size),
            is_present=lambda group, index: (name_space, group, names[group][index]) in self.readable,
        )

    def drop(self, blocks: set[tuple[int, int, bytes]]) -> None:
        """Makes blocks misses from now on. Leases on them stay."""
        self.readable -= blocks
        for lease in self.leases.values():
            lease.unnamed |= blocks

    def leased_blocks(self) -> set[tuple[int, int, bytes]]:
        """Lists the blocks whose readable copy is leased."""
        return {block for lease in self.leases.values() for block in lease.slots.values() if block not in lease.unnamed}

    def used_addresses(self) -> list[int]:
        """Lists the slots in use: a slot comes once for each writer, and once for all its readers."""
        leased = {address for lease in self.leases.values() for address in lease.slots}
        return [*leased, *(reservation.address for reservation in self.reservations.values())]
