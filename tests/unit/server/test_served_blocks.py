"""Operations on blocks, as an engine sees them: save, hit, and everything that is not served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvoffload.cache import CacheSettings
from kvoffload.protocol import (
    Abort,
    Acquire,
    AcquireEntries,
    Credits,
    Error,
    ErrorCode,
    Invalidate,
    Prefetch,
    Publish,
    Registered,
    Release,
    Stats,
)
from kvoffload.server import DomainSettings, TenantSettings
from kvoffload.types import AcquireOutcome
from tests.kit.cache.cache_model import (
    HYBRID,
    KIB,
    MIB,
    PLAIN,
    block_hashes,
    has_pattern,
    make_chain,
)
from tests.kit.server.chains import save_chain
from tests.kit.server.harness import Client, Server, numbers, register_of

NO_ADDRESS = 2**64 - 1


def test_what_one_engine_saves_another_one_hits(server: Server, engine: Client) -> None:
    chain = make_chain(1, 8)
    save_chain(server.cache, engine, chain)
    other = server.process("other").join()
    found = other.ask(Acquire(name_space=other.name_space, chain=chain, shards=(0, 1)))
    assert (found.outcome, found.boundary) == (AcquireOutcome.HIT, 128)
    for group, slots in enumerate(found.groups):
        names = block_hashes(chain, HYBRID, group)[slots.first :]
        addresses = numbers(slots.addresses)
        assert len(slots.digests) == 2 * len(slots.addresses)
        for name, address in zip(names, addresses, strict=True):
            assert has_pattern(server.cache, HYBRID, (other.name_space, group), name, int(address))
    assert server.cache.stats.leases == 1
    assert other.tell(Release(leases=found.lease.to_bytes(8, "little"))) is None
    assert server.cache.stats.leases == 0


def test_a_miss_is_a_value(engine: Client) -> None:
    found = engine.ask(Acquire(name_space=engine.name_space, chain=make_chain(1, 8), local=16))
    assert (found.outcome, found.boundary, found.lease, found.groups) == (AcquireOutcome.MISS, 16, 0, ())


def test_entries_of_one_group_are_leased_all_or_none(server: Server, engine: Client) -> None:
    chain = make_chain(1, 4)
    save_chain(server.cache, engine, chain)
    found = engine.ask(AcquireEntries(name_space=engine.name_space, group=0, hashes=chain, shards=(1, 0)))
    assert found.outcome is AcquireOutcome.HIT
    (slots,) = found.groups
    assert (len(slots.addresses), len(slots.digests), slots.first) == (4 * 8, 8 * 8, 0)
    absent = engine.ask(AcquireEntries(name_space=engine.name_space, group=0, hashes=chain + bytes(32)))
    assert (absent.outcome, absent.lease) == (AcquireOutcome.MISS, 0)
    assert server.cache.stats.leases == 1


def test_digests_are_those_of_each_shard(server: Server, engine: Client) -> None:
    chain = make_chain(1, 4)
    save_chain(server.cache, engine, chain)
    ask = {"name_space": engine.name_space, "group": 0, "hashes": chain}
    one_by_one = [engine.ask(AcquireEntries(shards=(shard,), **ask)).groups[0].digests for shard in (0, 1)]
    assert one_by_one[0] != one_by_one[1]
    assert numbers(b"".join(one_by_one)).all()
    assert engine.ask(AcquireEntries(shards=(0, 1), **ask)).groups[0].digests == b"".join(one_by_one)
    assert engine.ask(AcquireEntries(**ask)).groups[0].digests == b""


def test_credits_are_fewer_where_there_is_no_room(engine: Client) -> None:
    granted = engine.ask(Credits(name_space=engine.name_space, group=2, count=1000))
    assert 0 < len(granted.tickets) < 1000 * 8
    assert len(engine.ask(Credits(name_space=engine.name_space, group=2, count=1)).tickets) == 0


def test_blocks_that_are_there_need_no_credit(server: Server, engine: Client) -> None:
    chain = make_chain(1, 4)
    save_chain(server.cache, engine, chain)
    longer = make_chain(1, 6)
    granted = engine.ask(Credits(name_space=engine.name_space, group=0, hashes=longer))
    tickets, addresses = numbers(granted.tickets), numbers(granted.addresses)
    assert [bool(ticket) for ticket in tickets] == [False] * 4 + [True] * 2
    assert list(addresses[:4]) == [NO_ADDRESS] * 4


def test_a_session_holds_no_more_than_its_limit() -> None:
    with Server(domains=[DomainSettings(name="main", held_limit_bytes=10 * 4096)]) as server:
        engine = server.process().join(PLAIN)
        save_chain(server.cache, engine, make_chain(1, 8), PLAIN)
        assert len(engine.ask(Credits(name_space=engine.name_space, group=0, count=20)).tickets) == 10 * 8
        found = engine.ask(Acquire(name_space=engine.name_space, chain=make_chain(1, 8)))
        assert (found.outcome, found.lease) == (AcquireOutcome.OVER_LIMIT, 0)


def test_an_aborted_ticket_is_void(server: Server, engine: Client) -> None:
    granted = engine.ask(Credits(name_space=engine.name_space, group=1, count=2))
    assert engine.tell(Abort(tickets=granted.tickets)) is None
    assert server.cache.stats.reserved == 0
    late = Publish(name_space=engine.name_space, group=1, shard=0, tickets=granted.tickets, hashes=make_chain(1, 2))
    assert engine.tell(late) is None
    assert engine.tell(Abort(tickets=granted.tickets)) is None
    assert server.cache.stats.readable == 0


def test_nobody_releases_or_publishes_for_another(server: Server, engine: Client) -> None:
    other = server.process("other").join()
    save_chain(server.cache, engine, make_chain(1, 4))
    lease = engine.ask(Acquire(name_space=engine.name_space, chain=make_chain(1, 4))).lease
    assert other.tell(Release(leases=lease.to_bytes(8, "little"))) is None
    granted = engine.ask(Credits(name_space=engine.name_space, group=1, count=1))
    hashes = make_chain(2, 1)
    other.tell(Publish(name_space=other.name_space, group=1, shard=0, tickets=granted.tickets, hashes=hashes))
    other.tell(Abort(tickets=granted.tickets))
    assert (server.cache.stats.leases, server.cache.stats.reserved) == (1, 1)


def test_invalidated_blocks_are_a_miss_and_leases_stay(server: Server, engine: Client) -> None:
    chain = make_chain(1, 4)
    save_chain(server.cache, engine, chain)
    found = engine.ask(Acquire(name_space=engine.name_space, chain=chain))
    assert engine.tell(Invalidate(name_space=engine.name_space, group=0, hashes=chain)) is None
    again = engine.ask(Acquire(name_space=engine.name_space, chain=chain))
    assert again.outcome is AcquireOutcome.MISS
    address = int(numbers(found.groups[0].addresses)[0])
    assert has_pattern(server.cache, HYBRID, (engine.name_space, 0), chain[:32], address)


ONE = np.ones(1, np.uint64).tobytes()
WRONG = [
    (Acquire(name_space=7, chain=b""), ErrorCode.NOT_FOUND),
    (Acquire(name_space=0, chain=b"", shards=(2,)), ErrorCode.NOT_FOUND),
    (AcquireEntries(name_space=0, group=3, hashes=b""), ErrorCode.NOT_FOUND),
    (AcquireEntries(name_space=0, group=1, hashes=b"", shards=(1,)), ErrorCode.NOT_FOUND),
    (Credits(name_space=1, group=0, count=1), ErrorCode.NOT_FOUND),
    (Credits(name_space=0, group=3, count=1), ErrorCode.NOT_FOUND),
    (Credits(name_space=0, group=0, count=1, hashes=bytes(32)), ErrorCode.MALFORMED),
    (Publish(name_space=1, group=0, shard=0, tickets=b"", hashes=b""), ErrorCode.NOT_FOUND),
    (Publish(name_space=0, group=9, shard=0, tickets=b"", hashes=b""), ErrorCode.NOT_FOUND),
    (Publish(name_space=0, group=1, shard=1, tickets=b"", hashes=b""), ErrorCode.NOT_FOUND),
    (Publish(name_space=0, group=1, shard=0, tickets=b"", hashes=b"", more_shards=1), ErrorCode.NOT_FOUND),
    (
        Publish(name_space=0, group=0, shard=0, tickets=ONE, hashes=bytes(32), digests=ONE, more_shards=1),
        ErrorCode.MALFORMED,
    ),
    (
        Publish(name_space=0, group=1, shard=0, tickets=ONE, hashes=bytes(32), digests=bytes(8)),
        ErrorCode.MALFORMED,
    ),
    (Prefetch(name_space=1, chain=b""), ErrorCode.NOT_FOUND),
    (Invalidate(name_space=1, group=0, hashes=b""), ErrorCode.NOT_FOUND),
    (Invalidate(name_space=0, group=3, hashes=b""), ErrorCode.NOT_FOUND),
]


@pytest.mark.parametrize(("message", "code"), WRONG, ids=lambda value: type(value).__name__)
def test_what_does_not_exist_is_answered_by_an_error(engine: Client, message: Any, code: ErrorCode) -> None:
    answer = engine.tell(message) if 32 <= message.op < 48 else engine.ask(message)
    assert isinstance(answer, Error)
    assert (answer.code, answer.about_op) == (code, message.op)


NOTHING = [
    Acquire(name_space=0, chain=b""),
    Credits(name_space=0, group=0),
    Publish(name_space=0, group=1, shard=0, tickets=b"", hashes=b""),
    Abort(tickets=b""),
    Abort(tickets=bytes(8) + b"\xff" * 8),
    Release(leases=bytes(8) + b"\xff" * 8),
    Invalidate(name_space=0, group=0, hashes=b""),
    AcquireEntries(name_space=0, group=0, hashes=b""),
]


@pytest.mark.parametrize("message", NOTHING, ids=lambda value: type(value).__name__)
def test_asking_for_nothing_is_no_fault(server: Server, engine: Client, message: Any) -> None:
    answer = engine.tell(message) if 32 <= message.op < 48 else engine.ask(message)
    assert not isinstance(answer, Error)
    assert (server.cache.stats.leases, server.cache.stats.used_bytes) == (0, 0)


def test_two_geometries_share_one_pool(server: Server, engine: Client) -> None:
    plain = server.process("plain").join(PLAIN, "another model")
    assert plain.name_space != engine.name_space
    chain = make_chain(1, 8)
    save_chain(server.cache, engine, chain)
    assert plain.ask(Acquire(name_space=plain.name_space, chain=chain)).outcome is AcquireOutcome.MISS
    save_chain(server.cache, plain, chain, PLAIN)
    hits = [who.ask(Acquire(name_space=who.name_space, chain=chain)) for who in (engine, plain)]
    assert [hit.boundary for hit in hits] == [128, 128]
    assert [len(hit.groups) for hit in hits] == [3, 1]
    wrong = plain.ask(Acquire(name_space=engine.name_space, chain=chain))
    assert wrong.code is ErrorCode.NOT_FOUND
    assert plain.ask(Stats()).namespaces == 2


def test_a_tenant_pays_for_what_its_users_save() -> None:
    tenants = (
        TenantSettings(name="small", quota_bytes=64 * KIB, uids=frozenset({1})),
        TenantSettings(name="large", quota_bytes=800 * KIB, uids=frozenset({2})),
    )
    settings = CacheSettings(memory_bytes=MIB, segment_bytes=MIB, extent_bytes=16 * KIB, entry_limit=1000, policy="lru")
    with Server(domains=[DomainSettings(name="main", tenants=tenants)], memory=settings) as server:
        small, large = server.process("a", uid=1).join(PLAIN), server.process("b", uid=2).join(PLAIN)
        save_chain(server.cache, large, make_chain(1, 150), PLAIN)
        for conversation in range(2, 12):
            save_chain(server.cache, small, make_chain(conversation, 20), PLAIN)
        used = {tenant.name: tenant.used_bytes for tenant in large.ask(Stats()).tenants}
        assert used["large"] == 150 * 4096
        assert used["small"] > 0
        assert large.ask(Acquire(name_space=large.name_space, chain=make_chain(1, 150))).boundary == 150 * 16


def test_a_publish_names_a_tenant_of_the_sessions_user() -> None:
    tenants = (
        TenantSettings(name="one", uids=frozenset({1})),
        TenantSettings(name="two", uids=frozenset({2})),
        TenantSettings(name="anybodys"),
    )
    with Server(domains=[DomainSettings(name="main", tenants=tenants)]) as server:
        engine = server.process("a", uid=2)
        engine.greet()
        engine.connect()
        registered = engine.ask(register_of(PLAIN))
        assert isinstance(registered, Registered)
        assert registered.tenants == ("two", "anybodys")
        engine.name_space = registered.name_space
        for place in (0, 1, 2, 3):
            save_chain(server.cache, engine, make_chain(place, 1), PLAIN, tenant=place)
        used = {tenant.name: tenant.used_bytes // 4096 for tenant in server.cache.stats.tenants}
        assert used == {"": 0, "one": 0, "two": 3, "anybodys": 1}
