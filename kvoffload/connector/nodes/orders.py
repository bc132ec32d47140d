"""What the scheduler side wants of another node's server, and what that node's lowest rank answers: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffload.cache import AcquiredBlocks, Ask, Publication, ReservedSlots
from kvoffload.client import FarTerms, HintTerms


@dataclass(frozen=True, eq=False)
class NodeQuestion:
    """An acquire that is to be asked of the node's server."""

    number: int
    ask: Ask
    far: FarTerms | None = None


@dataclass(frozen=True, eq=False)
class NodeAnswer:
    """The node holds the lease that was found until it is told that the question is over."""

    number: int
    found: AcquiredBlocks
    came_late: bool = False


@dataclass(frozen=True, eq=False)
class NodeOrders:
    """One step's orders for a node. They are done in the order of these fields."""

    retired: tuple[int, ...] = ()
    """Memories of the node that no job uses any more: for all its ranks, the rest is for the lowest."""
    over: tuple[int, ...] = ()
    """Questions whose answer, or whose lease, nobody wants any more."""
    published: tuple[Publication, ...] = ()
    aborted: tuple[ReservedSlots, ...] = ()
    invalid: tuple[tuple[int, bytes], ...] = ()
    """(group, names) of records that are not what was saved."""
    slots: Mapping[int, int] = field(default_factory=dict)
    """How many are wanted, by group."""
    questions: tuple[NodeQuestion, ...] = ()
    hints: tuple[HintTerms, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not any(vars(self).values())


@dataclass(frozen=True)
class NodeState:
    """How a node stands with its server."""

    memory_id: int = 0
    session: int = 0
    is_served: bool = False
    has_room: bool = False
    has_tiers: bool = False
    most_slots: tuple[int, ...] = ()
    """By group: how many are held ready for the scheduler side at best."""


@dataclass(frozen=True, eq=False)
class NodeReport:
    """What a node has to say since its last report."""

    state: NodeState | None = None
    """None: it is as it was."""
    answers: tuple[NodeAnswer, ...] = ()
    slots: tuple[ReservedSlots, ...] = ()
    """Are the scheduler side's from now on. One for each group that was asked for, empty where there is no room."""

    def add(self, later: NodeReport) -> NodeReport:
        return NodeReport(later.state or self.state, self.answers + later.answers, self.slots + later.slots)
