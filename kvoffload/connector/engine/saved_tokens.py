"""Tokens of blocks that were saved lately, for events: the server knows names alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvoffload.hash_rows import as_rows
from kvoffload.types import HASH_BYTES

MAX_BLOCKS = 65_536
"""Of one group. Beyond it the oldest runs are forgotten, and their blocks are told without tokens."""
_RUN_BITS = 20
"""A place in a run has so many bits of a number; a run is a part of one request."""


@dataclass(eq=False)
class _Run:
    """Blocks of one request that follow each other."""

    words: list[int]
    names: bytes
    tokens: list[int]
    left: int
    """Blocks that have not been told yet."""


class SavedTokens:
    """Keeps the tokens of one group's blocks. Owned by the scheduler's thread."""

    def __init__(self, block_size: int, *, limit: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._limit = min(limit, 1 << _RUN_BITS)
        self._runs: dict[int, _Run] = {}
        """The oldest first."""
        self._places: dict[int, int] = {}
        """By the first word of a name: the number of its run, and behind it its place there."""
        self._next = 0
        self._blocks = 0
        """Of all runs."""

    @property
    def untold_blocks(self) -> int:
        """How many blocks `take` can find."""
        return len(self._places)

    @property
    def held_blocks(self) -> int:
        """How many blocks the kept runs have, those included that were told or offered again: `limit` at most."""
        return self._blocks

    def note(self, names: bytes, tokens: list[int]) -> None:
        """These blocks are about to be saved, and have these tokens one after the other."""
        words: list[int] = np.frombuffer(names, "<u8")[:: HASH_BYTES // 8].tolist()
        number, self._next = self._next, self._next + 1
        first = number << _RUN_BITS
        self._runs[number] = _Run(words, names, tokens, len(words))
        self._places.update(zip(words, range(first, first + len(words)), strict=True))
        self._blocks += len(words)
        while self._blocks > self._limit:
            self._forget(next(iter(self._runs)))

    def take(self, names: bytes, at: int) -> tuple[int, list[int]]:
        """Of blocks that are told now, from the one at this place on: how many are the next ones of one run, and their
        tokens, once. 0: the first is not known (any more)."""
        begin = at * HASH_BYTES
        number, place = divmod(self._places.get(int.from_bytes(names[begin : begin + 8], "little"), -1), 1 << _RUN_BITS)
        run = self._runs.get(number)
        if run is None:
            return 0, []
        known = run.names[place * HASH_BYTES : (place + len(names) // HASH_BYTES - at) * HASH_BYTES]
        count = len(known) // HASH_BYTES
        if known != names[begin : begin + len(known)]:
            differs = (as_rows(known) != as_rows(names[begin : begin + len(known)])).any(axis=1)
            count = int(differs.argmax())
        first = (number << _RUN_BITS) + place
        for offset, word in enumerate(run.words[place : place + count]):
            if self._places.get(word) == first + offset:
                del self._places[word]
        run.left -= count
        if run.left <= 0:
            self._forget(number)
        return count, run.tokens[place * self._block_size : (place + count) * self._block_size]

    def _forget(self, number: int) -> None:
        run, first = self._runs.pop(number), number << _RUN_BITS
        self._blocks -= len(run.words)
        for at, word in enumerate(run.words):
            if self._places.get(word) == first + at:
                del self._places[word]
