"""Finding, loading and saving blocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from kvoffload.protocol.fields import (
    U16,
    U32,
    U64,
    U64_MAX,
    AsMany,
    Blob,
    Chain,
    Choice,
    Hashes,
    Name,
    Numbers,
    Several,
    Whole,
)
from kvoffload.protocol.limits import MAX_BATCH, MAX_BLOCKS, MAX_GROUPS, MAX_LEASES, MAX_SHARDS, MAX_TIERS
from kvoffload.protocol.message import EXPRESS, OneWay, Reply, Request
from kvoffload.protocol.shape import Shape
from kvoffload.types import AcquireOutcome


class PromotionOutcome(IntEnum):
    """How much of a request slower tiers have promoted to memory."""

    NOTHING = 0
    """Slower tiers have nothing that would make the request's boundary longer."""
    COMPLETE = 1
    """All that slower tiers have is in memory now, or was there already when the request came."""
    PARTLY = 2
    """Some of it is in memory: the time is over, there is no room, or a record was not what it should be."""
    TOO_SLOW = 3
    """Nothing was promoted: computing the tokens is estimated to be faster."""


class InvalidReason(IntEnum):
    """Why blocks are not to be trusted."""

    ASKED = 0
    LOAD_FAILED = 1
    WRONG_DIGEST = 2


Shards = Annotated[tuple[int, ...], Several(Whole(2**16 - 1), MAX_SHARDS)]
Addresses = Annotated[bytes, Blob("little-endian u64", 8, MAX_BLOCKS)]
Digests = Annotated[bytes, Blob("little-endian u64", 8, MAX_BLOCKS * MAX_SHARDS)]


@dataclass(frozen=True, kw_only=True)
class LeasedSlots:
    """Slots of one group's blocks from position `first` of the chain's blocks on."""

    first: Annotated[U64, "position of the first block in the request, in blocks of the group"]
    addresses: Annotated[Addresses, "one for each block, over all segments as if they lay one behind the other"]
    digests: Annotated[
        Digests,
        AsMany("addresses", or_multiple=True),
        "one digest for each block, shard after shard as asked for; 0: unknown",
    ] = b""


@dataclass(frozen=True, kw_only=True)
class Acquired(Reply):
    """A lease if it is a hit. Its records are in mapped memory and stay until it is released."""

    op = 68
    channels = EXPRESS

    outcome: Annotated[AcquireOutcome, Choice(AcquireOutcome), "whether there is a lease"]
    boundary: Annotated[U64, "the boundary in tokens; `local` if it is no hit; 0 for acquire_entries"] = 0
    lease: Annotated[U64, "number and generation of the lease in one, as `release` names it; 0: none"] = 0
    groups: Annotated[
        tuple[LeasedSlots, ...], Several(Shape(LeasedSlots), MAX_GROUPS), "one for each group; one for acquire_entries"
    ] = ()
    retry_after_ms: Annotated[U32, "records come up from a slower tier: ask again then; 0: do not"] = 0


@dataclass(frozen=True, kw_only=True)
class Acquire(Request):
    """The longest boundary in (local, limit] that all groups accept, and a lease on what a load up to it needs."""

    op = 4
    channels = EXPRESS
    reply = Acquired

    name_space: Annotated[U32, "the namespace's number, from `registered`"]
    chain: Annotated[Chain, "the request's hashes from its first token on"]
    local: Annotated[U64, "tokens that the engine has itself"] = 0
    limit: Annotated[U64, "tokens up to which a load makes sense"] = U64_MAX
    alignment: Annotated[int, Whole(2**32 - 1, minimum=1), "a boundary is a multiple of it, in tokens"] = 1
    shards: Annotated[Shards, "shards whose digests are wanted"] = ()


@dataclass(frozen=True, kw_only=True)
class TierReach:
    """How far a hit reaches with memory and the slower tiers up to one."""

    tier: Annotated[Name, "the tier's kind"]
    boundary: Annotated[U64, "boundary, in tokens; never less than that of the tier before"]


@dataclass(frozen=True, kw_only=True)
class Promoted(Reply):
    """The promoted blocks are held in memory for half a second, so that an acquire finds them."""

    op = 74

    outcome: Annotated[PromotionOutcome, Choice(PromotionOutcome), "how much was promoted"]
    boundary: Annotated[U64, "boundary, in tokens, of memory and slower tiers together; `local` if there is none"]
    reaches: Annotated[
        tuple[TierReach, ...], Several(Shape(TierReach), MAX_TIERS), "the tiers that bring a part, the nearest first"
    ] = ()


@dataclass(frozen=True, kw_only=True)
class Promote(Request):
    """Promote what an acquire of this chain would find if slower tiers were memory, and answer when that is done.

    The answer comes after `wait_ms` at the latest, and the blocks that were promoted by then can be acquired. It comes
    at once if there is nothing to promote, or if promoting is estimated to take longer than computing the tokens.
    """

    op = 12
    capability = "promote"
    reply = Promoted

    name_space: Annotated[U32, "the namespace's number, from `registered`"]
    chain: Annotated[Chain, "the request's hashes from its first token on"]
    local: Annotated[U64, "tokens that the engine has itself"] = 0
    limit: Annotated[U64, "tokens up to which a load makes sense"] = U64_MAX
    alignment: Annotated[int, Whole(2**32 - 1, minimum=1), "a boundary is a multiple of it, in tokens"] = 1
    wait_ms: Annotated[U32, "how long the request waits at most"] = 0
    prefill_ns: Annotated[U64, "time in which the engine computes one token; 0: unknown"] = 0


@dataclass(frozen=True, kw_only=True)
class AcquireEntries(Request):
    """A lease on these blocks of one group, all or none."""

    op = 5
    channels = EXPRESS
    reply = Acquired

    name_space: Annotated[U32, "the namespace's number, from `registered`"]
    group: Annotated[U16, "its number"]
    hashes: Annotated[Chain, "hashes of the blocks"]
    shards: Annotated[Shards, "shards whose digests are wanted"] = ()


@dataclass(frozen=True, kw_only=True)
class CreditsGranted(Reply):
    """Slots to write to, in the order asked for; fewer where there is no room."""

    op = 69
    channels = EXPRESS

    tickets: Annotated[Numbers, "rights to write; 0: this block needs no saving"]
    addresses: Annotated[Numbers, AsMany("tickets"), "where to write"]
    retry_after_ms: Annotated[U32, "when to ask for the rest; 0: unknown"] = 0


@dataclass(frozen=True, kw_only=True)
class Credits(Request):
    """Asks for slots: `count` of them, or with hashes one for each block that is not readable."""

    op = 6
    channels = EXPRESS
    reply = CreditsGranted

    name_space: Annotated[U32, "the namespace's number, from `registered`"]
    group: Annotated[U16, "its number"]
    count: Annotated[int, Whole(MAX_BATCH), "slots; 0 with hashes"] = 0
    hashes: Annotated[Hashes, "hashes of the blocks that the engine wants to save; empty: not known yet"] = b""


@dataclass(frozen=True, kw_only=True)
class Publish(OneWay):
    """Records of one shard, or of several that follow each other, are written. A block is readable when all its shards
    are published.

    `parents` name the block before each, zeros for none; of a window or a state the block of the first prefix group
    that ends at the same token.
    """

    op = 32
    channels = EXPRESS

    name_space: Annotated[U32, "the namespace's number, from `registered`"]
    group: Annotated[U16, "its number"]
    shard: Annotated[U16, "the shard of these records; the first one if there are several"]
    tickets: Annotated[Numbers, "tickets from `credits_granted`"]
    hashes: Annotated[Hashes, AsMany("tickets"), "names of the blocks"]
    parents: Annotated[Hashes, AsMany("tickets", or_none=True), "the blocks before them"] = b""
    digests: Annotated[
        Numbers,
        AsMany("tickets", or_multiple=True),
        "digests of the records, shard after shard; none: the server makes them",
    ] = b""
    tenant: Annotated[
        U16, "the tenant whose quota pays: a place in registered's tenants, from 1 on; others: the session's"
    ] = 0
    more_shards: Annotated[U16, "shards after the first whose records are written, too"] = 0


@dataclass(frozen=True, kw_only=True)
class Abort(OneWay):
    """Gives slots back, written or not. Tickets that are not valid any more are ignored."""

    op = 33
    channels = EXPRESS

    tickets: Annotated[Numbers, "tickets from `credits_granted`"]


@dataclass(frozen=True, kw_only=True)
class Release(OneWay):
    """Ends leases: no copy reads their records any more. Leases that are over are ignored."""

    op = 34
    channels = EXPRESS

    leases: Annotated[bytes, Blob("little-endian u64", 8, MAX_LEASES), "leases from `acquired`"]


@dataclass(frozen=True, kw_only=True)
class Prefetch(OneWay):
    """A request with this chain comes soon: promote what it needs from slower tiers."""

    op = 35
    capability = "prefetch"

    name_space: Annotated[U32, "the namespace's number, from `registered`"]
    chain: Annotated[Chain, "the request's hashes from its first token on"]
    local: Annotated[U64, "tokens that the engine has itself"] = 0
    limit: Annotated[U64, "tokens up to which a load makes sense"] = U64_MAX


@dataclass(frozen=True, kw_only=True)
class Invalidate(OneWay):
    """Forget blocks whose bytes are not to be trusted. Leases on them stay good."""

    op = 36
    channels = EXPRESS

    name_space: Annotated[U32, "the namespace's number, from `registered`"]
    group: Annotated[U16, "its number"]
    hashes: Annotated[Hashes, "hashes of the blocks"]
    reason: Annotated[InvalidReason, Choice(InvalidReason), "the reason, for counters"] = InvalidReason.ASKED
