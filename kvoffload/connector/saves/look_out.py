"""Which requests may have something to save in a step, so that a step does not look at all that run.

A request that computes its prompt is looked at in each step. Requests that decode are looked at when some more of their
blocks can be full, all together once in a round of steps, so that one look finds many blocks. A request that has more
to save than there was room for waits in a queue, from which each step takes a few: the length of the queue costs a step
nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from kvoffload.connector.common.tracked_request import NEVER, TrackedRequest

ROUND_STEPS = 64
MAX_LOOKS = 32
"""Maximum number of requests of the queue, and of these and a round's together, that one step looks at."""


class LookOut:
    """Owned by the scheduler's thread. `decoded_tokens`: the most tokens that a decoding request gains in a step."""

    def __init__(self, *, decoded_tokens: int = 1, round_steps: int = ROUND_STEPS) -> None:
        self.decoded_tokens = decoded_tokens
        self.round_steps = round_steps
        self._step = 0
        self._next: dict[str, TrackedRequest] = {}
        """Requests that still compute their prompt, and are looked at in every step."""
        self._later: dict[int, dict[str, TrackedRequest]] = {}
        """Requests that decode, by the step that looks at them."""
        self._behind: dict[str, TrackedRequest] = {}
        """Requests that have something to save already, the one that waits longest first."""

    @property
    def entries(self) -> int:
        """Number of entries. A request may have two: one that lost its blocks may still be listed for a later step."""
        return len(self._next) + len(self._behind) + sum(map(len, self._later.values()))

    def admit(self, tracked: TrackedRequest) -> None:
        """Notes that a request has blocks (again), and computes its prompt from now on."""
        tracked.has_run = False
        self._behind.pop(tracked.request.request_id, None)
        self._next[tracked.request.request_id] = tracked

    @property
    def rest_steps(self) -> int:
        """Number of the next steps with nothing to look at, unless a request is admitted."""
        return 0 if self._next or self._behind else self.round_steps - 1 - self._step % self.round_steps

    def skip(self, steps: int) -> None:
        """Counts steps that were over without `begin_step`, as `rest_steps` allowed."""
        self._step += steps

    @property
    def has_waiting(self) -> bool:
        """Whether any request has something to save already."""
        return bool(self._behind)

    def begin_step(self, scheduled: Collection[str], *, has_room: bool = True) -> list[TrackedRequest]:
        """Begins a step and returns the requests to look at. The caller passes each of them to `note` or `wait`, or it
        is not looked at again. Without room, requests in the queue stay there."""
        self._step += 1
        if not (self._next or (self._behind and has_room) or self._step in self._later):
            return []
        found: dict[str, TrackedRequest] = {}
        for request_id in list(islice(self._behind, MAX_LOOKS if has_room else 0)):
            tracked = self._behind.pop(request_id)
            (found if request_id in scheduled else self._behind)[request_id] = tracked
        for request_id, tracked in self._later.pop(self._step, {}).items():
            if request_id in self._next or request_id in self._behind:
                continue  # it lost its blocks meanwhile, and starts over
            if request_id not in scheduled:
                # It was preempted, or left out of this step.
                self._put(self._step + self.round_steps, tracked)
            else:
                (found if len(found) < MAX_LOOKS else self._behind)[request_id] = tracked
        for request_id, tracked in self._next.items():
            if request_id in scheduled:
                tracked.has_run = True
                found[request_id] = tracked
        return list(found.values())

    def note(self, tracked: TrackedRequest, tokens: int) -> None:
        """Notes that a request has so many tokens after this step, and that the blocks that were due were looked at. If
        it is due again at once, it waits in the queue."""
        if tracked.progress.due == 0:
            self.wait(tracked)
            return
        if tokens < tracked.request.num_tokens:
            self._next[tracked.request.request_id] = tracked
            return
        self._next.pop(tracked.request.request_id, None)
        if tracked.progress.decoded_due < NEVER:
            missing = max(tracked.progress.decoded_due - tokens, 0)
            self._put(self._step + max(-(-missing // self.decoded_tokens), 1), tracked)

    def wait(self, tracked: TrackedRequest) -> None:
        """Puts a request at the end of the queue: not all of its blocks could be looked at."""
        self._next.pop(tracked.request.request_id, None)
        self._behind[tracked.request.request_id] = tracked

    def put_off(self, tracked: TrackedRequest) -> None:
        """Puts a request off to the next round, whether it decodes or computes its prompt."""
        self._next.pop(tracked.request.request_id, None)
        self._put(self._step + 1, tracked)

    def forget(self, request_id: str) -> None:
        """Removes a request that has ended."""
        self._next.pop(request_id, None)
        self._behind.pop(request_id, None)
        for requests in self._later.values():
            requests.pop(request_id, None)

    def _put(self, step: int, tracked: TrackedRequest) -> None:
        step = -(-step // self.round_steps) * self.round_steps
        self._later.setdefault(step, {})[tracked.request.request_id] = tracked
