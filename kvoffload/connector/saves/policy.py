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
        """`find` has to be asked in every step."""
        ...

    @property
    def saves_at_once(self) -> bool:
        """What is offered now takes slots now."""
        ...

    def choose(self, candidates: Sequence[Candidates]) -> Sequence[Candidates]:
        """Of blocks that are worth saving those that are saved now. Each is offered once, and again when it is put
        back."""
        ...

    def find(self, under_way: int) -> Sequence[NamedBlocks]:
        """What has to be saved now of what was offered before; by group. So many blocks that were found are being
        saved."""
        ...

    def find_all(self) -> Sequence[NamedBlocks]:
        """What was offered before and is neither saved nor lost; by group. The engine ends."""
        ...

    def look_again(self) -> None:
        """There was no room for some of what was found."""
        ...

    def keep(self, candidates: Sequence[Candidates]) -> bool:
        """There was no room for some of these, and they are not offered again. Whether they are found later."""
        ...

    def settle(self, blocks: npt.NDArray[np.int64]) -> None:
        """What was offered in these blocks is saved now, or was before."""
        ...

    def forget_all(self) -> None:
        """What was offered so far means nothing any more."""
        ...


class Eager:
    """Whatever is worth saving, at once."""

    is_watching = False
    saves_at_once = True

    def choose(self, candidates: Sequence[Candidates]) -> Sequence[Candidates]:
        return candidates

    def find(self, under_way: int) -> Sequence[NamedBlocks]:
        return ()

    def find_all(self) -> Sequence[NamedBlocks]:
        return ()

    def look_again(self) -> None:
        """What there was no room for is offered again."""

    def keep(self, candidates: Sequence[Candidates]) -> bool:
        return False

    def settle(self, blocks: npt.NDArray[np.int64]) -> None:
        """There is nothing to remember of them."""

    def forget_all(self) -> None:
        """Does nothing: there is nothing to forget."""


class SeenBlocks:
    """Remembers between `limit` / 2 and `limit` of the blocks that it saw last. Owned by the scheduler's thread.

    Most blocks of most prompts never come again. Two generations: when the current one holds half of the limit, the one
    before it is forgotten. Whoever is forgotten counts as new again. Blocks and users are 64-bit numbers here; two
    blocks that share one are saved a use too early, two users a use too late, no more.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 2, "each generation remembers something"
        self._half = limit // 2
        self._current: dict[int, int] = {}
        """By block: its first user."""
        self._previous: dict[int, int] = {}

    def __len__(self) -> int:
        """Returns how many blocks it remembers, at most `limit`; a block that was seen in both generations counts
        twice."""
        return len(self._current) + len(self._previous)

    def see(self, group: int, block_hash: bytes, user: str) -> bool:
        """Says whether somebody else used the block before. From now on it was used."""
        block, number = hash((group, block_hash)), hash(user)
        first = self._current.get(block)
        if first is None:
            first = self._previous.get(block, number)
            if len(self._current) == self._half:
                self._previous, self._current = self._current, {}
            # Also what was known: what is used goes on being remembered.
            self._current[block] = first
        return first != number

    def forget_all(self) -> None:
        """The cache was cleared: nothing of what was seen is of use any more."""
        self._current.clear()
        self._previous.clear()


class SecondUse(Eager):
    """What a second request uses, and what is to be kept for a while: that has to be there first."""

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
    """An engine that caches nothing itself has nothing to lose: its blocks are saved at once."""
    if has_prefix_cache or wish == "second_use":
        return wish
    return "eager"
