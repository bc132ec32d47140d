"""Measures how long the engine's steps take, to find out what computing a prompt costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.loads.judge import MIN_RATED_TOKENS, LoadJudge

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

MAX_STEPS_UNDER_WAY = 8
"""Maximum number of measured steps under way. vLLM has two at a time, or one for each stage of a pipeline."""
MIN_TOKENS_BESIDE = 16
"""Minimum number of prompt tokens in a step in which other requests decode: with fewer the step is not measured."""


class _Step(NamedTuple):
    begun_s: float
    tokens: int
    """Number of prompt tokens that the step computes; 0: it only decodes."""
    decoding: int
    """Number of requests that decode."""


class StepTimes:
    """Owned by the scheduler's thread. Measures steps with prefill, and after each of them one that only decodes.

    A measured step has a number, which goes to the workers and comes back with their report at its end. The order of
    reports would not do, as steps without work may have none. With two steps under way the second begins when the first
    one ends, so a step takes the time from its own beginning, or from the last end before its own, if that is later.
    """

    def __init__(self, judge: LoadJudge, *, decoded_tokens: int, clock: Callable[[], float]) -> None:
        """`decoded_tokens`: the most tokens that a decoding request computes in a step, with its drafts."""
        self._judge = judge
        self._decoded_tokens = decoded_tokens
        self._clock = clock
        self._last = 0
        self._under_way: dict[int, _Step] = {}
        self._ended_s = 0.0
        self._wants_plain = False

    @property
    def are_wanted(self) -> bool:
        """Whether a measured step is under way: then `end` has to be called for every step."""
        return bool(self._under_way)

    def begin(self, output: SchedulerOutput, requests: Mapping[str, TrackedRequest]) -> int:
        """Returns the number of a step that is measured; 0: it is not. The requests' computed tokens must not include
        this step's yet."""
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
        """Notes that the step of this number has ended; 0: a step without a number has."""
        now_s = self._clock()
        step = self._under_way.get(number)
        if step is not None:
            # Steps end in their order: earlier ones that have not ended never will.
            self._under_way = {later: other for later, other in self._under_way.items() if later > number}
            seconds = now_s - max(step.begun_s, self._ended_s)
            if step.tokens:
                self._judge.note_prefill(step.tokens, seconds, decoding=step.decoding)
            else:
                self._judge.note_decoding(step.decoding, seconds)
        self._ended_s = now_s

    def _count_prefill(self, scheduled: Mapping[str, int], requests: Mapping[str, TrackedRequest]) -> tuple[int, int]:
        """Returns the number of tokens scheduled for requests that still compute their prompt, and the number of these
        requests. Up to `decoded_tokens` may be a decoding request with its drafts, and do not count."""
        found = computing = 0
        for request_id, tokens in scheduled.items():
            if tokens > self._decoded_tokens and (tracked := requests.get(request_id)) is not None:
                request = tracked.request
                if request.num_computed_tokens < request.num_prompt_tokens:
                    found += tokens
                    computing += 1
        return found, computing
