"""Messages of the lifeline: one Unix SOCK_SEQPACKET connection per process. Descriptors go with them as SCM_RIGHTS.

The first message is a greeting, its answer a welcome or an error. The connection's end is the process's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from kvoffload.protocol.faults import ErrorCode
from kvoffload.protocol.fields import U16, U32, U64, Blob, Choice, Flag, Line, Name, Several, Text, Whole
from kvoffload.protocol.limits import LINE_BYTES, MAX_FORMER, MAX_PACKET_SEGMENTS, MAX_SEGMENTS
from kvoffload.protocol.message import LIFELINE, Event, OneWay, Phase, Reply, Request
from kvoffload.protocol.shape import Shape


class Role(IntEnum):
    """The part that a process plays in its engine."""

    SCHEDULER = 0
    WORKER = 1
    OBSERVER = 2
    """No engine: counts, events, administration. It gets no memory."""


class ClosingReason(IntEnum):
    """Why a server or a process ends."""

    ENDED = 0
    DRAINED = 1
    REPLACED = 2
    """A successor comes and adopts: keep the memory, reconnect."""
    FAULT = 3


SegmentSizes = Annotated[bytes, Blob("little-endian u64", 8, MAX_PACKET_SEGMENTS)]


@dataclass(frozen=True, kw_only=True)
class Welcome(Reply):
    """The process belongs to a session from here on."""

    op = 112
    channels = LIFELINE
    descriptors = "pidfd of the server"

    protocol: Annotated[U16, "the highest version that both have"]
    session: Annotated[int, Whole(2**64 - 1, minimum=1), "the session's number, which every message names"]
    domain: Annotated[Name, "trust domain of this server's memory"]
    control: Annotated[str, Text(LINE_BYTES), "ZeroMQ endpoint of the control channel"]
    pid: Annotated[U32, "the server's own; 0: not told"] = 0
    uid: Annotated[U32, "the server's own; compare it with the socket's credentials"] = 0
    seen_pid: Annotated[U32, "the client's as the kernel reports it; another than its own: other pid namespaces"] = 0
    seen_uid: Annotated[U32, "the client's user as the kernel reports it"] = 0
    is_reopened: Annotated[Flag, "the former session goes on with all it held"] = False
    software: Annotated[Name, "name of the software, for logs"] = ""


@dataclass(frozen=True, kw_only=True)
class Greeting(Request):
    """The first message of a lifeline. Processes with the same engine name join one session."""

    op = 48
    needs = Phase.NEW
    channels = LIFELINE
    reply = Welcome
    descriptors = "pidfd of the sender"

    protocol_min: Annotated[U16, "oldest version that the client has"]
    protocol_max: Annotated[U16, "newest version that the client has"]
    engine: Annotated[Name, "the same in all processes of one engine, in no other engine"]
    role: Annotated[Role, Choice(Role), "role of this process"]
    rank: Annotated[U16, "rank of a worker"] = 0
    pid: Annotated[U32, "the process's number in its own pid namespace"] = 0
    uid: Annotated[U32, "the user in the process's own namespace; the server trusts the socket's credentials alone"] = 0
    domain: Annotated[Name, "trust domain that the client expects; empty: any"] = ""
    former_session: Annotated[U64, "session to reopen; 0: none"] = 0
    former_boot_id: Annotated[
        U64, "boot id of the session's server; if it is another than the present one, see adopt"
    ] = 0
    software: Annotated[Name, "name of the software, for logs"] = ""
    wants_express: Annotated[Flag, "an express channel, without which it has no blocks"] = False
    wants_warnings: Annotated[Flag, "whether the process wants the warnings of the server's log"] = False
    heeds_shrinking: Annotated[Flag, "whether the process marks segments that a driver has pinned; else all stay"] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class Offer(OneWay):
    """Memory of an old server, after adopt_answer said that it is wanted; in several packets if need be."""

    op = 49
    channels = LIFELINE
    needs = Phase.NEW
    descriptors = "lock, index (both with `first` 0 only), segments"

    former_boot_id: Annotated[U64, "boot id of the server whose memory it is"]
    first: Annotated[int, Whole(MAX_SEGMENTS), "number of the first segment in this packet"]
    segment_sizes: Annotated[SegmentSizes, "sizes of the segments in this packet"]
    is_last: Annotated[Flag, "no packet follows"]


@dataclass(frozen=True, kw_only=True)
class FormerMemory:
    """Memory of a former server, as far as a process has it mapped."""

    memory: Annotated[U64, "inode of its index's file: the same in all processes that have it"]
    size_bytes: Annotated[U64, "bytes of it that have their pages"]


@dataclass(frozen=True, kw_only=True)
class Holding(OneWay):
    """All memory of former servers that the process has mapped. Before this server has sent its own memory, that is all
    memory that the process has.

    It is sent when `hello` is accepted, when the process has joined, and after each change.
    """

    op = 51
    channels = LIFELINE
    needs = Phase.NEW
    capability = "former"

    memories: Annotated[
        tuple[FormerMemory, ...], Several(Shape(FormerMemory), MAX_FORMER), "each once; none: the last has been let go"
    ]


@dataclass(frozen=True, kw_only=True)
class Farewell(OneWay):
    """The process ends, or wants no cache any more: none of its copies runs, none will start."""

    op = 50
    channels = LIFELINE
    needs = Phase.NEW

    reason: Annotated[ClosingReason, Choice(ClosingReason), "the reason, for logs"] = ClosingReason.ENDED


@dataclass(frozen=True, kw_only=True)
class Memory(Event):
    """The memory of the domain, after welcome; in several packets if need be. It lives as long as any process holds it.

    Map the segments in their order: addresses count over all of them.
    """

    op = 113
    channels = LIFELINE
    descriptors = "lock, index (both with `first` 0 only), segments"

    index_bytes: Annotated[U64, "size of the index's file"]
    segments: Annotated[int, Whole(MAX_SEGMENTS), "how many there are in all packets"]
    first: Annotated[int, Whole(MAX_SEGMENTS), "number of the first segment in this packet"]
    segment_sizes: Annotated[SegmentSizes, "sizes of the segments in this packet"]
    adopted_boot_id: Annotated[U64, "it is the memory of this old server: what is mapped stays; 0: it is new"] = 0


@dataclass(frozen=True, kw_only=True)
class Growth(Event):
    """More segments, behind the others."""

    op = 114
    channels = LIFELINE
    descriptors = "segments"

    first: Annotated[int, Whole(MAX_SEGMENTS), "number of the first new one"]
    segment_sizes: Annotated[SegmentSizes, "sizes of the new segments"]


@dataclass(frozen=True, kw_only=True)
class Express(Event):
    """The channel of blocks, with the session's rights, once the session is registered.

    A byte stream of frames like those of the control channel, each behind its length in 4 bytes, little-endian, with
    a count of one-way messages of its own. Between the two channels there is no order. Where none can be opened, an
    `error` comes on the lifeline in its place.
    """

    op = 117
    channels = LIFELINE
    descriptors = "stream socket"


@dataclass(frozen=True, kw_only=True)
class Quarantine(Event):
    """The session gets nothing new and keeps what it holds. A greeting with `former_session` reopens it."""

    op = 115
    channels = LIFELINE

    code: Annotated[ErrorCode, Choice(ErrorCode), "why"]
    message: Annotated[Line, "one line for people"]


@dataclass(frozen=True, kw_only=True)
class Retire(Event):
    """Former memory in which the engine's scheduler holds nothing: this process may unmap it. The event goes only to
    processes that have sent `holding`.
    """

    op = 118
    channels = LIFELINE

    memories: Annotated[bytes, Blob("little-endian u64", 8, MAX_FORMER), "memories as `holding` names them"]


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """A warning of the server's log, for processes that have greeted with `wants_warnings`. The last warnings before
    the greeting come too, and come again when a process greets again. A server of several domains sends warnings to its
    operators' processes only.
    """

    op = 119
    channels = LIFELINE

    number: Annotated[U64, "number of the warning on this server, from 1; some may be left out"]
    message: Annotated[Line, "one line for people"]


@dataclass(frozen=True, kw_only=True)
class Closing(Event):
    """The server ends. Mapped memory stays good for as long as it is mapped."""

    op = 116
    channels = LIFELINE

    reason: Annotated[ClosingReason, Choice(ClosingReason), "why"]
    retry_after_ms: Annotated[U32, "when a successor may be there; 0: none is awaited"] = 0
