"""Operators ask who is joined, which identities there are, and for single blocks. No prompt's tokens are sent."""

from __future__ import annotations

from dataclasses import dataclass
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
    Digest,
    Flag,
    Hashes,
    Name,
    Names,
    Numbers,
    OptionalDigest,
    Several,
    Text,
    Whole,
)
from kvoffload.protocol.lifeline import Role
from kvoffload.protocol.limits import ARRAY_ITEMS, LINE_BYTES, MAX_GROUPS, MAX_IDENTITY, MAX_TIERS
from kvoffload.protocol.message import Phase, Reply, Request
from kvoffload.protocol.opening import GroupTerms, IdentityField, ReportText
from kvoffload.protocol.shape import Shape
from kvoffload.types import HASH_BYTES

UNKNOWN_S = 2**64 - 1
NOT_ASKED = 2**64 - 1

_Token = Annotated[Name, "the operator's token; empty if the socket's credentials suffice"]


@dataclass(frozen=True, kw_only=True)
class JoinedProcess:
    """One process of an engine, or one observer."""

    engine: Annotated[Name, "its name; of who comes over TCP what settings call its key, as a peer's address"]
    role: Annotated[Role, Choice(Role), "role of the process"]
    rank: Annotated[U16, "rank of the process"]
    pid: Annotated[U32, "0: not of this machine"]
    uid: Annotated[U32, "the process's user; 2^32 - 1: not of this machine"]
    is_open: Annotated[Flag, "false: its session waits for processes to exit"] = True
    fingerprint: Annotated[Name, "the first letters of its identity's; empty: it has none"] = ""
    tenant: Annotated[Name, "the tenant whose quota pays"] = ""
    held_bytes: Annotated[U64, "bytes that its session has in leases and reservations"] = 0
    has_report: Annotated[Flag, "whether the report of its rank's registration can be read"] = False


@dataclass(frozen=True, kw_only=True)
class Joined(Reply):
    """Processes of the domain, in the order in which their sessions came."""

    op = 79

    total: Annotated[U32, "number of all processes"]
    processes: Annotated[
        tuple[JoinedProcess, ...], Several(Shape(JoinedProcess), ARRAY_ITEMS), "a part of these processes"
    ]


@dataclass(frozen=True, kw_only=True)
class ListJoined(Request):
    """Asks for the processes that have joined. For operators."""

    op = 19
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = Joined

    first: Annotated[U32, "number of the first process wanted, counted from 0"] = 0
    token: _Token = ""


@dataclass(frozen=True, kw_only=True)
class ReportRead(Reply):
    """The report that a worker made when it registered its engine's tensors."""

    op = 80

    report: Annotated[bytes, ReportText, "lines of UTF-8; empty: there is none"]


@dataclass(frozen=True, kw_only=True)
class ReadReport(Request):
    """Asks for the report of one worker of a joined engine. For operators."""

    op = 20
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = ReportRead

    engine: Annotated[Name, "its name"]
    rank: Annotated[U16, "rank of the worker"] = 0
    token: _Token = ""


@dataclass(frozen=True, kw_only=True)
class IdentityRead(Reply):
    """One identity, as far as this server knows it. Little is known of an identity that came only with a tier's
    records."""

    op = 81

    total: Annotated[U32, "number of all identities"]
    name_space: Annotated[U32, "its number, for as long as it is known and the boot id stays"] = 0
    fingerprint: Annotated[OptionalDigest, "fingerprint of the identity; empty: there are not so many"] = b""
    used_bytes: Annotated[U64, "bytes of memory that its blocks take"] = 0
    hash_algorithm: Annotated[Name, "algorithm of its blocks' hashes; empty: not known"] = ""
    hash_block_size: Annotated[U32, "tokens per hash of a chain; 0: not known"] = 0
    ranks: Annotated[U16, "number of ranks of its engines; 0: not known"] = 0
    groups: Annotated[tuple[GroupTerms, ...], Several(Shape(GroupTerms), MAX_GROUPS), "its groups, by number"] = ()
    identity: Annotated[
        tuple[IdentityField, ...], Several(Shape(IdentityField), MAX_IDENTITY), "parts of the fingerprint"
    ] = ()
    hash_seed: Annotated[
        OptionalDigest, "digest of the seed of its blocks' names; empty: it has none, or not known"
    ] = b""
    place: Annotated[U32, "its place in the list; without one, the last place that was looked at"] = 0


@dataclass(frozen=True, kw_only=True)
class ReadIdentity(Request):
    """Asks for an identity of the domain by its place in their list, or for the next one that has these properties.
    Only some places are looked at; the next question begins behind them. For operators."""

    op = 21
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = IdentityRead

    place: Annotated[U32, "counted from 0, the one that came first first"]
    token: _Token = ""
    identity: Annotated[Name, "first hexadecimal digits of its fingerprint; empty: any"] = ""
    model: Annotated[str, Text(LINE_BYTES), "value of the part of it that is named model; empty: any"] = ""


@dataclass(frozen=True, kw_only=True)
class BlocksFound(Reply):
    """Blocks that were in memory at some moment of the search."""

    op = 82

    total: Annotated[U64, "number of all such blocks; the answer may have fewer"]
    hashes: Annotated[Hashes, "hashes of blocks that can be read"]
    name_spaces: Annotated[Numbers, AsMany("hashes"), "namespace of each block"]
    groups: Annotated[Numbers, AsMany("hashes"), "group of each block"]
    seconds: Annotated[Numbers, AsMany("hashes"), "age of each block; 2^64 - 1: stored by a server before this one"]
    leases: Annotated[Numbers, AsMany("hashes"), "leases on each block"]
    used: Annotated[Numbers, AsMany("hashes"), "1: it was loaded since"]


@dataclass(frozen=True, kw_only=True)
class FindBlocks(Request):
    """Asks for blocks by the beginning of their hashes. For operators."""

    op = 22
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = BlocksFound

    prefix: Annotated[bytes, Blob("bytes", 1, HASH_BYTES), "first bytes of the hashes; empty: all"] = b""
    count: Annotated[U32, "most blocks in the answer; 0: as many as fit"] = 0
    token: _Token = ""


@dataclass(frozen=True, kw_only=True)
class BlockPlaces(Reply):
    """Where one block is, and what became of it in memory. Each array has one item for each group."""

    op = 83

    in_memory: Annotated[bytes, Blob("bytes", 1, MAX_GROUPS), "1: it can be read there"]
    seconds: Annotated[Numbers, AsMany("in_memory"), "age in memory; 2^64 - 1: not known"]
    left: Annotated[bytes, Blob("bytes", 1, MAX_GROUPS), AsMany("in_memory"), "1 evicted, 2 untrusted, 3 cleared; or 0"]
    left_seconds: Annotated[Numbers, AsMany("in_memory"), "time since it left memory"]
    missing_bytes: Annotated[Numbers, AsMany("in_memory"), "more memory that would have kept it, about"]
    tiers: Annotated[Names, "slower tiers, by their kinds"] = ()
    in_tiers: Annotated[
        bytes, Blob("bytes", 1, MAX_GROUPS * MAX_TIERS), "1: the tier has it; tier after tier, all groups of each"
    ] = b""


@dataclass(frozen=True, kw_only=True)
class FollowBlock(Request):
    """Asks where a block is. The server asks slower tiers too; a tier that does not answer in time counts as one
    without the block. For operators."""

    op = 23
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = BlockPlaces

    name_space: Annotated[U32, "number of the namespace"]
    block_hash: Annotated[Digest, "its name"]
    wait_ms: Annotated[U32, "longest wait for the answers of tiers"] = 1000
    token: _Token = ""


@dataclass(frozen=True, kw_only=True)
class PrefixFound(Reply):
    """How many tokens of a prompt a load could bring, as an acquire counts them: up to a boundary that all groups
    accept."""

    op = 84

    in_memory: Annotated[U64, "tokens from memory alone"]
    tiers: Annotated[Names, "slower tiers, by their kinds, the nearest first"] = ()
    reaches: Annotated[
        Numbers, "tokens with memory and the tiers up to each one, never falling; 2^64 - 1: the tier was not asked"
    ] = b""


@dataclass(frozen=True, kw_only=True)
class FindPrefix(Request):
    """Asks how much of a prompt is there. The question does not count as a use: no block is kept longer for it, and it
    changes no count. For operators."""

    op = 24
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = PrefixFound

    name_space: Annotated[U32, "number of the namespace"]
    chain: Annotated[Chain, "the prompt's hashes from its first token on"]
    limit: Annotated[U64, "tokens up to which a load makes sense"] = U64_MAX
    alignment: Annotated[int, Whole(2**32 - 1, minimum=1), "a boundary is a multiple of it, in tokens"] = 1
    wait_ms: Annotated[U32, "longest wait for tiers that have to be asked; 0: they are not asked"] = 0
    token: _Token = ""
