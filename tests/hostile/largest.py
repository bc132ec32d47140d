"""Each message at its largest, made from its declaration alone, so that a new message is among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import msgpack
import numpy as np

from kvoffload.protocol import GroupTerms, Register
from kvoffload.protocol.fields import Blob, Choice, FieldKind, Several, Text, Truth, Whole
from kvoffload.protocol.limits import MAX_BLOCKS, MAX_GROUPS
from kvoffload.protocol.message import Message, OneWay
from kvoffload.protocol.shape import Shape, name_of
from kvoffload.types import HASH_BYTES, ReuseRule
from tests.kit.hostile.forging import Forged

SHARDS = 16
"""The most shards that an index keeps of a block."""
WIDE = Register(
    fingerprint=b"w" * HASH_BYTES,
    hash_algorithm="sha256",
    hash_seed=b"",
    hash_block_size=16,
    groups=(GroupTerms(record_bytes=4096, block_size=16, reuse=ReuseRule.PREFIX, shards=SHARDS),) * MAX_GROUPS,
)
"""An identity with as many groups as there may be, each of which has as many shards as there may be."""
FLAT = replace(WIDE, fingerprint=b"f" * HASH_BYTES, groups=(replace(WIDE.groups[0], shards=1),) * MAX_GROUPS)
_ZERO = ("name_space", "group", "shard", "more_shards", "local", "count", "first", "former_session", "former_boot_id")
_ONE = ("protocol_min", "protocol_max", "alignment")
_OTHERS = {"wait_ms": 2000, "record_bytes": 4096, "block_size": 16, "hash_block_size": 16, "window": 32}
RIGHT: dict[str, Any] = dict.fromkeys(_ZERO, 0) | dict.fromkeys(_ONE, 1) | _OTHERS
RIGHT |= {"shards": SHARDS, "tenant": "", "domain": ""}
"""Values of single fields without which the server would refuse a message before it does any work for it."""
_BUCKETS = 1 << 14
"""More than the table of a domain of 64 MiB has."""
_HEAD_BYTES = 64
_SEED_AT = 24
"""Where the header of an index has the seed of its hash table (native/src/index/layout.hpp)."""
_MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Largest:
    """Makes messages with every list, text and blob at its bound, or as near to it as the bound of a frame allows."""

    names: bytes
    """Names of blocks, one behind the other."""
    right: Mapping[str, Any]
    """Values of single fields."""
    chance: Random

    def make(self, kind: type[Message]) -> Forged:
        most = room = min(channel.limit_bytes for channel in kind.channels) - _HEAD_BYTES
        while len(msgpack.packb(fields := self._record(Shape(kind), room))) > most:
            room = room * 3 // 4
        return Forged(what=name_of(kind), op=kind.op, is_one_way=issubclass(kind, OneWay), fields=fields)

    def _record(self, shape: Shape, room: int) -> tuple[Any, ...]:
        found: dict[str, Any] = {}
        for spec in shape.fields:
            if spec.count is None:
                found[spec.name] = self._value(spec.kind, spec.name, room)
                continue
            # As many values as the other field has.
            other = next(one.kind for one in shape.fields if one.name == spec.count.of)
            assert isinstance(other, Blob)
            assert isinstance(spec.kind, Blob)
            found[spec.name] = self._blob(spec.kind, spec.name, len(found[spec.count.of]) // other.item_bytes)
        return tuple(found.values())

    def _value(self, kind: FieldKind, name: str, room: int) -> Any:
        right = self.right.get(name)
        match kind:
            case Whole():
                return min(max(right, kind.minimum), kind.maximum) if isinstance(right, int) else kind.maximum
            case Truth():
                return True
            case Text():
                return "x" * min(kind.limit, max(1, room)) if right is None else right
            case Blob():
                return self._blob(kind, name, max(kind.minimum, min(kind.limit, room // kind.item_bytes)))
            case Choice():
                return int(self.chance.choice(list(kind.names)))
            case Several():
                return (self._value(kind.item, name, room // kind.limit),) * min(kind.limit, 255)
            case Shape():
                return self._record(kind, room)
        raise AssertionError(f"nothing is known of {kind}")

    def _blob(self, kind: Blob, name: str, count: int) -> bytes:
        if kind.item_bytes != HASH_BYTES or kind.limit == 1:
            return self.chance.randbytes(count * kind.item_bytes)
        whole = (self.names * (count * HASH_BYTES // len(self.names) + 1))[: count * HASH_BYTES]
        return (bytes(HASH_BYTES) + whole)[: len(whole)] if name == "parents" else whole


def read_index_seed(index: int) -> int:
    """The seed of an index that this process was given, as any engine can read it."""
    return int.from_bytes(os.pread(index, 8, _SEED_AT), "little")


@lru_cache(maxsize=1)
def collide(seed: int, count: int = MAX_BLOCKS) -> bytes:
    """Names that share one chain of the hash table in all namespaces and groups (native/src/index/lookup.hpp
    `mix_key`): one factor of the hash is 1, and one is 0, so that neither the third word nor the space changes it."""
    words = np.arange(1, 1 << 23, dtype=np.uint64)
    mixed = _fold(words, 0x8BB84B93962EACC9)
    in_chain = np.flatnonzero(mixed % np.uint64(_BUCKETS) == 0)
    _, different = np.unique(mixed[in_chain] >> np.uint64(56), return_index=True)
    names = np.empty((count, 4), "<u8")
    names[:, 0] = np.resize(words[in_chain[different]], count) ^ np.uint64(seed ^ _rotate(seed, 17))
    names[:, 1] = 1 ^ _rotate(seed, 29) ^ 0x9E3779B97F4A7C15
    names[:, 2] = np.arange(count)
    names[:, 3] = _rotate(seed, 11) ^ 0xD1B54A32D192ED03
    return names.tobytes()


def _fold(words: Any, factor: int) -> Any:
    """Both halves of the product of 128 bits, as one number."""
    half, mask = np.uint64(32), np.uint64(2**32 - 1)
    low, high = np.uint64(factor & 2**32 - 1), np.uint64(factor >> 32)
    crossed = (words & mask) * high + ((words & mask) * low >> half)
    middle = (words >> half) * low + (crossed & mask)
    return words * np.uint64(factor) ^ ((words >> half) * high + (crossed >> half) + (middle >> half))


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK
