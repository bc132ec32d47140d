"""When a block that is worth saving is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.connector.saves.named_blocks import NamedBlocks
from kvoffload.connector.saves.worth import NULL_BLOCK, Candidates
from kvoffload.types import HASH_BYTES

PolicyName = Literal["auto", "eager", "on_evict", "second_use"]


class SavePolicy(Protocol):
    """Owned by the scheduler's thread."""

    @property
    def is_watching(self) -> bool:
        """Whether `find` has to be called in every step."""
        ...

    @property
    def saves_at_once(self) -> bool:
        """Whether blocks that are offered now take slots now."""
        ...

    def choose(self, candidates: Sequence[Candidates]) -> Sequence[Candidates]:
        """Returns those of the candidates that are saved now. Each block is offered once, and again if it is put
        back."""
        ...

    def find(self, under_way: int) -> Sequence[NamedBlocks]:
        """Returns, by group, blocks that were offered before and have to be saved now. `under_way`: how many blocks
        that it found before are still being saved."""
        ...

    def find_all(self) -> Sequence[NamedBlocks]:
        """Returns, by group, all blocks that were offered before and are neither saved nor lost. Called when they can
        be saved at once, and when the engine ends."""
        ...

    def look_again(self) -> None:
        """Makes `find` look again: there was no room for some of the blocks that it found."""
        ...

    def keep(self, candidates: Sequence[Candidates]) -> bool:
        """Takes blocks for some of which there was no room, and which are not offered again. Returns whether `find`
        will find them later."""
        ...

    def settle(self, blocks: npt.NDArray[np.int64]) -> None:
        """Notes that the content offered in these blocks is saved now, or was before."""
        ...

    def forget_all(self) -> None:
        """Forgets all blocks that were offered so far."""
        ...


class Eager:
    """The policy `eager`: saves every block that is worth saving, at once."""

    is_watching = False
    saves_at_once = True

    def choose(self, candidates: Sequence[Candidates]) -> Sequence[Candidates]:
        return candidates

    def find(self, under_way: int) -> Sequence[NamedBlocks]:
        return ()

    def find_all(self) -> Sequence[NamedBlocks]:
        return ()

    def look_again(self) -> None:
        """Does nothing: blocks for which there was no room are offered again."""

    def keep(self, candidates: Sequence[Candidates]) -> bool:
        return False

    def settle(self, blocks: npt.NDArray[np.int64]) -> None:
        """Does nothing: it remembers no blocks."""

    def forget_all(self) -> None:
        """Does nothing: there is nothing to forget."""


class SeenBlocks:
    """Remembers between `limit` / 2 and `limit` of the blocks that it saw last. Owned by the scheduler's thread.

    Most blocks of most prompts never come again. There are two generations: when the current one holds half of the
    limit, the one before it is forgotten, and its blocks count as new again. Blocks and users are 64-bit numbers here:
    if two blocks share a number, they are saved a use too early; if two users do, a use too late.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 2, "each generation remembers something"
        self._half = limit // 2
        self._current: dict[int, int] = {}
        """The first user of each block in the current generation."""
        self._previous: dict[int, int] = {}

    def __len__(self) -> int:
        """Returns how many blocks it remembers, at most `limit`; a block that was seen in both generations counts
        twice."""
        return len(self._current) + len(self._previous)

    def see(self, group: int, block_hash: bytes, user: str) -> bool:
        """Returns whether another user used the block before, and notes that this one has used it now."""
        block, number = hash((group, block_hash)), hash(user)
        first = self._current.get(block)
        if first is None:
            first = self._previous.get(block, number)
            if len(self._current) == self._half:
                self._previous, self._current = self._current, {}
            # Known blocks too: a block that is used stays remembered.
            self._current[block] = first
        return first != number

    def forget_all(self) -> None:
        """Forgets all blocks, because the cache was cleared."""
        self._current.clear()
        self._previous.clear()


class SecondUse(Eager):
    """The policy `second_use`: saves a block when a second request uses it. Blocks that a hint retains are saved at
    once, since only stored blocks can be retained."""

    def __init__(self, *, limit: int) -> None:
        """Remembers at most so many blocks."""
        self.seen = SeenBlocks(limit)

    def choose(self, candidates: Sequence[Candidates]) -> Sequence[Candidates]:
        return [chosen for one in candidates if (chosen := self._choose(one)) is not None]

    def forget_all(self) -> None:
        self.seen.forget_all()

    def _choose(self, one: Candidates) -> Candidates | None:
        names = one.tracked.chain.names(one.group, one.positions)
        user = one.tracked.request.request_id
        is_wanted = [
            self.seen.see(one.group, names[at : at + HASH_BYTES], user) for at in range(0, len(names), HASH_BYTES)
        ]
        if all(is_wanted) or one.tracked.is_kept:
            return one
        return replace(one, blocks=np.where(is_wanted, one.blocks, NULL_BLOCK)) if any(is_wanted) else None


def choose_policy(wish: PolicyName, *, has_prefix_cache: bool) -> PolicyName:
    """Returns the policy to use: `eager` instead of one that waits for evictions if the engine has no cache itself."""
    if has_prefix_cache or wish == "second_use":
        return wish
    return "eager"
