"""Counts, and what routers and dashboards subscribe to. Block hashes, never tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from kvoffload.protocol.fields import (
    U16,
    U32,
    U64,
    AsMany,
    Choice,
    Digest,
    Hashes,
    Line,
    Name,
    Numbers,
    Several,
    Whole,
)
from kvoffload.protocol.limits import ARRAY_ITEMS, MAX_PLACES, MAX_TENANTS, MAX_TIERS
from kvoffload.protocol.message import Event, Phase, Reply, Request
from kvoffload.protocol.shape import Shape


class Medium(IntEnum):
    """The tier that an event speaks of."""

    MEMORY = 0
    DISK = 1
    REMOTE = 2


@dataclass(frozen=True, kw_only=True)
class TenantCounts:
    """One tenant's part of the pool."""

    name: Annotated[Name, "empty: those without one"]
    quota_bytes: Annotated[U64, "0: no share of its own"]
    used_bytes: Annotated[U64, "now"]


@dataclass(frozen=True, kw_only=True)
class PlaceCounts:
    """One place of a slower tier, for example a disk's folder."""

    tier: Annotated[Name, "its kind"]
    name: Annotated[Line, "name of the place"]
    state: Annotated[Name, "opening, ready, read_only or absent"]
    reason: Annotated[Line, "in one line, why it is not ready, or why it can keep less than its capacity"]
    capacity_bytes: Annotated[U64, "it takes at most"]
    used_bytes: Annotated[U64, "bytes of live records"]
    records: Annotated[U64, "live"]
    coded_records: Annotated[
        U64,
        "records that a code made shorter: written since the server has the tier, or from a peer",
    ] = 0
    coded_bytes: Annotated[U64, "bytes of the coded records as they are in memory"] = 0
    coded_stored_bytes: Annotated[U64, "bytes of the coded records as they were written or came"] = 0


@dataclass(frozen=True, kw_only=True)
class TrafficCounts:
    """Traffic between memory and a slower tier, since the server has it. In blocks unless a field differs."""

    tier: Annotated[Name, "its kind"]
    waiting_bytes: Annotated[U64, "bytes that wait to be written, now"] = 0
    waiting_requests: Annotated[U64, "requests that wait for blocks, now"] = 0
    written: Annotated[U64, "acknowledged by the tier"] = 0
    written_bytes: Annotated[U64, "bytes of the written blocks"] = 0
    dropped_full: Annotated[U64, "not written: the queue was too long"] = 0
    dropped_gone: Annotated[U64, "not written: memory had lost them"] = 0
    failed: Annotated[U64, "not written: the tier did not take them"] = 0
    promoted: Annotated[U64, "brought up"] = 0
    promoted_bytes: Annotated[U64, "bytes of the promoted blocks"] = 0
    missing: Annotated[U64, "asked for, and not there any more"] = 0
    quarantined: Annotated[U64, "records whose bytes were not what they should be"] = 0
    late: Annotated[U64, "requests whose time was over before all had come"] = 0
    too_slow: Annotated[U64, "requests that computing was estimated to serve sooner"] = 0
    without_room: Annotated[U64, "requests that found no room in memory"] = 0


@dataclass(frozen=True, kw_only=True)
class Counts(Reply):
    """Counts at one moment; those from `hits` on since the memory was taken or adopted."""

    op = 70

    capacity_bytes: Annotated[U64, "size of all segments"]
    used_bytes: Annotated[U64, "bytes in slots"]
    readable: Annotated[U64, "entries"]
    reserved: Annotated[U64, "slots that are held ready or being written"]
    quarantined: Annotated[U64, "entries that are not found any more, but leased"]
    leases: Annotated[U64, "open"]
    sessions: Annotated[U64, "open or quarantined"]
    namespaces: Annotated[U64, "registered"]
    index_bytes: Annotated[U64, "memory of the index"]
    hits: Annotated[U64, "acquires with a lease"]
    misses: Annotated[U64, "acquires without a boundary"]
    refused: Annotated[U64, "acquires and credits over a limit"]
    duplicates: Annotated[U64, "published blocks that were there already"]
    evicted: Annotated[U64, "entries"]
    mismatches: Annotated[U64, "records whose bytes were not what their digest says"]
    moved_bytes: Annotated[U64, "bytes moved to close holes"]
    lost_touches: Annotated[U64, "uses that the eviction policy did not hear of"]
    evicted_unused: Annotated[U64, "evicted entries that were never loaded"] = 0
    tenants: Annotated[tuple[TenantCounts, ...], Several(Shape(TenantCounts), MAX_TENANTS), "tenants of the pool"] = ()
    places: Annotated[tuple[PlaceCounts, ...], Several(Shape(PlaceCounts), MAX_PLACES), "places of slower tiers"] = ()
    traffic: Annotated[
        tuple[TrafficCounts, ...], Several(Shape(TrafficCounts), MAX_TIERS), "traffic with each tier"
    ] = ()
    ready_bytes: Annotated[U64, "the part of the capacity that has its memory by now"] = 0
    given_back_bytes: Annotated[U64, "bytes of memory that were given back to the system so far"] = 0
    memory_reason: Annotated[Name, "why less than the capacity is there, as metrics name it; empty: it is not"] = ""


@dataclass(frozen=True, kw_only=True)
class Stats(Request):
    """Asks for counts."""

    op = 7
    needs = Phase.GREETED
    reply = Counts


@dataclass(frozen=True, kw_only=True)
class Subscribed(Reply):
    """Events follow, from number 1 on. Blocks that are stored already are not among them: see `list_blocks`."""

    op = 71


@dataclass(frozen=True, kw_only=True)
class Subscribe(Request):
    """Asks for events on this connection until it ends; once more replaces the earlier subscription."""

    op = 8
    needs = Phase.GREETED
    capability = "events"
    reply = Subscribed

    name_spaces: Annotated[tuple[int, ...], Several(Whole(2**32 - 1), ARRAY_ITEMS), "empty: all of the domain"] = ()


@dataclass(frozen=True, kw_only=True)
class BlocksListed(Reply):
    """Some of the blocks that are readable in memory."""

    op = 87

    next: Annotated[U32, "`first` of the next question; 0: that was all"] = 0
    hashes: Annotated[Hashes, "hashes of the blocks"] = b""
    parents: Annotated[
        Hashes, AsMany("hashes"), "the blocks before them, zeros for none; the own name: it is not there, or not known"
    ] = b""
    groups: Annotated[Numbers, AsMany("hashes"), "group of each block"] = b""


@dataclass(frozen=True, kw_only=True)
class ListBlocks(Request):
    """Asks for the blocks of an identity that are there, some at a time. A client that subscribed before it asks, and
    applies events and answers in the order in which they come, knows in the end which blocks are there: any change
    during the listing comes as an event after the answer, and a block that neither an answer nor an event names is not
    there."""

    op = 27
    needs = Phase.GREETED
    capability = "inventory"
    reply = BlocksListed

    name_space: Annotated[U32, "number of the namespace"]
    first: Annotated[U32, "0, and then `next` of the answer before"] = 0


@dataclass(frozen=True, kw_only=True)
class NamespaceOpened(Event):
    """Comes before the first event of a namespace: what its number stands for."""

    op = 96

    name_space: Annotated[U32, "its number"]
    fingerprint: Annotated[Digest, "fingerprint of the identity"]


@dataclass(frozen=True, kw_only=True)
class Stored(Event):
    """These blocks are readable in this medium."""

    op = 97

    name_space: Annotated[U32, "number of the namespace"]
    medium: Annotated[Medium, Choice(Medium), "where"]
    group: Annotated[U16, "its number"]
    hashes: Annotated[Hashes, "hashes of the blocks"]
    parents: Annotated[Hashes, AsMany("hashes", or_none=True), "the blocks before them, zeros for none"] = b""


@dataclass(frozen=True, kw_only=True)
class Removed(Event):
    """These blocks are not in this medium any more."""

    op = 98

    name_space: Annotated[U32, "number of the namespace"]
    medium: Annotated[Medium, Choice(Medium), "where"]
    group: Annotated[U16, "its number"]
    hashes: Annotated[Hashes, "hashes of the blocks"]


@dataclass(frozen=True, kw_only=True)
class Cleared(Event):
    """Nothing of this namespace is in this medium any more."""

    op = 99

    name_space: Annotated[U32, "number of the namespace"]
    medium: Annotated[Medium, Choice(Medium), "where"]


@dataclass(frozen=True, kw_only=True)
class EventsLost(Event):
    """The subscriber was too slow: events were dropped here. Its picture is not complete any more."""

    op = 100

    count: Annotated[U64, "how many"]
