"""Which requests may have something to save in a step, so that a step does not look at all that run.

A request that computes its prompt is looked at in each step. One that decodes is looked at when some more of its blocks
can be full, and all of them together, once in a round of steps: what a look costs is shared by all that is found. One
that has more to save than there was room for waits in a queue, of which each step takes a few: a backlog costs a step
nothing, however long it is.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from kvoffload.connector.tracked_request import NEVER, TrackedRequest

ROUND_STEPS = 64
MAX_LOOKS = 32
"""Requests of a round, and of the queue, that one step looks at."""


class LookOut:
    """Owned by the scheduler's thread. `decoded_tokens`: what a request that decodes gains in a step at most."""

    def __init__(self, *, decoded_tokens: int = 1, round_steps: int = ROUND_STEPS) -> None:
        self.decoded_tokens = decoded_tokens
        self.round_steps = round_steps
        self._step = 0
        self._next: dict[str, TrackedRequest] = {}
        """To be looked at in every step until they decode."""
        self._later: dict[int, dict[str, TrackedRequest]] = {}
        """By step: the others."""
        self._behind: dict[str, TrackedRequest] = {}
        """Those that have something to save already, whoever waits longest first."""

    @property
    def entries(self) -> int:
        """How often requests stand in it: one that lost its blocks may still be due later as well."""
        return len(self._next) + len(self._behind) + sum(map(len, self._later.values()))

    def admit(self, tracked: TrackedRequest) -> None:
        """It has blocks (again), and its prompt is computed from now on."""
        tracked.has_run = False
        self._behind.pop(tracked.request.request_id, None)
        self._next[tracked.request.request_id] = tracked

    @property
    def rest_steps(self) -> int:
        """How many of the next steps there is nothing to look at in, unless a request is admitted."""
        return 0 if self._next or self._behind else self.round_steps - 1 - self._step % self.round_steps

    def skip(self, steps: int) -> None:
        """So many steps of such a rest are over."""
        self._step += steps

    @property
    def has_waiting(self) -> bool:
        """Somebody has something to save already."""
        return bool(self._behind)

    def begin_step(self, scheduled: Collection[str], *, has_room: bool = True) -> list[TrackedRequest]:
        """Those to look at. Each of them is to be told to `note` or to `wait`, or is not looked at again. Without room
        those that wait go on waiting."""
        self._step += 1
        if not (self._next or (self._behind and has_room) or self._step in self._later):
            return []
        found: dict[str, TrackedRequest] = {}
        for request_id in list(islice(self._behind, MAX_LOOKS if has_room else 0)):
            tracked = self._behind.pop(request_id)
            (found if request_id in scheduled else self._behind)[request_id] = tracked
        for request_id, tracked in self._later.pop(self._step, {}).items():
            if request_id in self._next or request_id in self._behind:
                continue  # it lost its blocks meanwhile, and begins anew
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
        """It has so many tokens after this step, and everything due was looked at, or is due at once again."""
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
        """It could not be looked at, or not all of it was: it is due as soon as all that wait already were."""
        self._next.pop(tracked.request.request_id, None)
        self._behind[tracked.request.request_id] = tracked

    def put_off(self, tracked: TrackedRequest) -> None:
        """It is looked at in the next round, whatever it does."""
        self._next.pop(tracked.request.request_id, None)
        self._put(self._step + 1, tracked)

    def forget(self, request_id: str) -> None:
        """Is told that a request has ended. Where it is to be looked at later, it will not be scheduled any more."""
        self._next.pop(request_id, None)
        self._behind.pop(request_id, None)
        for requests in self._later.values():
            requests.pop(request_id, None)

    def _put(self, step: int, tracked: TrackedRequest) -> None:
        step = -(-step // self.round_steps) * self.round_steps
        self._later.setdefault(step, {})[tracked.request.request_id] = tracked
