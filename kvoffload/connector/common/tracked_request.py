"""The scheduler side's record of one request of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffload.connector.common.block_chain import BlockChain
from kvoffload.connector.common.envelope import Wish
from kvoffload.connector.common.receipt import Receipt
from kvoffload.connector.common.request_settings import RequestSettings

if TYPE_CHECKING:
    from vllm.v1.request import Request

NEVER = 2**62


@dataclass(eq=False)
class SaveProgress:
    """How far a request's blocks have been looked at. It starts over whenever the request has lost its blocks."""

    next: list[int]
    """The first block that has not been looked at, by group."""
    due: int = 0
    """Number of tokens at which there may be something to save again."""
    decoded_due: int = 0
    """The same while the request decodes, when several blocks are saved at a time."""
    ends: list[int] = field(default_factory=list)
    """Boundaries whose windows are not saved yet, ascending."""
    interval_end: int = 0
    """The next boundary of those that the engine keeps at regular intervals."""
    limit: int = NEVER
    """Number of tokens beyond which nothing is saved."""
    states_end: int = 0
    """Number of tokens up to which a state was handed off, in models with states: later blocks are useless."""


@dataclass(eq=False)
class Arrival:
    """A request's wait for blocks that another engine has computed for it."""

    since_s: float | None = None
    """When the blocks were first looked for; None: not yet."""
    looks_again_s: float = 0.0
    """When slower tiers are asked for the blocks again."""
    is_over: bool = False
    """Whether the wait has ended, because the blocks are there or are late."""


@dataclass(eq=False)
class TrackedRequest:
    """Owned by the scheduler's thread, from the request's arrival to its end."""

    request: Request
    chain: BlockChain
    settings: RequestSettings
    progress: SaveProgress
    wishes: tuple[Wish, ...] = ()
    """The actions on its prefix that its hints ask for."""
    is_kept: bool = False
    """Whether its blocks are saved as soon as possible, because its wishes are to retain them."""
    has_run: bool = False
    """Whether it was part of a step since it was given blocks: then loads into them, also another connector's,
    ended."""
    admitted: int = 0
    """A number that is higher the later it was given its blocks."""
    kept_tokens: int = 0
    """Number of its first tokens whose blocks were looked at because the engine was about to preempt it."""
    asked_s: float | None = None
    """When the cache was first asked for it, by the scheduler side's clock."""
    reused_tokens: int = 0
    """Number of its tokens that the engine had itself when it last asked us."""
    noted_tokens: int = 0
    """Number of its first tokens that were found and noted for events."""
    was_promoted: bool = False
    """Whether slower tiers were asked for it."""
    reaches: tuple[tuple[str, int], ...] = ()
    """The reaches of memory and slower tiers for a question that was dropped before its load, as `split_hit` takes
    them."""
    receipt: Receipt | None = None
    """Its receipt; None: the cache was not asked yet."""
    arrival: Arrival | None = None
    """Its wait for another engine's blocks; None: it expects none, or they were not looked for yet."""
    lost_from: int = NEVER
    """The token from which on its blocks were not saved when it ended, because too many were being saved."""
    was_told: bool = False
    """Whether the outcome of its prompt was reported: a question after a preemption is no turn of its session."""
    was_skipped: bool = False
    """Whether it was noted that nothing is loaded for it."""
    is_tainted: bool = False
    """Whether it holds blocks of another generation, or of content that is not known (yet): they are not saved."""

    @property
    def may_load(self) -> bool:
        """Whether hits may be loaded. The engine computes some prompts whole in any case, to get their logprobs,
        say."""
        return not (self.is_tainted or self.settings.skip_load or self.request.skip_reading_prefix_cache)
