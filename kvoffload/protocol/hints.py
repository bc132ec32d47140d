"""What routers and agents know of requests to come: bring a prefix up, keep it, let it go. Each is bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from kvoffload.protocol.fields import U16, U32, U64, U64_MAX, Chain, Choice, Flag, Name, Several, Whole
from kvoffload.protocol.limits import ARRAY_ITEMS
from kvoffload.protocol.message import Phase, Reply, Request
from kvoffload.protocol.shape import Shape

MAX_PRIORITY = 9
MAX_TTL_MS = 24 * 60 * 60 * 1000
"""A day. Who wants more says it again."""


class HintAction(IntEnum):
    """What is to be done with a prefix."""

    PREFETCH = 0
    """Bring up what slower tiers or peers have of it."""
    RETAIN = 1
    """Keep it from eviction for a while, under the name of a session if one is said."""
    RELEASE = 2
    """Let a session's retention go, or without a session those that end within the chain."""
    PRIORITISE = 3
    """Change how late a session's retention gives way."""
    HAND_OVER = 4
    """Make a session's retention the caller's engine's; one that is not here is retained, and prefetched."""


ENVELOPE_VERSION = "1"
"""Of an envelope of actions, as requests and /v1/hints have it, and of each action in it."""
ACTION_TYPES: Mapping[str, HintAction] = {
    "prefetch": HintAction.PREFETCH,
    "retain": HintAction.RETAIN,
    "release": HintAction.RELEASE,
    "priority": HintAction.PRIORITISE,
    "hand_over": HintAction.HAND_OVER,
}
"""What envelopes call them."""


class HintOutcome(IntEnum):
    """What was done."""

    DONE = 0
    PARTLY = 1
    """For fewer tokens than were asked for: the others are not there, or not yet."""
    NOTHING = 2
    """There is no such prefix, or no such session."""
    OVER_LIMIT = 3
    """More would be retained than the tenant may, or all may together; what there was of the session stays."""
    NO_ROOM = 4
    """The index cannot hold another lease."""


_Priority = Annotated[int, Whole(MAX_PRIORITY), "the higher, the later it gives way; 0 is what everything has"]


@dataclass(frozen=True, kw_only=True)
class Hinted(Reply):
    """What was done, at once: nothing is waited for."""

    op = 85

    outcome: Annotated[HintOutcome, Choice(HintOutcome), "whether it was done"]
    tokens: Annotated[U64, "of the chain for which it holds; of a prefetch what memory and tiers have together"] = 0
    ttl_ms: Annotated[U32, "for how long it holds from now on; 0: it ends with the answer"] = 0


@dataclass(frozen=True, kw_only=True)
class Hint(Request):
    """Of the engine's own namespace; operators may speak of any."""

    op = 25
    needs = Phase.GREETED
    capability = "hints"
    reply = Hinted

    name_space: Annotated[U32, "whose"]
    action: Annotated[HintAction, Choice(HintAction), "what is to be done"]
    chain: Annotated[Chain, "the prompt's hashes from its first token on; may be empty where a session is named"] = b""
    limit: Annotated[U64, "tokens of it that are meant"] = U64_MAX
    session: Annotated[Name, "whose retention it is; empty: nobody's"] = ""
    ttl_ms: Annotated[int, Whole(MAX_TTL_MS), "how long it is to be retained; 0: ten minutes, or as before"] = 0
    priority: _Priority = 0
    tenant: Annotated[U16, "whose share pays: a place in registered's tenants, from 1 on; others: the session's"] = 0
    token: Annotated[Name, "of the operator; empty where the engine or the socket's credentials suffice"] = ""


@dataclass(frozen=True, kw_only=True)
class RetainedPrefix:
    """One prefix that is kept from eviction."""

    session: Annotated[Name, "whose it is; empty: nobody's"]
    engine: Annotated[Name, "that asked for it last; empty: an operator did"]
    owner: Annotated[Name, "whose engine that is"]
    tenant: Annotated[Name, "whose share pays; empty: nobody's"]
    fingerprint: Annotated[Name, "the first letters of the identity's"]
    tokens: Annotated[U64, "of the prefix"]
    size_bytes: Annotated[U64, "of its blocks; each prefix counts all that it has"]
    ttl_ms: Annotated[U32, "until it ends"]
    priority: _Priority
    was_used: Annotated[Flag, "blocks of it were loaded since it is retained"]


@dataclass(frozen=True, kw_only=True)
class Retained(Reply):
    """In the order in which they give way."""

    op = 86

    total: Annotated[U32, "that there are"]
    size_bytes: Annotated[U64, "of all of them"]
    limit_bytes: Annotated[U64, "that they may have together"]
    prefixes: Annotated[tuple[RetainedPrefix, ...], Several(Shape(RetainedPrefix), ARRAY_ITEMS), "of them"]


@dataclass(frozen=True, kw_only=True)
class ListRetained(Request):
    """What is retained in the domain. For operators."""

    op = 26
    needs = Phase.GREETED
    capability = "hints"
    is_for_operators = True
    reply = Retained

    first: Annotated[U32, "of those that are wanted, counted from 0"] = 0
    token: Annotated[Name, "of the operator; empty where the socket's credentials suffice"] = ""
