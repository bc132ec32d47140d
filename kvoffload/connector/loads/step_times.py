"""How long the engine's steps take, as far as it tells what computing a prompt costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvoffload.connector.loads.judge import MIN_RATED_TOKENS, LoadJudge
from kvoffload.connector.tracked_request import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

MAX_STEPS_UNDER_WAY = 8
"""That are measured. vLLM has two at a time, or one for each stage of a pipeline."""
MIN_TOKENS_BESIDE = 16
"""Of prompts in a step in which others decode: with fewer it is not measured."""


class _Step(NamedTuple):
    begun_s: float
    tokens: int
    """Of prefill."""
    decoding: int
    """Requests."""


class StepTimes:
    """Owned by the scheduler's thread. Measures steps with prefill, and after each of them one that only decodes.

    A measured step has a number, which goes to the workers and comes back with what they report at its end: of steps
    without work there may be no report at all, so their order tells nothing. With two steps under way the second begins
    when the first one ends, so a step takes the time from its own beginning or from the last end before its own,
    whichever is later.
    """

    def __init__(self, judge: LoadJudge, *, decoded_tokens: int, clock: Callable[[], float]) -> None:
        """`decoded_tokens`: what a request that decodes computes in a step at most, with its drafts."""
        self._judge = judge
        self._decoded_tokens = decoded_tokens
        self._clock = clock
        self._last = 0
        self._under_way: dict[int, _Step] = {}
        self._ended_s = 0.0
        self._wants_plain = False

    @property
    def are_wanted(self) -> bool:
        """A step that is measured is under way, so that the end of any step has to be told."""
        return bool(self._under_way)

    def begin(self, output: SchedulerOutput, requests: Mapping[str, TrackedRequest]) -> int:
        """The number of a step that is measured; 0: this one is not. Their computed tokens are those before it."""
        scheduled = output.num_scheduled_tokens
        tokens = computing = 0
        if output.total_num_scheduled_tokens > len(scheduled):
            tokens, computing = self._count_prefill(scheduled, requests)
        if not (tokens or (self._wants_plain and scheduled)):
            return 0
        if tokens < MIN_RATED_TOKENS and tokens and (tokens < MIN_TOKENS_BESIDE or computing == len(scheduled)):
            return 0
        self._wants_plain = tokens > 0
        self._judge.computing = tokens
        if len(self._under_way) == MAX_STEPS_UNDER_WAY:
            del self._under_way[min(self._under_way)]
        self._last += 1
        self._under_way[self._last] = _Step(self._clock(), tokens, len(scheduled) - computing)
        return self._last

    def end(self, number: int) -> None:
        """A step has ended, the one of this number; 0: one that has none."""
        now_s = self._clock()
        step = self._under_way.get(number)
        if step is not None:
            # Steps end in their order: those before it never will.
            self._under_way = {later: other for later, other in self._under_way.items() if later > number}
            seconds = now_s - max(step.begun_s, self._ended_s)
            if step.tokens:
                self._judge.note_prefill(step.tokens, seconds, decoding=step.decoding)
            else:
                self._judge.note_decoding(step.decoding, seconds)
        self._ended_s = now_s

    def _count_prefill(self, scheduled: Mapping[str, int], requests: Mapping[str, TrackedRequest]) -> tuple[int, int]:
        """Tokens of requests that still compute their prompt, and how many these are. One that decodes has drafts."""
        found = computing = 0
        for request_id, tokens in scheduled.items():
            if tokens > self._decoded_tokens and (tracked := requests.get(request_id)) is not None:
                request = tracked.request
                if request.num_computed_tokens < request.num_prompt_tokens:
                    found += tokens
                    computing += 1
        return found, computing
