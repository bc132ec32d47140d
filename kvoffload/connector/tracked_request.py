"""What the scheduler side knows of one request of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffload.connector.block_chain import BlockChain
from kvoffload.connector.hints.envelope import Wish
from kvoffload.connector.request_terms import RequestTerms

if TYPE_CHECKING:
    from vllm.v1.request import Request

NEVER = 2**62


@dataclass(eq=False)
class SaveProgress:
    """How far a request's blocks have been looked at. It begins anew whenever the request has lost its blocks."""

    next: list[int]
    """By group: the first block that has not been looked at."""
    due: int = 0
    """Tokens at which there may be something to save again."""
    decoded_due: int = 0
    """The same while it decodes: what that fills is saved several blocks at a time."""
    ends: list[int] = field(default_factory=list)
    """Boundaries whose windows are still to be saved, ascending."""
    interval_end: int = 0
    """The next boundary of those that the engine keeps at regular intervals."""
    limit: int = NEVER
    """Tokens beyond which nothing is saved."""
    states_end: int = 0
    """In models with states: tokens up to which a state was handed off. Blocks beyond it are of no use to anybody."""


@dataclass(eq=False)
class Arrival:
    """How a request waits for what another engine has computed for it."""

    since_s: float | None = None
    """When it was looked for first."""
    looks_again_s: float = 0.0
    """When slower tiers are asked for it again."""
    is_over: bool = False
    """It is there, or is not waited for any more."""


@dataclass(eq=False)
class TrackedRequest:
    """Owned by the scheduler's thread, from the request's arrival to its end."""

    request: Request
    chain: BlockChain
    terms: RequestTerms
    progress: SaveProgress
    wishes: tuple[Wish, ...] = ()
    """What its hints say of its prefix."""
    is_kept: bool = False
    """What it computes is to be in the cache as soon as it can be: its wishes are to retain it."""
    has_run: bool = False
    """Since it was given blocks it was part of a step: whoever loaded blocks for it has done so."""
    asked_s: float | None = None
    """When the cache was asked for it first, by the scheduler side's clock."""
    reused_tokens: int = 0
    """That the engine had of it when it was asked for last."""
    noted_tokens: int = 0
    """Of its first ones, those that events were told of when they were found."""
    was_promoted: bool = False
    """Slower tiers were asked for it."""
    arrival: Arrival | None = None
    """None: it expects nothing, or was not looked for yet."""
    lost_from: int = NEVER
    """Tokens from which on blocks were not saved when it ended, as too many were being saved."""
    was_told: bool = False
    """What became of its prompt was told: what is asked after a preemption is no turn of its session."""
    was_skipped: bool = False
    """That it is not loaded was noted."""
    is_tainted: bool = False
    """It holds blocks of another generation, or of content that is not known (yet): they are not saved."""

    @property
    def may_load(self) -> bool:
        """Some prompts the engine computes whole, whatever is found for them: it wants their logprobs, say."""
        return not (self.is_tainted or self.terms.skip_load or self.request.skip_reading_prefix_cache)
