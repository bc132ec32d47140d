"""Finds out whether an engine still computes with the same weights, by its ranks' proofs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

PROOF_WAIT_S = 10.0
"""How long requests wait for the ranks' answers after a wake-up, in seconds; then the weights count as unknown."""


class Verdict(Enum):
    """The result of the ranks' answers."""

    SAME = "the same as before"
    OTHER = "others than before"
    UNKNOWN = "not known"


class WeightProof:
    """Owned by the scheduler's thread. After a reset the ranks are asked with a step that computes, because the weights
    of a sleeping engine must not be touched. After a wake-up they are asked with the first request, which waits for the
    answer, so that changes to the weights before that are noticed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ranks = 0
        """Number of ranks to ask; 0: they cannot read their weights."""
        self._known: dict[int, bytes] = {}
        """Proofs of the weights for which the present names are used, by rank. Empty: they are not known."""
        self.is_open = False
        """Whether the engine's weights are not known since a reset."""
        self._has_woken = False
        self._is_wanted = False
        self._number = 0
        self._asked_s: float | None = None
        self._answers: dict[int, bytes] = {}

    def begin(self, proofs: Mapping[int, bytes], *, can_look: bool) -> None:
        """Takes the proofs with which all ranks registered. A rank may be able to read some of its weights (`can_look`)
        and yet have no proof of all of them."""
        self._ranks = len(proofs) if can_look else 0
        self._known = dict(proofs) if all(proofs.values()) else {}

    def reset(self) -> None:
        """Notes a reset: blocks have other names from now on, and the weights may change."""
        if self.is_open and self._asked_s is not None:
            self._known = {}  # the weights for which the last names were used were never proved
        self._open(has_woken=False)

    def wake(self) -> None:
        """Notes that the engine has woken, after a sleep since the last reset."""
        if self.is_open and self._known:
            self._open(has_woken=True)

    def _open(self, *, has_woken: bool) -> None:
        self.is_open, self._has_woken = self._ranks > 0, has_woken
        self._is_wanted, self._asked_s, self._answers = False, None, {}

    def is_waited_for(self) -> bool:
        """Returns whether a request has to wait for the ranks' answers. It waits for `PROOF_WAIT_S` at most."""
        if not (self.is_open and self._has_woken):
            return False
        if self._asked_s is not None and self._clock() - self._asked_s > PROOF_WAIT_S:
            self._known = {}
            self._open(has_woken=False)
            return False
        self._is_wanted = True
        return True

    def take_question(self, *, has_forward: bool) -> int:
        """Returns, once, the number with which the ranks shall answer; 0: they are not asked in this step."""
        is_due = self._is_wanted if self._has_woken else has_forward
        if not (self.is_open and is_due) or self._asked_s is not None:
            return 0
        self._number += 1
        self._asked_s = self._clock()
        return self._number

    def answer(self, weights: Mapping[int, tuple[int, bytes]]) -> tuple[Verdict, bool] | None:
        """Takes answers of ranks. Once all have answered, returns the verdict, and whether the engine has slept: then
        the same weights get back the names that they had before. None: some answers are missing, or none is wanted."""
        if not self.is_open or self._asked_s is None:
            return None
        self._answers.update({rank: proof for rank, (number, proof) in weights.items() if number == self._number})
        if len(self._answers) < self._ranks:
            return None
        answers, has_woken = self._answers, self._has_woken
        are_known = bool(self._known) and all(answers.values())
        verdict = Verdict.UNKNOWN if not are_known else Verdict.SAME if answers == self._known else Verdict.OTHER
        self._known = answers if all(answers.values()) else {}
        self._open(has_woken=False)
        self.is_open = False
        return verdict, has_woken
