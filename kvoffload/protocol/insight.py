"""What became of prompts, and why of the rest: told by engines in batches, explained by the server. Never tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from kvoffload.protocol.answers import Done
from kvoffload.protocol.fields import U16, U32, U64, Blob, Choice, Line, Name, OptionalDigest, Several
from kvoffload.protocol.limits import (
    ARRAY_ITEMS,
    MAX_MEMORY_SIZES,
    MAX_MODELS,
    MAX_NAMED_COUNTS,
    MAX_QUERIES,
    MAX_TIERS,
    MAX_TIMINGS,
)
from kvoffload.protocol.message import Phase, Reply, Request
from kvoffload.protocol.shape import Shape

TAG_BYTES = 8
BUCKETS = 32
MAX_TAGS = 16_384
"""Of one prompt: 262,144 tokens in blocks of 16. What is behind is not counted."""


class Miss(IntEnum):
    """Why tokens of a prompt are computed. Those from EVICTED on only a server can tell."""

    NEVER_SEEN = 0
    TOO_SHORT = 1
    NOT_SERVED = 2
    REFUSED = 3
    SLOW_TO_ANSWER = 4
    NO_ROOM = 5
    SLOWER_THAN_COMPUTING = 6
    TIER_TOO_SLOW = 7
    SKIPPED = 8
    EVICTED = 9
    """It was there, and made room for others."""
    UNTRUSTED = 10
    """It was there, and its bytes were not what they should be."""
    CLEARED = 11
    """It was there until an operator cleared the cache."""
    OTHER_IDENTITY = 12
    """It is there, of an engine that differs."""
    INCOMPLETE = 13
    """It was there, but not all that a boundary behind it needs."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """What an engine asked for one prompt, once it is decided."""

    asked: Annotated[U32, "tokens that it had not itself"]
    promised: Annotated[U32, "of them, from the cache"]
    lower: Annotated[U32, "of those, from slower tiers"] = 0
    saved_us: Annotated[U64, "what computing the promised ones would have taken; 0: unknown"] = 0
    age_ms: Annotated[U32, "since it was asked"] = 0
    miss: Annotated[Miss, Choice(Miss), "why the others are computed"] = Miss.NEVER_SEEN
    group: Annotated[U16, "of the block that is missing first"] = 0
    missing: Annotated[OptionalDigest, "its hash; empty: none is"] = b""
    tags: Annotated[bytes, Blob("tags", TAG_BYTES, MAX_TAGS), "the first bytes of hashes that were asked for"] = b""
    session: Annotated[Name, "of an agent, whose next turn it is; empty: of none"] = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Explains the miss of one query."""

    miss: Annotated[Miss, Choice(Miss), "why its others are computed, as far as the server knows better"]
    seconds_ago: Annotated[U32, "since when the block is not there any more"] = 0
    missing_bytes: Annotated[U64, "more memory that would have kept it, about"] = 0
    differs: Annotated[Line, "in what the identity differs that has it, or that would have it"] = ""


@dataclass(frozen=True, kw_only=True)
class Explained(Reply):
    """In the order of the queries."""

    op = 76

    answers: Annotated[tuple[Explanation, ...], Several(Shape(Explanation), MAX_QUERIES), "of each"]


@dataclass(frozen=True, kw_only=True)
class Explain(Request):
    """What was asked lately, for the server's counts; and why what was missing was missing."""

    op = 15
    capability = "explain"
    reply = Explained

    queries: Annotated[tuple[Query, ...], Several(Shape(Query), MAX_QUERIES), "the oldest first"]


@dataclass(frozen=True, kw_only=True)
class NamedCount:
    """One of a few counts whose names are those of a metric's label."""

    name: Annotated[Name, "which"]
    count: Annotated[U64, "since the memory was taken or adopted"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Tells how long what was timed took, as a histogram."""

    name: Annotated[Name, "of what"]
    label: Annotated[Name, "of which; empty: there is one"]
    counts: Annotated[bytes, Blob("little-endian u64", 8, BUCKETS), "by bucket; the last: longer than all bounds"]
    sum_ns: Annotated[U64, "of all"]


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """What one identity's blocks take of the memory."""

    name: Annotated[Name, "of the model, as far as it was told"]
    fingerprint: Annotated[Name, "the first letters of the identity's"]
    used_bytes: Annotated[U64, "now"]


@dataclass(frozen=True, kw_only=True)
class MemorySize:
    """What a pool of another size would have had of what was asked for."""

    quarters: Annotated[U32, "of the pool's memory: 4 is as much as it has"]
    hit_blocks: Annotated[U64, "of groups that keep prefixes"]
    hit_bytes: Annotated[U64, "of all groups"]


@dataclass(frozen=True, kw_only=True)
class Insight(Reply):
    """What came of prompts, and how long what took."""

    op = 77

    outcomes: Annotated[tuple[NamedCount, ...], Several(Shape(NamedCount), MAX_NAMED_COUNTS), "of prompts, in tokens"]
    errors: Annotated[
        tuple[NamedCount, ...], Several(Shape(NamedCount), MAX_NAMED_COUNTS), "that were answered, in all domains"
    ]
    timings: Annotated[tuple[Timing, ...], Several(Shape(Timing), MAX_TIMINGS), "histograms; of calls, in all domains"]
    asked_blocks: Annotated[U64, "that engines had not themselves and asked for"]
    distinct_blocks: Annotated[U64, "among them, about"]
    saved_us: Annotated[U64, "that engines did not compute"]
    models: Annotated[tuple[ModelUse, ...], Several(Shape(ModelUse), MAX_MODELS), "that use most"] = ()
    speeds: Annotated[tuple[NamedCount, ...], Several(Shape(NamedCount), MAX_TIERS), "of reading, bytes a second"] = ()
    hints: Annotated[
        tuple[NamedCount, ...], Several(Shape(NamedCount), MAX_NAMED_COUNTS), "by action and outcome: retain.done"
    ] = ()
    hint_tokens: Annotated[
        tuple[NamedCount, ...], Several(Shape(NamedCount), MAX_NAMED_COUNTS), "of hints' prefixes: what came of them"
    ] = ()
    retained: Annotated[U32, "prefixes that are retained now"] = 0
    retained_bytes: Annotated[U64, "of their blocks, each counted for every prefix that has it"] = 0
    retained_limit_bytes: Annotated[U64, "that they may have"] = 0
    curve_blocks: Annotated[U64, "that engines loaded, or computed and saved; of groups that keep prefixes"] = 0
    curve_bytes: Annotated[U64, "of them and of other groups"] = 0
    curve_one_in: Annotated[U32, "so many blocks, one is followed at each size"] = 1
    curve: Annotated[tuple[MemorySize, ...], Several(Shape(MemorySize), MAX_MEMORY_SIZES), "the smallest first"] = ()


@dataclass(frozen=True, kw_only=True)
class Inspect(Request):
    """Asks for it."""

    op = 16
    needs = Phase.GREETED
    capability = "explain"
    reply = Insight


@dataclass(frozen=True, kw_only=True)
class AgentSession:
    """What became of the turns of one agent, in the words of `Query`."""

    name: Annotated[Name, "that its requests have"]
    turns: Annotated[U64, "that were told"]
    asked: Annotated[U64, "tokens that engines had not themselves"]
    promised: Annotated[U64, "of them, from the cache"]
    lower: Annotated[U64, "of those, from slower tiers"]
    saved_us: Annotated[U64, "that engines did not compute"]


@dataclass(frozen=True, kw_only=True)
class AgentSessions(Reply):
    """Of the domain, the one with the latest turn first."""

    op = 88

    total: Annotated[U32, "that are known; the oldest are forgotten"]
    sessions: Annotated[tuple[AgentSession, ...], Several(Shape(AgentSession), ARRAY_ITEMS), "of them"]


@dataclass(frozen=True, kw_only=True)
class ListAgentSessions(Request):
    """What agents' sessions got of the cache. For operators."""

    op = 28
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = AgentSessions

    first: Annotated[U32, "of those that are wanted, counted from 0"] = 0
    token: Annotated[Name, "of the operator; empty where the socket's credentials suffice"] = ""


@dataclass(frozen=True, kw_only=True)
class ClearedBlocks(Reply):
    """What was forgotten."""

    op = 78

    blocks: Annotated[U64, "that memory had"]


@dataclass(frozen=True, kw_only=True)
class Clear(Request):
    """Memory forgets all blocks of the domain; slower tiers keep theirs. For operators."""

    op = 17
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = ClearedBlocks

    token: Annotated[Name, "of the operator; empty where the socket's credentials suffice"] = ""


@dataclass(frozen=True, kw_only=True)
class SetQuota(Request):
    """Until the server ends. For operators. A tenant without a quota gets none, and one with a quota keeps one."""

    op = 18
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = Done

    tenant: Annotated[Name, "whose"]
    quota_bytes: Annotated[U64, "of the memory"]
    token: Annotated[Name, "of the operator; empty where the socket's credentials suffice"] = ""
