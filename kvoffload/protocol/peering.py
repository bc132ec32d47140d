"""Messages of another machine's cache server, for which this one is a tier. Records travel on links of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvoffload.protocol.answers import Done
from kvoffload.protocol.fields import U16, Blob, Digest, Flag, Several, Whole
from kvoffload.protocol.limits import MAX_GROUPS
from kvoffload.protocol.message import Phase, Reply, Request
from kvoffload.protocol.opening import GroupTerms
from kvoffload.protocol.shape import Shape

TOKEN_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class LinkOpened(Reply):
    """Links may be opened from here on, until the server ends or eight more sessions were opened."""

    op = 75

    port: Annotated[U16, "where links come in, at the address of this channel"]
    token: Annotated[bytes, Blob("token", TOKEN_BYTES, 1, minimum=1), "names the session on a link"]
    secret: Annotated[Digest, "secret that both sides prove to have; never sent on a link"]


@dataclass(frozen=True, kw_only=True)
class OpenLink(Request):
    """A peer wants to move records."""

    op = 13
    needs = Phase.GREETED
    capability = "peer"
    reply = LinkOpened

    is_sealed: Annotated[Flag, "whether links are encrypted; both sides must say the same"] = True


@dataclass(frozen=True, kw_only=True)
class Introduce(Request):
    """An identity whose records will come on links."""

    op = 14
    needs = Phase.GREETED
    capability = "peer"
    reply = Done

    fingerprint: Annotated[Digest, "fingerprint of the identity"]
    hash_block_size: Annotated[int, Whole(2**32 - 1, minimum=1), "tokens per hash of a chain"]
    groups: Annotated[tuple[GroupTerms, ...], Several(Shape(GroupTerms), MAX_GROUPS), "all groups, by number"]
