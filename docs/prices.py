"""The most that each message may cost the server: the work that it makes, where that is done, and how long the event
loop, which serves all domains, is away for it.

A limit of a message's length alone bounds neither. tests/unit/server/test_prices.py sends each message at its largest
and compares; the site has them as a table in docs/security.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvoffload.protocol import (
    Abort,
    Acquire,
    AcquireEntries,
    Adopt,
    Bye,
    Clear,
    ClientMessage,
    Credits,
    Drain,
    Explain,
    Farewell,
    Greeting,
    Hello,
    Hint,
    Holding,
    Inspect,
    Introduce,
    Invalidate,
    ListAgentSessions,
    ListBlocks,
    Mark,
    Offer,
    OpenLink,
    Prefetch,
    Promote,
    Publish,
    Register,
    Release,
    SetQuota,
    Stats,
    Subscribe,
)
from kvoffload.protocol.hints import ListRetained
from kvoffload.protocol.survey import FindBlocks, FindPrefix, FollowBlock, ListJoined, ReadIdentity, ReadReport
from kvoffload.server.channels.express_channels import FORGOTTEN_BLOCKS, TOLD_BLOCKS
from kvoffload.server.tiering.seen import LOOKS_AT_ONCE, MAX_LOOKS, PART_LOOKS


class Place(Enum):
    """Where the work for a message is done."""

    LOOP = "event loop"
    THREAD = "thread for long calls, one call of each user in turn"
    PARTS = "thread for long calls, one part for each user in turn"
    CHANNEL = "thread of the process's own channel"


@dataclass(frozen=True, kw_only=True)
class Price:
    """The most that one message costs."""

    work: str
    """The largest work, in words, and what bounds it."""
    place: Place = Place.LOOP
    marks: int
    """The longest time for which the event loop is away, in times of what it takes to serve a `mark`."""
    memory_mib: int = 1
    """The most memory that the work takes, in MiB, without the message itself. Of an express channel's messages it
    includes the message and what the process that sends it takes for it."""


_LOOKS = f"{MAX_LOOKS:,} looks, for blocks in memory and for their records in tiers; what is longer is cut"
_PARTS = f"{_LOOKS}. Up to {LOOKS_AT_ONCE:,} are made by the loop, others in parts of about {PART_LOOKS:,}"
_NATIVE = "the blocks that it names, each with a bounded number of steps"

PRICES: Mapping[type[ClientMessage], Price] = {
    Hello: Price(work="64 names of capabilities", marks=20),
    Register: Price(
        work="64 groups and 64 parts of an identity; a report of 64 KiB, of 4,096 that are kept", marks=400
    ),
    Mark: Price(work="none", marks=4),
    Bye: Price(work="none; events that wait for it are dropped", marks=200),
    Promote: Price(work=f"{_PARTS}. It waits for 32,768 blocks at most", place=Place.PARTS, marks=4000, memory_mib=32),
    Prefetch: Price(work="as promote", place=Place.PARTS, marks=4000, memory_mib=32),
    Hint: Price(
        work=f"{_PARTS}. What is found is leased by the same thread", place=Place.PARTS, marks=4000, memory_mib=32
    ),
    Stats: Price(work="63 tenants, 64 places of tiers", marks=80),
    Subscribe: Price(work="64 namespaces", marks=20),
    ListBlocks: Price(work="16,384 entries of the index", marks=800, memory_mib=4),
    Explain: Price(
        work="32 prompts with 16,384 blocks each, a part each; 16 other identities are compared, once",
        place=Place.PARTS,
        marks=400,
        memory_mib=16,
    ),
    Inspect: Price(
        work="the counts of one domain, 96 rows of its ledger, and those 32 of its 4,096 identities that use most "
        "memory",
        marks=300,
    ),
    ListAgentSessions: Price(work="256 of 1,024 sessions", marks=150),
    Clear: Price(
        work="all blocks of the domain; subscribers are told of each of 4,096 identities; from operators only",
        place=Place.THREAD,
        marks=4000,
    ),
    SetQuota: Price(work="one tenant", marks=40),
    ListJoined: Price(work="64 of the processes of the domain; from operators only", marks=100),
    ReadReport: Price(work="a report of 64 KiB", marks=20),
    ReadIdentity: Price(work="one of 4,096 identities; 64 are looked at", marks=80),
    FindBlocks: Price(work="all entries of the index; from operators only", place=Place.THREAD, marks=50, memory_mib=8),
    FollowBlock: Price(work="one block of each group", place=Place.THREAD, marks=150),
    FindPrefix: Price(work=_PARTS, place=Place.PARTS, marks=600, memory_mib=32),
    ListRetained: Price(work="64 of 4,096 prefixes; from operators only", marks=400),
    Drain: Price(work="the 2,048 sessions, which are told", marks=400),
    Adopt: Price(work="65,536 sizes", marks=40),
    OpenLink: Price(work="one secret", marks=40),
    Introduce: Price(work="64 groups; 4,096 other identities are compared", marks=400),
    Greeting: Price(
        work="the 2,048 sessions are searched for one that the process may continue; up to 253 descriptors are "
        "discarded by a thread for the user",
        marks=600,
    ),
    Holding: Price(work="64 memories; the 60 processes of the session are asked to let go of theirs", marks=600),
    Offer: Price(work="250 descriptors", marks=400),
    Farewell: Price(work="one session with its channels", marks=200),
    **dict.fromkeys(
        (Acquire, AcquireEntries, Credits), Price(work=_NATIVE, place=Place.CHANNEL, marks=20, memory_mib=32)
    ),
    **dict.fromkeys((Abort, Release), Price(work=_NATIVE, place=Place.CHANNEL, marks=20, memory_mib=8)),
    Publish: Price(
        work=f"{_NATIVE}. The loop tells subscribers and tiers of {TOLD_BLOCKS:,} blocks in a turn",
        place=Place.CHANNEL,
        marks=800,
        memory_mib=32,
    ),
    Invalidate: Price(
        work=f"{_NATIVE}. The loop has tiers forget {FORGOTTEN_BLOCKS} blocks in a turn",
        place=Place.CHANNEL,
        marks=1000,
        memory_mib=64,
    ),
}
"""The price of each message of a client."""
