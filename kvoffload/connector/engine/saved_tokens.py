"""What blocks that requests had lately are made of, for events: the server knows names alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.hash_rows import as_rows
from kvoffload.types import HASH_BYTES

MAX_BLOCKS = 1 << 18
"""Of one group, about 200 bytes each with blocks of 16 tokens. Beyond it the oldest runs are forgotten, and their
blocks are told without tokens."""
_RUN_BITS = 20
"""A place in a run has so many bits of a number; a run is a part of one request."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class SavedRun:
    """Blocks of one request that follow each other, with the tokens of all of them."""

    names: bytes
    tokens: npt.NDArray[np.int64]
    parent: bytes | None = None
    """The name of the block before the first."""
    mask: bytes = bytes(HASH_BYTES)
    """That lies over its names."""
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    """What else than tokens makes the names, by block."""
    about: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """What its events say of the request."""

    def cut(self, place: int, count: int, block_size: int) -> SavedRun:
        """Some of its blocks as a run."""
        names = self.names[place * HASH_BYTES : (place + count) * HASH_BYTES]
        return SavedRun(
            names,
            self.tokens[place * block_size : (place + count) * block_size],
            self.names[(place - 1) * HASH_BYTES : place * HASH_BYTES] if place else self.parent,
            self.mask,
            None if self.extra_keys is None else self.extra_keys[place : place + count],
            self.about,
        )


class _Kept(NamedTuple):
    run: SavedRun
    words: list[int]
    """First words of its names."""


class SavedTokens:
    """Keeps what one group's blocks are made of. Owned by one thread."""

    def __init__(self, block_size: int, *, limit: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._limit = min(limit, 1 << _RUN_BITS)
        self._runs: dict[int, _Kept] = {}
        """The oldest first."""
        self._places: dict[int, int] = {}
        """By the first word of a name: the number of its run, and behind it its place there."""
        self._next = 0
        self._blocks = 0
        """Of all runs."""

    @property
    def held_blocks(self) -> int:
        """How many blocks the kept runs have, those included that are known twice: `limit` at most."""
        return self._blocks

    def note(self, run: SavedRun) -> None:
        """A request has these blocks."""
        words: list[int] = np.frombuffer(run.names, "<u8")[:: HASH_BYTES // 8].tolist()
        number, self._next = self._next, self._next + 1
        first = number << _RUN_BITS
        self._runs[number] = _Kept(run, words)
        self._places.update(zip(words, range(first, first + len(words)), strict=True))
        self._blocks += len(words)
        while self._blocks > self._limit:
            self._forget(next(iter(self._runs)))

    def knows(self, name: bytes) -> bool:
        """Whether `find` finds it."""
        number, place = divmod(self._places.get(int.from_bytes(name[:8], "little"), -1), 1 << _RUN_BITS)
        kept = self._runs.get(number)
        return kept is not None and kept.run.names[place * HASH_BYTES : (place + 1) * HASH_BYTES] == name

    def count_known(self, names: Sequence[bytes]) -> int:
        """How many of these, from the first on, are known."""
        return next((at for at, name in enumerate(names) if not self.knows(name)), len(names))

    def find(self, names: bytes, at: int) -> SavedRun | None:
        """Of these blocks from the one at this place on: the next ones that are of one run. None: the first is not
        known (any more)."""
        begin = at * HASH_BYTES
        number, place = divmod(self._places.get(int.from_bytes(names[begin : begin + 8], "little"), -1), 1 << _RUN_BITS)
        kept = self._runs.get(number)
        if kept is None:
            return None
        known = kept.run.names[place * HASH_BYTES : (place + len(names) // HASH_BYTES - at) * HASH_BYTES]
        count = len(known) // HASH_BYTES
        if known != names[begin : begin + len(known)]:
            differs = (as_rows(known) != as_rows(names[begin : begin + len(known)])).any(axis=1)
            count = int(differs.argmax())
        return kept.run.cut(place, count, self._block_size) if count else None

    def _forget(self, number: int) -> None:
        kept, first = self._runs.pop(number), number << _RUN_BITS
        self._blocks -= len(kept.words)
        for at, word in enumerate(kept.words):
            if self._places.get(word) == first + at:
                del self._places[word]
