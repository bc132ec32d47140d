"""Whether the scheduler side saves and restores, and how long an idle engine goes on stepping for it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

ENDING_S = 3.5
"""How long an engine that is told to stop goes on saving blocks that the pool lacks, in seconds: vLLM gives it five."""
LEFT_WAIT_S = 2.0
"""How long an idle engine goes on stepping for blocks that wait for slots, in seconds: slots may never come."""
JOIN_WAIT_S = 5.0
"""How long an idle engine goes on stepping while its ranks join another session, in seconds."""


class Stop(Enum):
    """A reason why requests that arrive are neither saved nor restored. Several may hold at a time."""

    MIXED = "the engine's own cache has blocks of weights that are gone, under the hashes of new ones"
    ASLEEP = "the engine woke while one of its ranks did not"
    PARTING = "ranks will store the groups in which they differ apart, once no save or load is on its way"
    FOR_GOOD = "a rank woke with something else registered, or ranks that hold different bytes could not be separated"


class Event(Enum):
    """The table of all changes. For each event: what happens, the stop that it begins, and the stop that it ends."""

    RESET = "the engine's own cache and the connector were reset", None, Stop.MIXED
    RESET_ALONE = "the connector was reset, but the engine's own cache has old blocks", Stop.MIXED, None
    AWAKE = "every rank may copy somewhere", None, Stop.ASLEEP
    PARTLY_AWAKE = "the engine woke, and a rank may not copy anywhere yet", Stop.ASLEEP, None
    RANKS_DIFFER = "ranks that should hold equal bytes do not", Stop.PARTING, None
    STORED_APART = "the parts were assembled again, and ranks store what differs apart", None, Stop.PARTING
    FAILED = "what the ranks hold cannot be saved any more", Stop.FOR_GOOD, None


class Serving:
    """The stops that hold, and what follows from them. Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self._stops: set[Stop | None] = set()
        self._draw_conclusions()

    def note(self, event: Event) -> None:
        """Changes the state as the table says."""
        _, begins, ends = event.value
        self._stops = (self._stops | {begins}) - {ends, None}
        self._draw_conclusions()

    def _draw_conclusions(self) -> None:
        """Sets the attributes that the scheduler reads in every step."""
        self.is_on = not self._stops
        """Whether requests that arrive are saved and restored."""
        self.is_mixed, self.is_asleep = Stop.MIXED in self._stops, Stop.ASLEEP in self._stops
        self.is_parting = Stop.PARTING in self._stops
        """Whether no save is planned in this session any more."""
        self.will_part = self.is_parting and Stop.FOR_GOOD not in self._stops
        """Whether the parts will be assembled again, so that what differs is stored apart."""


class Overtime:
    """How long an engine without anything to compute goes on stepping. Owned by the scheduler's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._joins_until_s = 0.0
        self._ends_s: float | None = None
        """When an engine that was told to stop must have ended; None: it was not told to."""
        self.idle_since_s: float | None = None
        """When the engine was first seen idle; a step that computes something or saves sets it to None."""

    def begin_ending(self) -> None:
        """Notes that the engine was told to stop. May be called in a signal handler."""
        if self._ends_s is None:
            self._ends_s = self._clock() + ENDING_S

    def begin_joining(self) -> None:
        """Notes that the ranks have to join another session."""
        self._joins_until_s = self._clock() + JOIN_WAIT_S

    def begin_idling(self) -> None:
        """Notes the first step that computes nothing and saves nothing."""
        self.idle_since_s = self._clock()

    @property
    def is_ending(self) -> bool:
        """Whether the engine ends, and there is still time to save before its own cache is gone."""
        return self._ends_s is not None and self._clock() < self._ends_s

    @property
    def is_joining(self) -> bool:
        return self._clock() < self._joins_until_s

    @property
    def has_waited(self) -> bool:
        """Whether the engine has waited long enough for slots, without anything to compute."""
        return self.idle_since_s is not None and self._clock() >= self.idle_since_s + LEFT_WAIT_S
