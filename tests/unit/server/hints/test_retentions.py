"""Bounds of retentions by tenant, and the order in which they give way; no tenant can take everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvoffload.cache import Ask, CacheSettings
from kvoffload.protocol import HintAction, HintOutcome
from kvoffload.protocol.hints import ListRetained
from kvoffload.server import DomainSettings
from kvoffload.server.hints import retentions
from kvoffload.server.sessions.domain import TenantSettings
from kvoffload.units import MIB
from tests.kit.cache.cache_model import KIB, PLAIN, make_chain
from tests.kit.server.explained import store
from tests.kit.server.harness import UID, CacheWithoutProcesses, Server
from tests.kit.server.hinted import SETTINGS, counts, hint, list_retained, pass_time, watch

RETAIN, RELEASE = HintAction.RETAIN, HintAction.RELEASE
BLOCKS = 256
"""That the memory has room for, of PLAIN."""
MOST = 95
"""That one alone may retain: three quarters of half of them, but for one."""


def test_where_a_reservation_finds_no_room_the_weakest_give_way_first() -> None:
    """By priority, and among equals by when they end."""
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        for number, (ttl_ms, priority) in enumerate([(9000, 0), (8000, 0), (3000, 5), (9000, 1)]):
            store(engine, make_chain(number, 8))
            hint(engine, RETAIN, make_chain(number, 8), session=str(number), ttl_ms=ttl_ms, priority=priority)
        assert [row.session for row in list_retained(operator)] == ["1", "0", "3", "2"]
        pass_time(engine, 0.2)
        assert len(list_retained(operator)) == 4
        # All else is in use.
        session = server.cache.open_session()
        held = server.cache.reserve(session, engine.name_space, 0, count=BLOCKS)
        assert len(held) == BLOCKS - 4 * 8
        pass_time(engine, 0.2)
        assert [row.session for row in list_retained(operator)] == ["0", "3", "2"]
        # As many as are wanted find room, and nothing more gives way.
        assert len(server.cache.reserve(session, engine.name_space, 0, count=8)) == 8
        pass_time(engine, 0.2)
        assert [row.session for row in list_retained(operator)] == ["0", "3", "2"]
        for left in (["3", "2"], ["2"], []):
            server.cache.reserve(session, engine.name_space, 0, count=9)
            pass_time(engine, 0.2)
            assert [row.session for row in list_retained(operator)] == left
        assert counts(operator)[1] == {"hit_retained": 0, "unused_retained": 4 * 128, "gave_way": 4 * 128}


def test_what_was_lacking_before_takes_nothing() -> None:
    with Server(settings=SETTINGS) as server:
        engine = server.process("first").join(PLAIN)
        session = server.cache.open_session()
        held = server.cache.reserve(session, engine.name_space, 0, count=BLOCKS + 1)
        server.cache.abort(session, held.tickets)
        store(engine, make_chain(1, 8))
        hint(engine, RETAIN, make_chain(1, 8), session="s")
        pass_time(engine, 0.2)
        assert len(list_retained(watch(server))) == 1


def test_while_the_pool_grows_nothing_gives_way() -> None:
    settings = CacheSettings(
        memory_bytes=4 * MIB, segment_bytes=2 * MIB, extent_bytes=16 * KIB, step_bytes=MIB, policy="lru"
    )
    with Server(settings=SETTINGS, memory=None) as server:
        server.attach("main", CacheWithoutProcesses.begin(settings))
        engine, operator = server.process("first").join(PLAIN), watch(server)
        store(engine, make_chain(1, 8))
        hint(engine, RETAIN, make_chain(1, 8), session="s")
        session = server.cache.open_session()
        assert len(server.cache.reserve(session, engine.name_space, 0, count=2 * BLOCKS)) < 2 * BLOCKS
        assert server.cache.grow()
        pass_time(engine, 0.2)
        assert len(list_retained(operator)) == 1
        server.cache.reserve(session, engine.name_space, 0, count=2 * BLOCKS)
        pass_time(engine, 0.2)
        assert list_retained(operator) == []


def test_a_session_over_its_own_limit_takes_nothing_from_others() -> None:
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        store(engine, make_chain(1, 8))
        hint(engine, RETAIN, make_chain(1, 8), session="s")
        session = server.cache.open_session(held_limit_bytes=4096)
        assert len(server.cache.reserve(session, engine.name_space, 0, count=5)) == 1
        pass_time(engine, 0.2)
        assert len(list_retained(operator)) == 1


def test_one_alone_retains_a_part_and_its_weaker_ones_give_way_to_its_stronger() -> None:
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        for number in range(3):
            store(engine, make_chain(number, 40))
        assert hint(engine, RETAIN, make_chain(0, 40), session="a", priority=1).outcome is HintOutcome.DONE
        assert hint(engine, RETAIN, make_chain(1, 40), session="b", priority=2).outcome is HintOutcome.DONE
        for priority in (0, 1):
            told = hint(engine, RETAIN, make_chain(2, 40), session="c", priority=priority, ttl_ms=1000)
            assert told.outcome is HintOutcome.OVER_LIMIT
        assert [row.session for row in list_retained(operator)] == ["a", "b"]
        assert hint(engine, RETAIN, make_chain(2, 40), session="c", priority=3).outcome is HintOutcome.DONE
        assert [row.session for row in list_retained(operator)] == ["b", "c"]
        # The session's own former one does not count.
        assert hint(engine, RETAIN, make_chain(2, 40), session="b", priority=3).outcome is HintOutcome.DONE
        told = operator.ask(ListRetained())
        assert told.size_bytes <= MOST * 4 * KIB < told.limit_bytes == BLOCKS * 4 * KIB // 2


def test_what_is_retained_is_not_read() -> None:
    """The engine that loads the bytes checks them, not the server's loop."""
    settings = CacheSettings(memory_bytes=MIB, segment_bytes=MIB, extent_bytes=16 * KIB, policy="lru", verify="always")
    with Server(settings=SETTINGS, memory=None) as server:
        server.attach("main", CacheWithoutProcesses.begin(settings))
        engine, chain = server.process("first").join(PLAIN), make_chain(1, 4)
        store(engine, chain)
        session = server.cache.open_session()
        lease = server.cache.acquire(session, engine.name_space, Ask(chain))
        server.cache.view(int(lease.groups[0].addresses[2]), 4 * KIB)[100] ^= 1
        server.cache.release(session, lease.lease)
        assert hint(engine, RETAIN, chain, session="s").outcome is HintOutcome.DONE
        assert server.cache.stats.mismatches == 0
        assert server.cache.acquire(session, engine.name_space, Ask(chain)).boundary == 2 * 16
        assert server.cache.stats.mismatches == 1


def test_what_cannot_be_found_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few are looked for at a time."""
    monkeypatch.setattr(retentions, "CHECKED_BLOCKS", 1)
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        for number in range(3):
            store(engine, make_chain(number, 4))
            hint(engine, RETAIN, make_chain(number, 4), session=str(number))
        for number in (0, 2):
            server.cache.invalidate(engine.name_space, 0, make_chain(number, 4)[64:96])
        left = []
        for _ in range(3):
            pass_time(engine, 0.2)
            left.append([row.session for row in list_retained(operator)])
        assert left == [["1", "2"], ["1", "2"], ["1"]]
        assert server.cache.stats.quarantined == 0


def test_while_all_blocks_are_there_none_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has other things to do, and a retained block that is gone is counted as quarantined."""
    with Server(settings=SETTINGS) as server:
        engine, operator, chain = server.process("first").join(PLAIN), watch(server), make_chain(1, 4)
        store(engine, chain)
        hint(engine, RETAIN, chain, session="s")
        looked, lookup = list[bytes](), server.cache.lookup

        def note(name_space: int, group: int, hashes: bytes) -> Any:
            looked.append(hashes)
            return lookup(name_space, group, hashes)

        monkeypatch.setattr(server.cache, "lookup", note)
        for _ in range(3):
            pass_time(engine, 0.2)
        assert not looked
        assert server.cache.clear(engine.name_space) == 4
        pass_time(engine, 0.2)
        assert looked == [chain]
        assert not list_retained(operator)


def test_of_a_prefix_whose_end_has_just_gone_the_rest_is_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(settings=SETTINGS) as server:
        engine, chain = server.process("first").join(PLAIN), make_chain(1, 4)
        store(engine, chain)
        acquire = server.cache.acquire_entries

        def lose_the_last(*asked: Any, **settings: Any) -> Any:
            server.cache.invalidate(engine.name_space, 0, chain[96:])
            return acquire(*asked, **settings)

        monkeypatch.setattr(server.cache, "acquire_entries", lose_the_last)
        told = hint(engine, RETAIN, chain, session="s")
        assert (told.outcome, told.tokens) == (HintOutcome.PARTLY, 48)


def test_a_prefix_that_is_too_long_is_not_retained() -> None:
    with Server(settings=SETTINGS) as server:
        engine = server.process("first").join(PLAIN)
        store(engine, make_chain(0, MOST + 1))
        assert hint(engine, RETAIN, make_chain(0, MOST + 1)).outcome is HintOutcome.OVER_LIMIT
        assert hint(engine, RETAIN, make_chain(0, MOST)).outcome is HintOutcome.DONE


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retentions, "MAX_RETAINED", 8)
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        store(engine, make_chain(0, 16))
        for end in range(16):
            hint(engine, RETAIN, make_chain(0, end + 1), session=str(end))
            pass_time(engine, 0.01)
        # Each ends later than those before it.
        assert [row.session for row in list_retained(operator)] == [str(end) for end in range(10, 16)]


def test_a_tenant_retains_no_more_than_half_its_quota() -> None:
    tenants = (TenantSettings(name="small", quota_bytes=16 * 4 * KIB), TenantSettings(name="other"))
    with Server(settings=SETTINGS, domains=[DomainSettings(name="main", tenants=tenants)]) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        # The tenant may save more than its quota, but not at once.
        store(engine, make_chain(0, 16))
        store(engine, make_chain(0, 32)[16 * 32 :])
        assert hint(engine, RETAIN, make_chain(0, 9), session="s").outcome is HintOutcome.OVER_LIMIT
        assert hint(engine, RETAIN, make_chain(0, 8), session="s").outcome is HintOutcome.DONE
        assert hint(engine, RETAIN, make_chain(0, 16), session="s", tenant=2).outcome is HintOutcome.DONE
        # Two tenants' sessions of one name are two.
        assert [(row.session, row.tenant) for row in list_retained(operator)] == [("s", "small"), ("s", "other")]
        assert hint(engine, RELEASE, session="s", tenant=2).outcome is HintOutcome.DONE
        assert [row.tenant for row in list_retained(operator)] == ["small"]


def test_nobody_takes_the_rest_and_a_newcomer_has_a_part() -> None:
    with Server(settings=SETTINGS) as server:
        first = server.process("first").join(PLAIN)
        second = server.process("second", uid=UID + 1).join(PLAIN)
        store(first, make_chain(0, MOST))
        hint(first, RETAIN, make_chain(0, MOST), session="s")
        assert hint(second, RETAIN, make_chain(0, 24), session="s", priority=9).outcome is HintOutcome.DONE
        assert hint(second, RETAIN, make_chain(0, 25), session="s", priority=9).outcome is HintOutcome.OVER_LIMIT
        assert [row.tokens for row in list_retained(watch(server))] == [MOST * 16, 24 * 16]


def test_when_the_index_has_no_room_for_a_lease_it_is_said() -> None:
    with Server(settings=SETTINGS) as server:
        engine, chain = server.process("a").join(PLAIN), make_chain(1, 4)
        store(engine, chain)
        sessions = []
        while True:
            try:
                sessions.append(server.cache.open_session())
            except RuntimeError:
                break
        assert hint(engine, RETAIN, chain).outcome is HintOutcome.NO_ROOM
        assert np.array(sessions).size


def test_of_many_blocks_that_are_released_some_end_at_once_and_the_others_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop serves other messages before all have ended."""
    monkeypatch.setattr(retentions, "ENDED_BLOCKS", 8)
    with Server(settings=SETTINGS) as server:
        engine, operator, chain = server.process("first").join(PLAIN), watch(server), make_chain(1, 24)
        store(engine, chain)
        for blocks in range(4, 24, 4):
            assert hint(engine, RETAIN, chain[: 32 * blocks]).outcome is HintOutcome.DONE
        assert hint(engine, RELEASE, chain).outcome is HintOutcome.DONE
        left = [len(list_retained(operator))]
        while left[-1]:
            pass_time(engine, 0.2)
            left.append(len(list_retained(operator)))
        assert left == [3, 2, 1, 0]
        assert server.cache.stats.leases == 0


def test_the_names_that_are_kept_for_retentions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where many prefixes have the same blocks; weaker ones give way."""
    monkeypatch.setattr(retentions, "MAX_RETAINED_BLOCKS", 12)
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        store(engine, make_chain(1, 8))
        for session, priority, outcome in (
            ("a", 1, HintOutcome.DONE),
            ("b", 1, HintOutcome.DONE),
            ("c", 0, HintOutcome.OVER_LIMIT),
            ("d", 2, HintOutcome.DONE),
        ):
            told = hint(engine, RETAIN, make_chain(1, 4), session=session, priority=priority, ttl_ms=1000)
            assert told.outcome is outcome, session
        assert len(list_retained(operator)) == 2
