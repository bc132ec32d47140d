"""How a server ends, and how the next one takes over its memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from kvoffload.protocol.fields import U32, U64, Blob, Choice, Name
from kvoffload.protocol.limits import MAX_SEGMENTS
from kvoffload.protocol.message import Phase, Reply, Request


class AdoptVerdict(IntEnum):
    """Whether a new server wants the memory of an old one."""

    WANTED = 0
    HAS_MEMORY = 1
    """It has taken memory of its own, or the offer of another engine."""
    NOT_USABLE = 2
    """The memory has another domain, format or size."""
    OWNER_LIVES = 3
    """The old server still runs, or is stopped."""


@dataclass(frozen=True, kw_only=True)
class Draining(Reply):
    """How much the server still waits for before it ends."""

    op = 72

    leases: Annotated[U64, "open"]
    reserved: Annotated[U64, "slots that are held ready or being written"]
    sessions: Annotated[U64, "open or quarantined"]


@dataclass(frozen=True, kw_only=True)
class Drain(Request):
    """The server takes nothing new from now on, and ends once nothing is held. For operators; it cannot be undone."""

    op = 9
    needs = Phase.GREETED
    is_for_operators = True
    reply = Draining

    token: Annotated[Name, "the operator's token; empty if the socket's credentials suffice"] = ""
    deadline_ms: Annotated[U32, "the server ends then, even if something is still held; 0: only when nothing is"] = 0


@dataclass(frozen=True, kw_only=True)
class AdoptAnswer(Reply):
    """If wanted, the descriptors follow as offers over the lifeline, all in their old order."""

    op = 73

    verdict: Annotated[AdoptVerdict, Choice(AdoptVerdict), "whether it is wanted"]


@dataclass(frozen=True, kw_only=True)
class Adopt(Request):
    """An engine tells a new server that it holds an old one's memory. Sent between hello and register."""

    op = 10
    needs = Phase.GREETED
    capability = "adopt"
    reply = AdoptAnswer

    former_boot_id: Annotated[U64, "boot id of the server whose memory it is"]
    index_bytes: Annotated[U64, "size of the index's file"]
    segment_sizes: Annotated[bytes, Blob("little-endian u64", 8, MAX_SEGMENTS), "sizes of all segments, in order"]
