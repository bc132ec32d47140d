"""The scheduler side's orders for another node's server, and the reports of that node's lowest rank: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffload.cache import AcquiredBlocks, Ask, Publication, ReservedSlots
from kvoffload.client import HintSettings, TierWait


@dataclass(frozen=True, eq=False)
class NodeQuestion:
    """An acquire for the node's server."""

    number: int
    ask: Ask
    far: TierWait | None = None


@dataclass(frozen=True, eq=False)
class NodeAnswer:
    """The answer to a question. The node holds the found lease until it is told that the question is over."""

    number: int
    found: AcquiredBlocks
    came_late: bool = False


@dataclass(frozen=True, eq=False)
class NodeOrders:
    """One step's orders for a node, which carries them out in the order of these fields."""

    retired: tuple[int, ...] = ()
    """Memories of the node that no job uses any more. This is for all its ranks, the other fields for the lowest."""
    over: tuple[int, ...] = ()
    """Questions whose answer or lease is no longer needed."""
    published: tuple[Publication, ...] = ()
    aborted: tuple[ReservedSlots, ...] = ()
    invalid: tuple[tuple[int, bytes], ...] = ()
    """(group, names) of records whose bytes are not those that were saved."""
    slots: Mapping[int, int] = field(default_factory=dict)
    """Number of slots wanted, by group."""
    questions: tuple[NodeQuestion, ...] = ()
    hints: tuple[HintSettings, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not any(vars(self).values())


@dataclass(frozen=True)
class NodeState:
    """The state of a node's server, as its proxy sees it."""

    memory_id: int = 0
    session: int = 0
    is_served: bool = False
    has_room: bool = False
    has_tiers: bool = False
    most_slots: tuple[int, ...] = ()
    """Maximum number of slots held ready for the scheduler side, by group."""


@dataclass(frozen=True, eq=False)
class NodeReport:
    """A node's news since its last report."""

    state: NodeState | None = None
    """The state of its server; None: it has not changed."""
    answers: tuple[NodeAnswer, ...] = ()
    slots: tuple[ReservedSlots, ...] = ()
    """Slots that belong to the scheduler side from now on: one value for each group asked for, empty without room."""

    def add(self, later: NodeReport) -> NodeReport:
        return NodeReport(later.state or self.state, self.answers + later.answers, self.slots + later.slots)
