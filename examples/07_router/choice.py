"""Which engine a prompt goes to. Pure, and all that is particular to this router."""

from __future__ import annotations

from collections.abc import Sequence


def choose(hits: Sequence[int | None], waiting: Sequence[int], *, tokens: int, turn: int) -> int:
    """The engine that is done with a prompt of so many tokens first.

    `hits`: how many of them each engine's cache has; None of one that did not answer, which counts as nothing.
    `waiting`: tokens that each was given and has not computed yet. Where all are as good, or nobody answers, they take
    turns.
    """
    engines = range(len(hits))
    if all(hit is None for hit in hits):
        return turn % len(hits)
    # What an engine has to compute before the first token of the answer: other prompts, and what it lacks of this one.
    costs = [waiting[at] + tokens - (hits[at] or 0) for at in engines]
    return min(engines, key=lambda at: (costs[at], (at - turn) % len(hits)))
