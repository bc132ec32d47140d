"""What operators look into: who is joined, which identities there are, single blocks. Names of blocks, never tokens."""

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
    Whole,
)
from kvoffload.protocol.lifeline import Role
from kvoffload.protocol.limits import ARRAY_ITEMS, MAX_GROUPS, MAX_IDENTITY, MAX_TIERS
from kvoffload.protocol.message import Phase, Reply, Request
from kvoffload.protocol.opening import GroupTerms, IdentityField, ReportText
from kvoffload.protocol.shape import Shape
from kvoffload.types import HASH_BYTES

UNKNOWN_S = 2**64 - 1
NOT_ASKED = 2**64 - 1

_Token = Annotated[Name, "of the operator; empty where the socket's credentials suffice"]


@dataclass(frozen=True, kw_only=True)
class JoinedProcess:
    """One process of an engine, or one observer."""

    engine: Annotated[Name, "its name; of who comes over TCP what settings call its key, as a peer's address"]
    role: Annotated[Role, Choice(Role), "of the process"]
    rank: Annotated[U16, "of the process"]
    pid: Annotated[U32, "0: not of this machine"]
    uid: Annotated[U32, "of its user; 2^32 - 1: not of this machine"]
    is_open: Annotated[Flag, "false: its session waits for processes to exit"] = True
    fingerprint: Annotated[Name, "the first letters of its identity's; empty: it has none"] = ""
    tenant: Annotated[Name, "whose quota pays"] = ""
    held_bytes: Annotated[U64, "what its session has in leases and reservations"] = 0
    has_report: Annotated[Flag, "what its rank registered can be read"] = False


@dataclass(frozen=True, kw_only=True)
class Joined(Reply):
    """Processes of the domain, in the order in which their sessions came."""

    op = 79

    total: Annotated[U32, "that there are"]
    processes: Annotated[tuple[JoinedProcess, ...], Several(Shape(JoinedProcess), ARRAY_ITEMS), "of them"]


@dataclass(frozen=True, kw_only=True)
class ListJoined(Request):
    """Who is joined. For operators."""

    op = 19
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = Joined

    first: Annotated[U32, "of those that are wanted, counted from 0"] = 0
    token: _Token = ""


@dataclass(frozen=True, kw_only=True)
class ReportRead(Reply):
    """What a worker found when it registered its engine's tensors."""

    op = 80

    report: Annotated[bytes, ReportText, "lines of UTF-8; empty: there is none"]


@dataclass(frozen=True, kw_only=True)
class ReadReport(Request):
    """Of an engine that is joined. For operators."""

    op = 20
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = ReportRead

    engine: Annotated[Name, "its name"]
    rank: Annotated[U16, "of the worker"] = 0
    token: _Token = ""


@dataclass(frozen=True, kw_only=True)
class IdentityRead(Reply):
    """One identity, as far as it was told to this server: of one that came with a tier's records, little is known."""

    op = 81

    total: Annotated[U32, "that there are"]
    name_space: Annotated[U32, "its number, for as long as it is known and the boot id stays"] = 0
    fingerprint: Annotated[OptionalDigest, "of the identity; empty: there are not so many"] = b""
    used_bytes: Annotated[U64, "what its blocks take of the memory"] = 0
    hash_algorithm: Annotated[Name, "that names its blocks; empty: not known"] = ""
    hash_block_size: Annotated[U32, "tokens per hash of a chain; 0: not known"] = 0
    ranks: Annotated[U16, "of its engines; 0: not known"] = 0
    groups: Annotated[tuple[GroupTerms, ...], Several(Shape(GroupTerms), MAX_GROUPS), "in their order"] = ()
    identity: Annotated[
        tuple[IdentityField, ...], Several(Shape(IdentityField), MAX_IDENTITY), "what the fingerprint is made of"
    ] = ()
    hash_seed: Annotated[
        OptionalDigest, "digest of the seed of its blocks' names; empty: it has none, or not known"
    ] = b""


@dataclass(frozen=True, kw_only=True)
class ReadIdentity(Request):
    """Of the identities of the domain. For operators."""

    op = 21
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = IdentityRead

    place: Annotated[U32, "counted from 0, the one that came first first"]
    token: _Token = ""


@dataclass(frozen=True, kw_only=True)
class BlocksFound(Reply):
    """In memory at some moment while they were looked for."""

    op = 82

    total: Annotated[U64, "that there are; those that are told may be fewer"]
    hashes: Annotated[Hashes, "of blocks that can be read"]
    name_spaces: Annotated[Numbers, AsMany("hashes"), "whose"]
    groups: Annotated[Numbers, AsMany("hashes"), "of each"]
    seconds: Annotated[Numbers, AsMany("hashes"), "since it was stored; 2^64 - 1: by a server before this one"]
    leases: Annotated[Numbers, AsMany("hashes"), "on it"]
    used: Annotated[Numbers, AsMany("hashes"), "1: it was loaded since"]


@dataclass(frozen=True, kw_only=True)
class FindBlocks(Request):
    """Blocks by the beginning of their names. For operators."""

    op = 22
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = BlocksFound

    prefix: Annotated[bytes, Blob("bytes", 1, HASH_BYTES), "what their hashes begin with; empty: all"] = b""
    count: Annotated[U32, "of those that are told, at most; 0: as many as fit"] = 0
    token: _Token = ""


@dataclass(frozen=True, kw_only=True)
class BlockPlaces(Reply):
    """Of one block: where it is, and what became of it in memory. One item for each group."""

    op = 83

    in_memory: Annotated[bytes, Blob("bytes", 1, MAX_GROUPS), "1: it can be read there"]
    seconds: Annotated[Numbers, AsMany("in_memory"), "since it was stored there; 2^64 - 1: not known"]
    left: Annotated[bytes, Blob("bytes", 1, MAX_GROUPS), AsMany("in_memory"), "1 evicted, 2 untrusted, 3 cleared; or 0"]
    left_seconds: Annotated[Numbers, AsMany("in_memory"), "since it left memory"]
    missing_bytes: Annotated[Numbers, AsMany("in_memory"), "more memory that would have kept it, about"]
    tiers: Annotated[Names, "slower tiers, by their kinds"] = ()
    in_tiers: Annotated[
        bytes, Blob("bytes", 1, MAX_GROUPS * MAX_TIERS), "1: the tier has it; tier after tier, all groups of each"
    ] = b""


@dataclass(frozen=True, kw_only=True)
class FollowBlock(Request):
    """Where a block is. Slower tiers are asked, and what they do not answer in time counts as absent. For
    operators."""

    op = 23
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = BlockPlaces

    name_space: Annotated[U32, "whose"]
    block_hash: Annotated[Digest, "its name"]
    wait_ms: Annotated[U32, "for what tiers say, at most"] = 1000
    token: _Token = ""


@dataclass(frozen=True, kw_only=True)
class PrefixFound(Reply):
    """How many tokens of a prompt a load could bring, as an acquire counts them: up to a boundary that all groups
    accept."""

    op = 84

    in_memory: Annotated[U64, "from memory alone"]
    tiers: Annotated[Names, "slower tiers, by their kinds, the nearest first"] = ()
    reaches: Annotated[
        Numbers, "with memory and the tiers up to each one, which never becomes less; 2^64 - 1: it was not asked"
    ] = b""


@dataclass(frozen=True, kw_only=True)
class FindPrefix(Request):
    """How much of a prompt is there. A question is no use: no block is kept longer for it, and nothing is counted. For
    operators."""

    op = 24
    needs = Phase.GREETED
    capability = "operate"
    is_for_operators = True
    reply = PrefixFound

    name_space: Annotated[U32, "whose"]
    chain: Annotated[Chain, "the prompt's hashes from its first token on"]
    limit: Annotated[U64, "tokens up to which a load makes sense"] = U64_MAX
    alignment: Annotated[int, Whole(2**32 - 1, minimum=1), "a boundary is a multiple of it, in tokens"] = 1
    wait_ms: Annotated[U32, "for tiers that have to be asked, at most; 0: they are not asked"] = 0
    token: _Token = ""
