"""Chooses the engine for a prompt. It is pure, and the only part that is particular to this router."""

from __future__ import annotations

from collections.abc import Sequence


def choose(hits: Sequence[int | None], waiting: Sequence[int], *, tokens: int, turn: int) -> int:
    """Chooses the engine that is done with a prompt of so many tokens first.

    `hits`: how many of them each engine's cache has; None of one that did not answer, which counts as nothing.
    `waiting`: tokens that each was given and has not computed yet. If all are equally good, or no engine answers, they
    take turns.
    """
    engines = range(len(hits))
    if all(hit is None for hit in hits):
        return turn % len(hits)
    # Tokens that an engine has to compute before the answer's first token: other prompts, and its missing part of this
    # one.
    costs = [waiting[at] + tokens - (hits[at] or 0) for at in engines]
    return min(engines, key=lambda at: (costs[at], (at - turn) % len(hits)))
