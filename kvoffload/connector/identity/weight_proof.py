"""Whether an engine computes with the weights that it had, as its ranks can prove it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

PROOF_WAIT_S = 10.0
"""How long requests wait for the ranks' answers after a wake-up; then nothing is proved."""


class Verdict(Enum):
    """What the ranks' answers say."""

    SAME = "the same as before"
    OTHER = "others than before"
    UNKNOWN = "not known"


class WeightProof:
    """Owned by the scheduler's thread. After a reset the ranks are asked with a step that computes, as nobody may touch
    weights in an engine that sleeps; after a wake-up with the first request, which waits for the answer: what happens
    to the weights before it comes is seen."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ranks = 0
        """That can be asked; 0: they cannot look at their weights."""
        self._known: dict[int, bytes] = {}
        """By rank, of the weights that the names of now were used with. Empty: they are not known."""
        self.is_open = False
        """Since a reset nobody knows what the engine computes with."""
        self._has_woken = False
        self._is_wanted = False
        self._number = 0
        self._asked_s: float | None = None
        self._answers: dict[int, bytes] = {}

    def begin(self, proofs: Mapping[int, bytes], *, can_look: bool) -> None:
        """Takes what all ranks said when they registered. Some can look at weights, and not at all of them."""
        self._ranks = len(proofs) if can_look else 0
        self._known = dict(proofs) if all(proofs.values()) else {}

    def reset(self) -> None:
        """Names are others from now on."""
        if self.is_open and self._asked_s is not None:
            self._known = {}  # of the names before them nobody knows what they were used with
        self._open(has_woken=False)

    def wake(self) -> None:
        """The engine has slept since the last reset."""
        if self.is_open and self._known:
            self._open(has_woken=True)

    def _open(self, *, has_woken: bool) -> None:
        self.is_open, self._has_woken = self._ranks > 0, has_woken
        self._is_wanted, self._asked_s, self._answers = False, None, {}

    def is_waited_for(self) -> bool:
        """A request has come: whether it has to wait for what the ranks say. Within a bound."""
        if not (self.is_open and self._has_woken):
            return False
        if self._asked_s is not None and self._clock() - self._asked_s > PROOF_WAIT_S:
            self._known = {}
            self._open(has_woken=False)
            return False
        self._is_wanted = True
        return True

    def take_question(self, *, has_forward: bool) -> int:
        """The number that the ranks are to answer with, once; 0: they are not asked in this step."""
        is_due = self._is_wanted if self._has_woken else has_forward
        if not (self.is_open and is_due) or self._asked_s is not None:
            return 0
        self._number += 1
        self._asked_s = self._clock()
        return self._number

    def answer(self, weights: Mapping[int, tuple[int, bytes]]) -> tuple[Verdict, bool] | None:
        """What the ranks have said by now, and whether the engine has slept: then the same weights have the names that
        they had before. None: not all have said it."""
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
