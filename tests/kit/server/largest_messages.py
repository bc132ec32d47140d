"""Messages of clients at their largest, in which every list, text and blob is as long as it may be."""

from __future__ import annotations

import numpy as np

from kvoffload.cache import CacheGeometry, CacheGroup, GroupRule
from kvoffload.kvspec import ReuseRule
from kvoffload.packets import MAX_DESCRIPTORS
from kvoffload.protocol import (
    CAPABILITIES,
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
    FormerMemory,
    Greeting,
    Hello,
    Hint,
    HintAction,
    Holding,
    IdentityField,
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
    Query,
    Release,
    Role,
    SetQuota,
    Stats,
    Subscribe,
)
from kvoffload.protocol.hints import ListRetained
from kvoffload.protocol.limits import (
    LINE_BYTES,
    MAX_BATCH,
    MAX_BLOCKS,
    MAX_FORMER,
    MAX_GROUPS,
    MAX_IDENTITY,
    MAX_LEASES,
    MAX_QUERIES,
    MAX_REPORT,
    MAX_TENANTS,
    NAME_BYTES,
)
from kvoffload.protocol.survey import FindBlocks, FindPrefix, FollowBlock, ListJoined, ReadIdentity, ReadReport
from kvoffload.units import MIB
from tests.kit.server.harness import register_of

SHARDS = 16
WIDE = CacheGeometry(
    hash_block_size=16,
    groups=tuple(
        CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=64, shards=SHARDS)
        for _ in range(MAX_GROUPS)
    ),
)
"""As many groups as an identity may have, each with every block of a prompt."""
CHAIN = np.random.default_rng(1).bytes(32 * MAX_BLOCKS)
NAME = "n" * NAME_BYTES
QUERIES = tuple(
    Query(
        asked=2**20,
        promised=2**19,
        missing=np.random.default_rng(number).bytes(32),
        tags=np.random.default_rng(number).bytes(8 * 16_384),
        session=f"{number:0{NAME_BYTES}}",
    )
    for number in range(MAX_QUERIES)
)
IDENTITY = tuple(IdentityField(name=f"{number:0{NAME_BYTES}}", value="v" * 512) for number in range(MAX_IDENTITY))


def largest_messages(name_space: int) -> list[ClientMessage]:
    """Each message of the control channel, at its largest, in an order in which all are served."""
    hints = [
        Hint(name_space=name_space, action=action, chain=CHAIN, session=NAME, priority=1)
        for action in (HintAction.PREFETCH, HintAction.RETAIN, HintAction.HAND_OVER, HintAction.RELEASE)
    ]
    # Without a session a hint means all retained prefixes that end within its chain.
    hints += [
        Hint(name_space=name_space, action=action, chain=CHAIN, priority=1)
        for action in (HintAction.PRIORITISE, HintAction.RELEASE)
    ]
    return [
        Mark(),
        Hello(protocol_min=1, protocol_max=1, capabilities=tuple(sorted(CAPABILITIES)), software=NAME),
        register_of(WIDE, identity=IDENTITY, report=bytes(MAX_REPORT)),
        Stats(),
        Subscribe(),
        ListBlocks(name_space=name_space),
        Explain(queries=QUERIES, saved_bytes=np.ones(MAX_TENANTS + 1, "<u8").tobytes()),
        Inspect(),
        ListAgentSessions(),
        ListJoined(),
        ReadReport(engine="engine"),
        ReadIdentity(place=0, identity="z" * NAME_BYTES, model="m" * LINE_BYTES),
        FindBlocks(),
        FollowBlock(name_space=name_space, block_hash=CHAIN[:32]),
        FindPrefix(name_space=name_space, chain=CHAIN, wait_ms=1000),
        Promote(name_space=name_space, chain=CHAIN, wait_ms=1000),
        Prefetch(name_space=name_space, chain=CHAIN),
        *hints,
        ListRetained(),
        SetQuota(tenant=NAME, quota_bytes=1),
        Clear(),
        Adopt(former_boot_id=1, index_bytes=4096, segment_sizes=bytes(8 * 65_536)),
        Drain(),
        Bye(),
    ]


def messages_of_lifelines(boot_id: int) -> list[ClientMessage]:
    """Each message of a lifeline, at its largest. `boot_id` is that of the server, or of the memory that is offered."""
    memories = tuple(FormerMemory(memory=2**60 + one, size_bytes=2**40 + one) for one in range(MAX_FORMER))
    return [
        Greeting(
            protocol_min=1,
            protocol_max=1,
            engine=NAME,
            role=Role.SCHEDULER,
            software=NAME,
            former_session=1,
            former_boot_id=boot_id,
            wants_express=True,
        ),
        Holding(memories=memories),
        Holding(memories=()),
        Offer(
            former_boot_id=boot_id,
            first=0,
            segment_sizes=np.full(MAX_DESCRIPTORS - 2, MIB, "<u8").tobytes(),
            is_last=True,
        ),
        Farewell(),
    ]


def messages_of_peers() -> list[ClientMessage]:
    register = register_of(WIDE, "of a peer")
    return [
        OpenLink(is_sealed=True),
        Introduce(fingerprint=register.fingerprint, hash_block_size=register.hash_block_size, groups=register.groups),
    ]


def messages_of_channels(name_space: int) -> list[ClientMessage]:
    """Each message of an express channel, at its largest. No session has these tickets and leases."""
    names, nobodys = CHAIN[: 32 * MAX_BATCH], np.arange(1, MAX_BATCH + 1, dtype="<u8").tobytes()
    return [
        Acquire(name_space=name_space, chain=CHAIN),
        AcquireEntries(name_space=name_space, group=0, hashes=CHAIN),
        Credits(name_space=name_space, group=0, count=MAX_BATCH),
        Publish(name_space=name_space, group=0, shard=0, tickets=nobodys, hashes=names, parents=names),
        # All that was published, again and again: an answer has places of every name.
        AcquireEntries(name_space=name_space, group=0, hashes=names * (MAX_BLOCKS // MAX_BATCH)),
        Invalidate(name_space=name_space, group=0, hashes=names),
        Abort(tickets=nobodys),
        Release(leases=nobodys[: 8 * MAX_LEASES]),
    ]
