"""Engines tell in batches what became of prompts, and the server explains misses. No prompt's tokens are sent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from kvoffload.protocol.answers import Done
from kvoffload.protocol.fields import (
    U16,
    U32,
    U64,
    U64_MAX,
    Blob,
    Choice,
    Flag,
    Line,
    Name,
    OptionalDigest,
    Several,
    Whole,
)
from kvoffload.protocol.limits import (
    ARRAY_ITEMS,
    MAX_LEDGER_ROWS,
    MAX_MEMORY_SIZES,
    MAX_MODELS,
    MAX_NAMED_COUNTS,
    MAX_QUERIES,
    MAX_TENANTS,
    MAX_TIERS,
    MAX_TIMINGS,
)
from kvoffload.protocol.message import Phase, Reply, Request
from kvoffload.protocol.shape import Shape

TAG_BYTES = 8
BUCKETS = 32
MAX_TAGS = 16_384
"""Most tags of one prompt: 262,144 tokens in blocks of 16. Blocks behind them are not counted."""


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

    @property
    def label(self) -> str:
        """The reason's name in metrics and log lines."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class Query:
    """One prompt of an engine: how many tokens it asked the cache for, and how many it got."""

    asked: Annotated[U32, "tokens that it had not itself"]
    promised: Annotated[U32, "asked tokens that the cache promised"]
    lower: Annotated[U32, "promised tokens from slower tiers"] = 0
    saved_us: Annotated[U64, "time in which the engine would have computed the promised tokens; 0: unknown"] = 0
    age_ms: Annotated[U32, "time since the request was asked"] = 0
    miss: Annotated[Miss, Choice(Miss), "why the others are computed"] = Miss.NEVER_SEEN
    group: Annotated[U16, "group of the first missing block"] = 0
    missing: Annotated[OptionalDigest, "its hash; empty: none is"] = b""
    tags: Annotated[bytes, Blob("tags", TAG_BYTES, MAX_TAGS), "the first bytes of hashes that were asked for"] = b""
    session: Annotated[Name, "the agent's session whose next turn it is; empty: none"] = ""
    tenant: Annotated[
        U16, "the tenant for whom it is counted: a place in registered's tenants, from 1 on; others: the session's"
    ] = 0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Explains the miss of one query."""

    miss: Annotated[Miss, Choice(Miss), "why its others are computed, as far as the server knows better"]
    seconds_ago: Annotated[U32, "how long ago the block left"] = 0
    missing_bytes: Annotated[U64, "more memory that would have kept it, about"] = 0
    differs: Annotated[Line, "fields in which the identity differs that has the block, or would have it"] = ""


@dataclass(frozen=True, kw_only=True)
class Explained(Reply):
    """The explanations of an `explain`, in the order of its queries."""

    op = 76

    answers: Annotated[tuple[Explanation, ...], Several(Shape(Explanation), MAX_QUERIES), "one answer for each query"]


@dataclass(frozen=True, kw_only=True)
class Explain(Request):
    """Reports an engine's latest prompts for the server's counts, and asks why blocks were missing."""

    op = 15
    capability = "explain"
    reply = Explained

    queries: Annotated[tuple[Query, ...], Several(Shape(Query), MAX_QUERIES), "the oldest first"]
    saved_bytes: Annotated[
        bytes,
        Blob("little-endian u64", 8, MAX_TENANTS + 1),
        "bytes that it has saved since its last `explain`: for the session's tenant, then for each of registered's",
    ] = b""


@dataclass(frozen=True, kw_only=True)
class NamedCount:
    """One of a few counts whose names are those of a metric's label."""

    name: Annotated[Name, "name of the count"]
    count: Annotated[U64, "count since the memory was taken or adopted"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A histogram of how long calls or waits of one kind took."""

    name: Annotated[Name, "call or wait that was timed"]
    label: Annotated[Name, "one of several of that name; empty: there is one"]
    counts: Annotated[
        bytes,
        Blob("little-endian u64", 8, BUCKETS),
        "number of times in each bucket; the last one: longer than all bounds",
    ]
    sum_ns: Annotated[U64, "sum of all times"]


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """The memory that the blocks of one identity take."""

    name: Annotated[Name, "name of the model, as far as it is known"]
    fingerprint: Annotated[Name, "the first letters of the identity's"]
    used_bytes: Annotated[U64, "now"]


@dataclass(frozen=True, kw_only=True)
class MemorySize:
    """The hits that a pool of another size would have had for the same requests."""

    quarters: Annotated[U32, "quarters of the pool's memory: 4 is as much as it has"]
    hit_blocks: Annotated[U64, "hit blocks of groups that keep prefixes"]
    hit_bytes: Annotated[U64, "hit bytes of all groups"]


class LedgerKind(IntEnum):
    """The kind of thing that a row of the ledger is about."""

    TENANT = 0
    MODEL = 1

    @property
    def label(self) -> str:
        """The kind's name in metrics."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """The counts of one tenant or model. The rows of a kind add up to the server's own counts."""

    kind: Annotated[LedgerKind, Choice(LedgerKind), "its kind"]
    name: Annotated[Name, "name of the tenant or model; empty: prompts and blocks without one, or the rest"]
    is_rest: Annotated[Flag, "whether it stands for all that have no row of their own"]
    prompts: Annotated[U64, "prompts that engines have reported"]
    asked: Annotated[U64, "tokens that engines had not themselves"]
    promised: Annotated[U64, "asked tokens that the cache promised"]
    lower: Annotated[U64, "promised tokens from slower tiers"]
    saved_us: Annotated[U64, "time in which engines would have computed the promised tokens"]
    read_bytes: Annotated[U64, "bytes of the blocks that the promised tokens need"]
    written_bytes: Annotated[U64, "bytes that engines have saved"]
    memory_kib_s: Annotated[U64, "KiB of memory, times the seconds for which they were occupied"]
    tier_read_bytes: Annotated[U64, "bytes that slower tiers have brought up; 0 for tenants"]
    tier_written_bytes: Annotated[U64, "bytes that were written to slower tiers; 0 for tenants"]


@dataclass(frozen=True, kw_only=True)
class Insight(Reply):
    """Counts of what became of prompts, and how long calls and waits took."""

    op = 77

    outcomes: Annotated[
        tuple[NamedCount, ...], Several(Shape(NamedCount), MAX_NAMED_COUNTS), "outcomes of prompts, in tokens"
    ]
    errors: Annotated[
        tuple[NamedCount, ...],
        Several(Shape(NamedCount), MAX_NAMED_COUNTS),
        "errors that were answered: to operators those of all domains, to others those of their own",
    ]
    timings: Annotated[tuple[Timing, ...], Several(Shape(Timing), MAX_TIMINGS), "histograms; of calls, in all domains"]
    asked_blocks: Annotated[U64, "blocks that engines did not have themselves and asked for"]
    distinct_blocks: Annotated[U64, "among them, about"]
    saved_us: Annotated[U64, "time in which engines would have computed the promised tokens"]
    models: Annotated[
        tuple[ModelUse, ...], Several(Shape(ModelUse), MAX_MODELS), "the models that use most memory"
    ] = ()
    speeds: Annotated[
        tuple[NamedCount, ...],
        Several(Shape(NamedCount), MAX_TIERS),
        "speed of reading from each tier, in bytes a second",
    ] = ()
    hints: Annotated[
        tuple[NamedCount, ...], Several(Shape(NamedCount), MAX_NAMED_COUNTS), "hints by action and outcome: retain.done"
    ] = ()
    hint_tokens: Annotated[
        tuple[NamedCount, ...], Several(Shape(NamedCount), MAX_NAMED_COUNTS), "tokens of hints' prefixes, by outcome"
    ] = ()
    retained: Annotated[U32, "prefixes that are retained now"] = 0
    retained_bytes: Annotated[U64, "bytes of their blocks; a block counts for every prefix that has it"] = 0
    retained_limit_bytes: Annotated[U64, "most bytes that they may have"] = 0
    curve_blocks: Annotated[U64, "blocks that engines loaded, or computed and saved, in groups that keep prefixes"] = 0
    curve_bytes: Annotated[U64, "bytes of these blocks and of those of other groups"] = 0
    curve_one_in: Annotated[U32, "so many blocks, one is followed at each size"] = 1
    curve: Annotated[tuple[MemorySize, ...], Several(Shape(MemorySize), MAX_MEMORY_SIZES), "the smallest first"] = ()
    ledger: Annotated[
        tuple[LedgerRow, ...], Several(Shape(LedgerRow), MAX_LEDGER_ROWS), "tenants and models, each kind with its rest"
    ] = ()
    memory_kib_s: Annotated[U64, "KiB of memory, times the seconds for which they were occupied"] = 0
    tier_kib_s: Annotated[
        tuple[NamedCount, ...], Several(Shape(NamedCount), MAX_TIERS), "the same of each tier that knows what it has"
    ] = ()
    window_s: Annotated[U32, "seconds of the window that the next fields are about: a day at most, and 15 minutes"] = 0
    window_saved_us: Annotated[U64, "the window's part of saved_us"] = 0
    window_hit_memory: Annotated[U64, "the window's tokens from memory"] = 0
    window_hit_lower: Annotated[U64, "the window's tokens from slower tiers"] = 0
    window_evicted: Annotated[U64, "the window's tokens that were computed because blocks had been evicted"] = 0
    window_blocks: Annotated[U64, "blocks that engines loaded, or computed and saved, in the window"] = 0
    window_hits: Annotated[
        tuple[int, ...],
        Several(Whole(U64_MAX), MAX_MEMORY_SIZES),
        "these blocks that pools of the sizes in curve would have hit",
    ] = ()
    window_has_other_groups: Annotated[
        Flag, "whether one of the models that use most memory has groups that keep windows or states"
    ] = False


@dataclass(frozen=True, kw_only=True)
class Inspect(Request):
    """Asks for `insight`."""

    op = 16
    needs = Phase.GREETED
    capability = "explain"
    reply = Insight


@dataclass(frozen=True, kw_only=True)
class AgentSession:
    """The turns of one agent's session; the counts are those of `query`, added up."""

    name: Annotated[Name, "the session's name, which its requests have"]
    turns: Annotated[U64, "turns that engines have reported"]
    asked: Annotated[U64, "tokens that engines had not themselves"]
    promised: Annotated[U64, "asked tokens that the cache promised"]
    lower: Annotated[U64, "promised tokens from slower tiers"]
    saved_us: Annotated[U64, "time in which engines would have computed the promised tokens"]
    read_bytes: Annotated[U64, "bytes of the blocks that the promised tokens need"] = 0


@dataclass(frozen=True, kw_only=True)
class AgentSessions(Reply):
    """Agents' sessions of the domain. The one with the latest turn comes first."""

    op = 88

    total: Annotated[U32, "number of all sessions that are known; the oldest are forgotten"]
    sessions: Annotated[tuple[AgentSession, ...], Several(Shape(AgentSession), ARRAY_ITEMS), "a part of these sessions"]
    rest: Annotated[
        tuple[AgentSession, ...], Several(Shape(AgentSession), 1), "forgotten sessions, and prompts of no session"
    ] = ()


@dataclass(frozen=True, kw_only=True)
class ListAgentSessions(Request):
    """Asks for agents' sessions and what each got from the cache. For operators."""

    op = 28
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = AgentSessions

    first: Annotated[U32, "number of the first session wanted, counted from 0"] = 0
    token: Annotated[Name, "the operator's token; empty if the socket's credentials suffice"] = ""


@dataclass(frozen=True, kw_only=True)
class ClearedBlocks(Reply):
    """How many blocks memory forgot."""

    op = 78

    blocks: Annotated[U64, "blocks that memory had"]


@dataclass(frozen=True, kw_only=True)
class Clear(Request):
    """Memory forgets all blocks of the domain; slower tiers keep theirs. For operators."""

    op = 17
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = ClearedBlocks

    token: Annotated[Name, "the operator's token; empty if the socket's credentials suffice"] = ""


@dataclass(frozen=True, kw_only=True)
class SetQuota(Request):
    """Changes a tenant's quota until the server ends. For operators. A tenant that has no quota cannot get one so, and
    one that has a quota cannot lose it."""

    op = 18
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = Done

    tenant: Annotated[Name, "name of the tenant"]
    quota_bytes: Annotated[U64, "the tenant's part of the memory"]
    token: Annotated[Name, "the operator's token; empty if the socket's credentials suffice"] = ""
