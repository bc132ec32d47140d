"""How a process and a server agree on terms over the control channel, and part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from kvoffload.protocol.answers import Done
from kvoffload.protocol.fields import (
    U16,
    U32,
    U64,
    Blob,
    Choice,
    Digest,
    Name,
    Names,
    OptionalDigest,
    Several,
    Text,
    Whole,
)
from kvoffload.protocol.limits import LINE_BYTES, MAX_GROUPS, MAX_IDENTITY, MAX_REPORT, MAX_TENANTS, NAME_BYTES
from kvoffload.protocol.message import CONTROL, EXPRESS, Phase, Reply, Request
from kvoffload.protocol.shape import Shape
from kvoffload.types import ReuseRule

ReportText = Blob("lines of UTF-8, bytes", 1, MAX_REPORT)


@dataclass(frozen=True, kw_only=True)
class GroupTerms:
    """One group of an identity."""

    record_bytes: Annotated[U64, "bytes of one block on one rank"]
    block_size: Annotated[int, Whole(2**32 - 1, minimum=1), "tokens of a block"]
    reuse: Annotated[ReuseRule, Choice(ReuseRule), "rule of reuse"]
    window: Annotated[U32, "tokens that a boundary needs behind it, for WINDOW and CHUNK"] = 0
    shards: Annotated[int, Whole(2**16 - 1, minimum=1), "parts of a block, each with a digest of its own"] = 1


@dataclass(frozen=True, kw_only=True)
class IdentityField:
    """One part of an identity, so that a refusal can name it."""

    name: Annotated[str, Text(NAME_BYTES), "dotted"]
    value: Annotated[str, Text(LINE_BYTES), "value as shown to people; a digest if it is long or secret"]


def find_model(identity: Iterable[IdentityField]) -> str:
    """Returns the name of the model that an identity has among its parts, or "" if it has none."""
    return next((part.value for part in identity if part.name == "model"), "")


@dataclass(frozen=True, kw_only=True)
class HelloAccepted(Reply):
    """The version and capabilities that both sides use from here on."""

    op = 66

    protocol: Annotated[U16, "the highest version that both have"]
    capabilities: Annotated[Names, "those that both have, sorted"]
    domain: Annotated[Name, "trust domain of this server's memory"]
    software: Annotated[Name, "name of the software, for logs"] = ""


@dataclass(frozen=True, kw_only=True)
class Hello(Request):
    """The first message of a control connection, again after every reconnect."""

    op = 1
    needs = Phase.NEW
    reply = HelloAccepted

    protocol_min: Annotated[U16, "oldest version that the client has"]
    protocol_max: Annotated[U16, "newest version that the client has"]
    capabilities: Annotated[Names, "capabilities that the client would use"] = ()
    domain: Annotated[Name, "trust domain that the client expects; empty: any"] = ""
    software: Annotated[Name, "name of the software, for logs"] = ""


@dataclass(frozen=True, kw_only=True)
class Registered(Reply):
    """Blocks of this identity may be named from here on."""

    op = 67

    name_space: Annotated[
        U32, "stands for the fingerprint as long as the session is there, and for no other while the boot id stays"
    ]
    held_limit_bytes: Annotated[U64, "most bytes that the session may hold in leases and reservations"] = 2**64 - 1
    resume: Annotated[
        U64, "value of a later greeting's `former_session`, here or at a successor; 0: session's number"
    ] = 0
    tenants: Annotated[
        tuple[str, ...], Several(Text(NAME_BYTES), MAX_TENANTS), "tenants whose quotas a publish may charge"
    ] = ()


@dataclass(frozen=True, kw_only=True)
class Register(Request):
    """Once per process, and again for every new boot id. All processes of a session must say the same but for `rank`.

    Only digests of seed and salt leave a process, because seed and salt may be the secrets that keep tenants apart.
    """

    op = 2
    needs = Phase.GREETED
    reply = Registered

    fingerprint: Annotated[Digest, "fingerprint of the identity"]
    hash_algorithm: Annotated[Name, "algorithm of the blocks' hashes"]
    hash_seed: Annotated[OptionalDigest, "digest of its seed; empty: it has none"]
    hash_block_size: Annotated[int, Whole(2**32 - 1, minimum=1), "tokens per hash of a chain"]
    groups: Annotated[tuple[GroupTerms, ...], Several(Shape(GroupTerms), MAX_GROUPS), "all groups, by number"]
    rank: Annotated[U16, "rank of this process"] = 0
    ranks: Annotated[int, Whole(2**16 - 1, minimum=1), "how many the engine has"] = 1
    tenant: Annotated[Name, "the tenant whose quota pays; empty: none"] = ""
    identity: Annotated[
        tuple[IdentityField, ...],
        Several(Shape(IdentityField), MAX_IDENTITY),
        "parts of the fingerprint, for the text of a refusal; may be left out",
    ] = ()
    report: Annotated[bytes, ReportText, "report of this process's registration, for operators; may be left out"] = b""


@dataclass(frozen=True, kw_only=True)
class Mark(Request):
    """Answered when everything that came before it on its channel was served."""

    op = 11
    channels = CONTROL + EXPRESS
    needs = Phase.GREETED
    reply = Done


@dataclass(frozen=True, kw_only=True)
class Bye(Request):
    """The last message of a control connection. The session keeps its leases and reservations until its processes
    end."""

    op = 3
    needs = Phase.NEW
    reply = Done

    one_way_count: Annotated[U64, "one-way messages sent on this connection: the server sees whether all arrived"] = 0
