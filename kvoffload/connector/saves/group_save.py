"""Blocks of one group on their way to their slots, and how those of one job are put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.cache import ReservedSlots
from kvoffload.connector.saves.named_blocks import NamedBlocks


@dataclass(frozen=True, eq=False)
class GroupSave:
    """Blocks of one group that are saved, with the slots that they go to."""

    named: NamedBlocks
    words: list[int]
    slots: ReservedSlots
    is_next: bool = False
    """Whether the engine was about to take these blocks."""
    is_first: bool = True
    """Whether this save holds the blocks' pins. Other stages' saves of the same blocks hold none, and end with it."""
    begin: int = 0
    """The index of its first record among those of its job."""


def join_parts(parts: Sequence[GroupSave]) -> list[GroupSave]:
    """Joins the parts of one place: blocks that are published together become one part, also of several requests."""
    alike: dict[tuple[int, str, bool], list[GroupSave]] = {}
    for part in parts:
        alike.setdefault((part.named.group, part.named.tenant, part.is_next), []).append(part)
    return [_join(some) if len(some) > 1 else some[0] for some in alike.values()]


def place_parts(parts: Sequence[GroupSave]) -> Iterator[GroupSave]:
    """Yields the parts of a job with their `begin`, the index of their first record in it."""
    begin = 0
    for part in parts:
        yield replace(part, begin=begin)
        begin += len(part.slots)


def _join(parts: Sequence[GroupSave]) -> GroupSave:
    first = parts[0]
    named = replace(
        first.named,
        hashes=b"".join([part.named.hashes for part in parts]),
        parents=b"".join([part.named.parents for part in parts]),
        blocks=np.concatenate([part.named.blocks for part in parts]),
    )
    slots = replace(
        first.slots,
        tickets=np.concatenate([part.slots.tickets for part in parts]),
        addresses=np.concatenate([part.slots.addresses for part in parts]),
    )
    words = [word for part in parts for word in part.words]
    return replace(first, named=named, words=words, slots=slots)


def without_blocks(part: GroupSave) -> GroupSave:
    named = part.named
    return replace(part, named=NamedBlocks(named.group, b"", b"", named.blocks[:0]), words=[])
