"""Remembers the tokens of blocks that requests had lately, for events: the server knows only the blocks' names."""

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
"""Maximum number of blocks of one group; each takes about 200 bytes with 16 tokens. Beyond it the oldest runs are
forgotten, and their blocks are reported without tokens."""
_RUN_BITS = 20
"""Number of bits for a block's place in its run, in a number that also has the run's; a run is part of one request."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class SavedRun:
    """Blocks of one request that follow each other, with the tokens of all of them."""

    names: bytes
    tokens: npt.NDArray[np.int64]
    parent: bytes | None = None
    """The name of the block before the first; None: there is none."""
    mask: bytes = bytes(HASH_BYTES)
    """The mask over its names."""
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    """The parts of the names other than tokens, by block; None: there are none."""
    about: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """Fields of its events that describe the request."""

    def cut(self, place: int, count: int, block_size: int) -> SavedRun:
        """Returns `count` of its blocks, from `place` on, as a run."""
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
    """The first 64-bit words of its names."""


class SavedTokens:
    """Keeps the tokens of one group's blocks. Owned by one thread."""

    def __init__(self, block_size: int, *, limit: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._limit = min(limit, 1 << _RUN_BITS)
        self._runs: dict[int, _Kept] = {}
        """The runs by their number, the oldest first."""
        self._places: dict[int, int] = {}
        """Where each block is, by the first word of its name: the number of its run, with its place there in the lower
        `_RUN_BITS` bits."""
        self._next = 0
        self._blocks = 0
        """Number of blocks in all runs."""

    @property
    def held_blocks(self) -> int:
        """Number of blocks in the kept runs, at most `limit`; a block in two runs counts twice."""
        return self._blocks

    def note(self, run: SavedRun) -> None:
        """Keeps a run of blocks that a request has."""
        words: list[int] = np.frombuffer(run.names, "<u8")[:: HASH_BYTES // 8].tolist()
        number, self._next = self._next, self._next + 1
        first = number << _RUN_BITS
        self._runs[number] = _Kept(run, words)
        self._places.update(zip(words, range(first, first + len(words)), strict=True))
        self._blocks += len(words)
        while self._blocks > self._limit:
            self._forget(next(iter(self._runs)))

    def knows(self, name: bytes) -> bool:
        """Whether `find` finds this block."""
        number, place = divmod(self._places.get(int.from_bytes(name[:8], "little"), -1), 1 << _RUN_BITS)
        kept = self._runs.get(number)
        return kept is not None and kept.run.names[place * HASH_BYTES : (place + 1) * HASH_BYTES] == name

    def count_known(self, names: Sequence[bytes]) -> int:
        """Returns how many of these blocks, from the first on, are known."""
        return next((at for at, name in enumerate(names) if not self.knows(name)), len(names))

    def find(self, names: bytes, at: int) -> SavedRun | None:
        """Returns the block at this place and those after it, as far as they are in one run. None: the block is not
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
