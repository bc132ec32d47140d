"""A pool of some bytes that holds records in the order of the default policy, as `kvoffload replay` keeps it. It has no
slots, leases or messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.cache import GroupRule
from kvoffload.cache.settings import DEFAULT_POLICY
from kvoffload.kvspec import ReuseRule
from kvoffload.types import HASH_BYTES

_REUSE = {
    ReuseRule.PREFIX: "prefix",
    ReuseRule.EXACT_BOUNDARY: "exact",
}
_NO_PARENT = bytes(HASH_BYTES)


class Record(NamedTuple):
    """A block's in a group. Names are the engine's hashes: the same in all groups for blocks that end together."""

    group: int
    name: bytes
    parent: bytes = _NO_PARENT
    """The block before it."""


class IdealPool:
    """`record_bytes`: by group, of all shards."""

    def __init__(self, rules: Sequence[GroupRule], record_bytes: Sequence[int], *, capacity_bytes: int) -> None:
        settings = [
            ("window" if rule.reuse.has_window else _REUSE[rule.reuse], size, -(-rule.window // rule.block_size))
            for rule, size in zip(rules, record_bytes, strict=True)
        ]
        self._is_first = [reuse == "prefix" for reuse, _, _ in settings]
        self._pool = native.ReplayPool(settings, DEFAULT_POLICY, capacity_bytes)

    @property
    def used_bytes(self) -> int:
        return self._pool.used_bytes

    def find_present(self, group: int, names: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """A flag for each."""
        flags = self._pool.holds(np.full(len(names), group, np.uint32), _numbers(names))
        return np.frombuffer(flags, np.bool_)

    def touch(self, records: Sequence[Record]) -> None:
        """A request makes use of them, groups one after the other."""
        groups = np.array([record.group for record in records], np.uint32)
        self._pool.touch(groups, _numbers([record.name for record in records]))

    def admit(self, records: Iterable[Record]) -> None:
        """Takes in what is not there. A block comes after the one before it."""
        # Windows and states hang on blocks of full attention.
        ordered = sorted(records, key=lambda record: not self._is_first[record.group])
        groups = np.array([record.group for record in ordered], np.uint32)
        names, parents = ([one.name for one in ordered], [one.parent for one in ordered])
        self._pool.admit(groups, _numbers(names), _numbers(parents))


def _numbers(names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Of hashes, 64 bits tell them apart."""
    rows = np.frombuffer(b"".join(names), np.uint64).reshape(len(names), HASH_BYTES // 8)
    return np.ascontiguousarray(rows[:, 0])
