"""Hints by routers and agents about requests to come: bring a prefix up, keep it, let it go. Each is bounded."""

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
"""Most milliseconds of a retention: a day. A later hint can renew it."""


class HintAction(IntEnum):
    """An action that a hint asks the server to take on a prefix."""

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
"""Version of an envelope of actions, as requests and /v1/hints have it, and of each action in it."""
ACTION_TYPES: Mapping[str, HintAction] = {
    "prefetch": HintAction.PREFETCH,
    "retain": HintAction.RETAIN,
    "release": HintAction.RELEASE,
    "priority": HintAction.PRIORITISE,
    "hand_over": HintAction.HAND_OVER,
}
"""Actions by the names that envelopes use for them."""


class HintOutcome(IntEnum):
    """How far the server has done what a hint asks for."""

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
    """How far a hint was followed. The answer comes at once: the server does not wait for a prefetch to end."""

    op = 85

    outcome: Annotated[HintOutcome, Choice(HintOutcome), "whether it was done"]
    tokens: Annotated[
        U64, "tokens of the chain for which it holds; for a prefetch those that memory and tiers have together"
    ] = 0
    ttl_ms: Annotated[U32, "how long it holds from now on; 0: it ends with the answer"] = 0


@dataclass(frozen=True, kw_only=True)
class Hint(Request):
    """A router or an agent asks for an action on a prefix. An engine may name its own namespace, an operator any."""

    op = 25
    needs = Phase.GREETED
    capability = "hints"
    reply = Hinted

    name_space: Annotated[U32, "number of the prefix's namespace"]
    action: Annotated[HintAction, Choice(HintAction), "the action that is asked for"]
    chain: Annotated[Chain, "the prompt's hashes from its first token on; may be empty where a session is named"] = b""
    limit: Annotated[U64, "tokens of it that are meant"] = U64_MAX
    session: Annotated[Name, "the session whose retention it is; empty: the retention has no session"] = ""
    ttl_ms: Annotated[int, Whole(MAX_TTL_MS), "how long the prefix is retained; 0: ten minutes, or as before"] = 0
    priority: _Priority = 0
    tenant: Annotated[
        U16, "the tenant whose share pays: a place in registered's tenants, from 1 on; others: the session's"
    ] = 0
    token: Annotated[
        Name, "the operator's token; empty if the engine's session or the socket's credentials suffice"
    ] = ""


@dataclass(frozen=True, kw_only=True)
class RetainedPrefix:
    """One prefix that is kept from eviction."""

    session: Annotated[Name, "the session that it belongs to; empty: none"]
    engine: Annotated[Name, "engine that asked for it last; empty: an operator did"]
    owner: Annotated[Name, "user or client to whom that engine belongs"]
    tenant: Annotated[Name, "the tenant whose share pays; empty: none"]
    fingerprint: Annotated[Name, "the first letters of the identity's"]
    tokens: Annotated[U64, "tokens of the prefix"]
    size_bytes: Annotated[U64, "bytes of its blocks; each prefix counts all that it has"]
    ttl_ms: Annotated[U32, "time until it ends"]
    priority: _Priority
    was_used: Annotated[Flag, "blocks of it were loaded since it is retained"]


@dataclass(frozen=True, kw_only=True)
class Retained(Reply):
    """Retained prefixes. The one that gives way first comes first."""

    op = 86

    total: Annotated[U32, "number of all retained prefixes"]
    size_bytes: Annotated[U64, "bytes of all retained prefixes"]
    limit_bytes: Annotated[U64, "most bytes that they may have together"]
    prefixes: Annotated[
        tuple[RetainedPrefix, ...], Several(Shape(RetainedPrefix), ARRAY_ITEMS), "a part of these prefixes"
    ]


@dataclass(frozen=True, kw_only=True)
class ListRetained(Request):
    """Asks for the prefixes that are retained in the domain. For operators."""

    op = 26
    needs = Phase.GREETED
    capability = "hints"
    is_for_operators = True
    reply = Retained

    first: Annotated[U32, "number of the first prefix wanted, counted from 0"] = 0
    token: Annotated[Name, "the operator's token; empty if the socket's credentials suffice"] = ""
