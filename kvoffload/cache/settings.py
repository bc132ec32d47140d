"""Settings of a cache: its memory, and the shape of an identity's entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Self, get_args

from kvoffload.cache.boundary import GroupRule
from kvoffload.errors import CacheMemoryError
from kvoffload.protocol import GroupTerms, Introduce, Register
from kvoffload.units import GIB, MIB, describe_size, format_size

Verify = Literal["tiers", "always"]

DEFAULT_POLICY = "prefix"

TENANT_LIMIT = 63
"""A pool has at most so many tenants with a name, as the native core has it."""
TENANT_NAME_BYTES = 55
"""A tenant's name has at most so many bytes."""

_NUMBER_BITS = {
    "memory_bytes": 64,
    "segment_bytes": 64,
    "extent_bytes": 64,
    "entry_limit": 32,
    "threads": 32,
    "floor_bytes": 64,
    "keep_free_bytes": 64,
    "step_bytes": 64,
}


class HugePages(IntEnum):
    """The kind of pages wished for segments. If it cannot be had, other pages are used."""

    NONE = 0
    TRANSPARENT = 1
    HUGETLB_2M = 2
    HUGETLB_1G = 3


def refuse_memory(memory_bytes: int, total_bytes: int) -> None:
    """CacheMemoryError: the memory that is wanted is more than all that there will ever be."""
    if memory_bytes > total_bytes:
        raise CacheMemoryError(
            f"{format_size(memory_bytes)} of memory are wanted, there are {describe_size(total_bytes)} in all",
            remedy="set `memory` to less, or to auto",
        )


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Describes one pool. Its memory is whole segments; the cache serves as soon as it has a part of the first."""

    memory_bytes: int
    segment_bytes: int = GIB
    extent_bytes: int = MIB
    """A segment is cut into extents; each serves one record size at a time."""
    entry_limit: int = 0
    """Limit of entries; 0: as many as would fit if every record had 1 KiB."""
    policy: str = DEFAULT_POLICY
    verify: Verify = "tiers"
    huge_pages: HugePages = HugePages.TRANSPARENT
    threads: int = 2
    """Number of threads that take the memory."""
    step_bytes: int = 128 * MIB
    """Bytes with which the cache begins, and by which it grows at once."""
    floor_bytes: int = 0
    """Bytes that the pool keeps when memory gets short; its first segment stays in any case."""
    keep_free_bytes: int = 0
    """Memory of the machine, or of our cgroup, that must be left to others."""
    is_sparse: bool = False
    """Pages come at the first touch, and the machine's free memory is not checked: for tests of pools that fit no
    machine."""

    def __post_init__(self) -> None:
        """Checks the settings. ValueError: what the native core cannot be told."""
        for name, bits in _NUMBER_BITS.items():
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} is {value}, allowed are numbers from 0 to 2**{bits} - 1")
        if self.verify not in get_args(Verify):
            raise ValueError(f"verify is {self.verify!r}, allowed are {' and '.join(map(repr, get_args(Verify)))}")

    def limit_entries(self) -> int:
        """Returns how many entries the index is made for. Its pages are taken when they are needed."""
        return self.entry_limit or min(max(self.memory_bytes // 1024, 1 << 16), 1 << 28)


@dataclass(frozen=True, kw_only=True)
class CacheOwner:
    """The owner of a cache. Memory that a process leaves is for successors of the same domain."""

    domain: str = ""
    boot_id: int = 0
    """The boot id of the owner's process, as engines know it; 0: a new one is drawn."""
    users: frozenset[int] | None = None
    """User ids that may have the memory; None: any user may."""

    def as_tuple(self) -> tuple[str, int, list[int] | None]:
        """Returns the settings as the native core takes them."""
        return self.domain, self.boot_id, None if self.users is None else sorted(self.users)


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """One group of an identity: the rule of its blocks, and the bytes of one block's record on one rank."""

    rule: GroupRule
    record_bytes: int
    shards: int = 1
    """Ranks that hold different bytes of a block. An entry is readable when each has committed its own."""


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """A request has one chain of hashes, one for every `hash_block_size` tokens; a group's block is named by the hash
    that covers its last token."""

    hash_block_size: int
    groups: Sequence[CacheGroup]

    @classmethod
    def read(cls, message: Register | Introduce) -> Self:
        """Reads the geometry that an engine or a peer has sent."""
        groups = tuple(
            CacheGroup(
                rule=GroupRule(block_size=group.block_size, reuse=group.reuse, window=group.window),
                record_bytes=group.record_bytes,
                shards=group.shards,
            )
            for group in message.groups
        )
        return cls(hash_block_size=message.hash_block_size, groups=groups)

    def group_settings(self) -> tuple[GroupTerms, ...]:
        """Returns the groups as messages carry them."""
        return tuple(
            GroupTerms(
                record_bytes=group.record_bytes,
                block_size=group.rule.block_size,
                reuse=group.rule.reuse,
                window=group.rule.window,
                shards=group.shards,
            )
            for group in self.groups
        )


@dataclass(frozen=True, kw_only=True)
class CacheFiles:
    """Descriptors of a cache's memory. They belong to the cache that opened them: send or duplicate, do not close them.

    The lock's descriptor does not allow to lock, read or write: it names the file, for a successor of the same user.
    """

    lock: int
    index: int
    segments: tuple[int, ...]
