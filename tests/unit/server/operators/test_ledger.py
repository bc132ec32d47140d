"""The ledger: each kind of account adds up to the server's own counts, and has a bound."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from kvoffload.cache import CacheGeometry, CacheGroup, CacheSettings, GroupRule
from kvoffload.protocol import (
    AgentSession,
    AgentSessions,
    Counts,
    Credits,
    ErrorCode,
    Explain,
    Explained,
    IdentityField,
    Insight,
    Inspect,
    LedgerKind,
    LedgerRow,
    ListAgentSessions,
    Publish,
    Query,
    Stats,
)
from kvoffload.protocol.fields import U64_MAX
from kvoffload.protocol.limits import ARRAY_ITEMS
from kvoffload.server import DomainSettings
from kvoffload.server.operators import ledger
from kvoffload.server.operators.ledger import LOOK_NS, MODEL_ACCOUNTS, Account, LedgerTable
from kvoffload.server.sessions.domain import TenantSettings
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.settings import TierSettings
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.types import ReuseRule
from kvoffload.units import KIB, MIB
from tests.kit.cache.cache_model import HYBRID, PLAIN, make_chain
from tests.kit.server.explained import explain, store
from tests.kit.server.harness import UID, Client, Server, code_of, core_settings
from tests.kit.tiers.memory_tier import MemoryTier

BLOCK = 16
RECORD_BYTES = PLAIN.groups[0].record_bytes
OPERATOR = core_settings(operator_uids=frozenset({UID}))


def names_of(table: LedgerTable) -> list[str]:
    return [name for name, _ in table.latest_first()]


def fill(table: LedgerTable, *names: str, payer: str = "") -> None:
    for name in names:
        table.use(name, payer).add(Account(prompts=1))


def test_prompts_are_added_and_the_latest_comes_first() -> None:
    table = LedgerTable(8)
    fill(table, "a", "b", "a")
    assert [(name, account.prompts) for name, account in table.latest_first()] == [("a", 2), ("b", 1)]
    assert table.rest == Account()


def test_the_one_without_a_prompt_for_longest_becomes_a_part_of_the_rest() -> None:
    table = LedgerTable(2)
    fill(table, "a", "b", "a", "c", "d")
    assert names_of(table) == ["d", "c"]
    assert table.rest.prompts == 3


def test_made_up_names_push_out_nobody_elses() -> None:
    table = LedgerTable(4)
    fill(table, "a", "b", "c", payer="tenant 1")
    for number in range(8):
        fill(table, str(number), payer="tenant 2")
        fill(table, "b", payer="tenant 2")
    assert names_of(table) == ["b", "7", "6", "c"]
    assert table.rest.prompts == 7


def test_a_name_without_a_prompt_takes_no_place_of_others() -> None:
    table = LedgerTable(2)
    table.find("a").read_bytes += 1
    fill(table, "b")
    for account in (table.find("a"), table.find("c")):
        account.read_bytes += 2
    assert (table.find("a").read_bytes, table.rest.read_bytes) == (3, 2)


def turn(engine: Client, session: str, **changes: Any) -> None:
    explain(engine, b"", **({"asked": 100, "promised": 60, "session": session} | changes))


def list_sessions(server: Server, first: int = 0) -> AgentSessions:
    told = server.process("inspect").watch().ask(ListAgentSessions(first=first))
    assert isinstance(told, AgentSessions)
    return told


def test_so_many_sessions_as_fit_are_told_and_the_rest_when_it_is_asked_for() -> None:
    with Server(settings=OPERATOR) as server:
        engine = server.process().join(PLAIN)
        for number in range(ARRAY_ITEMS + 3):
            turn(engine, str(number))
        assert list_sessions(server).total == ARRAY_ITEMS + 3
        assert len(list_sessions(server).sessions) == ARRAY_ITEMS
        assert [one.name for one in list_sessions(server, ARRAY_ITEMS).sessions] == ["2", "1", "0"]
        assert list_sessions(server, ARRAY_ITEMS + 3).sessions == ()


def test_whatever_an_engine_says_fits_an_answer() -> None:
    with Server(settings=OPERATOR) as server:
        engine = server.process().join(PLAIN)
        for _ in range(2):
            turn(engine, "a", promised=200, lower=300, saved_us=U64_MAX)
        (told,) = list_sessions(server).sessions
        assert (told.asked, told.promised, told.lower, told.saved_us) == (200, 200, 200, U64_MAX)


def test_prompts_of_no_session_are_the_rest_of_the_sessions() -> None:
    with Server(settings=OPERATOR) as server:
        engine = server.process().join(PLAIN)
        turn(engine, "a", promised=BLOCK)
        turn(engine, "", promised=2 * BLOCK)
        told = list_sessions(server)
    assert told.sessions == (
        AgentSession(name="a", turns=1, asked=100, promised=16, lower=0, saved_us=0, read_bytes=RECORD_BYTES),
    )
    (rest,) = told.rest
    assert (rest.turns, rest.promised, rest.read_bytes) == (1, 2 * BLOCK, 2 * RECORD_BYTES)


def test_a_server_tells_sessions_to_its_operators_alone() -> None:
    with Server(settings=core_settings(operator_token="secret")) as server:
        observer = server.process("top", uid=77).watch()
        assert code_of(observer.ask(ListAgentSessions())) is ErrorCode.NOT_ALLOWED


def test_a_hit_reads_the_blocks_that_each_group_needs() -> None:
    """All of a prefix, those of a window, one state."""
    rules = [
        (GroupRule(block_size=16, reuse=ReuseRule.PREFIX), 100, 2),
        (GroupRule(block_size=16, reuse=ReuseRule.WINDOW, window=33), 10, 1),
        (GroupRule(block_size=64, reuse=ReuseRule.EXACT_BOUNDARY), 1, 1),
    ]
    geometry = CacheGeometry(
        hash_block_size=16,
        groups=tuple(CacheGroup(rule=rule, record_bytes=size, shards=shards) for rule, size, shards in rules),
    )
    with Server() as server:
        engine = server.process().join(geometry)
        turn(engine, "", asked=128, promised=128)
        (model, _) = rows_of(engine, LedgerKind.MODEL)
        assert model.read_bytes == 8 * 200 + 2 * 10 + 1


def rows_of(client: Client, kind: LedgerKind) -> list[LedgerRow]:
    insight = client.ask(Inspect())
    assert isinstance(insight, Insight)
    return [row for row in insight.ledger if row.kind is kind]


def test_requests_of_several_tenants_are_counted_apart() -> None:
    """An engine may save and ask for each tenant that its user may act for; what it does not name is its own."""
    domain = DomainSettings(name="main", tenants=(TenantSettings(name="a"), TenantSettings(name="b")))
    with Server(domains=[domain]) as server:
        engine = server.process().join(PLAIN, tenant="b")
        for place in (0, 1, 2, 3):
            turn(engine, "", tenant=place)
        saved = np.array([5, 70, 900], "<u8").tobytes()
        assert isinstance(engine.ask(Explain(queries=(), saved_bytes=saved)), Explained)
        rows = rows_of(engine, LedgerKind.TENANT)
        assert {row.name: (row.prompts, row.written_bytes) for row in rows} == {"a": (1, 70), "b": (3, 905), "": (0, 0)}
        (model, _) = rows_of(engine, LedgerKind.MODEL)
        assert (model.prompts, model.written_bytes) == (4, 975)


def test_engines_that_say_nonsense_of_what_they_saved_break_nothing() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        saved = np.full(200, U64_MAX, "<u8").tobytes()
        assert isinstance(engine.ask(Explain(queries=(), saved_bytes=saved)), Explained)
        assert rows_of(engine, LedgerKind.MODEL)[0].written_bytes == U64_MAX


def save(engine: Client, chain: bytes, *, tenant: int) -> None:
    """Publishes the chain for the tenant at this place, and tells of it as a client does."""
    count = len(chain) // 32
    granted = engine.ask(Credits(name_space=engine.name_space, group=0, count=count))
    message = Publish(
        name_space=engine.name_space, group=0, shard=0, tickets=granted.tickets, hashes=chain, tenant=tenant
    )
    assert engine.tell(message) is None
    saved = np.zeros(3, "<u8")
    saved[tenant] = count * RECORD_BYTES
    assert isinstance(engine.ask(Explain(queries=(), saved_bytes=saved.tobytes())), Explained)


def test_sums_of_each_kind_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traffic of several tenants and more models and sessions than have accounts, with a tier and with evictions."""
    monkeypatch.setattr(ledger, "SESSION_ACCOUNTS", 100)
    random = Random(1)
    tenants = (TenantSettings(name="a", quota_bytes=MIB), TenantSettings(name="b"))
    tier = TierTraffic(MemoryTier(), TierSettings(), open_pidfd=lambda: 1_000_000)  # type: ignore[arg-type]
    memory = CacheSettings(memory_bytes=4 * MIB, segment_bytes=4 * MIB, policy="lru")
    with Server(
        settings=OPERATOR,
        memory=memory,
        domains=[DomainSettings(name="main", tenants=tenants)],
        tiers={"main": TierChain([tier])},  # type: ignore[dict-item]
    ) as server:
        models = range(MODEL_ACCOUNTS + 5)
        engines = [
            server.process(f"engine {at}").join(
                PLAIN, f"model {at}", identity=(IdentityField(name="model", value=f"model {at}"),)
            )
            for at in models
        ]
        written = 0
        for at in range(1500):
            engine = random.choice(engines)
            blocks, place = random.randint(1, 16), random.randint(0, 2)
            query = Query(
                asked=400,
                promised=random.randint(0, 25) * BLOCK,
                saved_us=random.randint(0, 10**6),
                session=random.choice(["", f"session {at}", "always"]),
                tenant=place,
            )
            engine.ask(Explain(queries=(query,)))
            if at % 4 == 0:
                save(engine, make_chain(at, blocks), tenant=place)
                written += blocks * RECORD_BYTES
            server.now_ns += random.randint(1, LOOK_NS)
            server.core.advance(server.now_ns)
        server.core.advance(server.now_ns + LOOK_NS)
        observer = server.process("inspect").watch()
        insight, counts, sessions = observer.ask(Inspect()), observer.ask(Stats()), list_sessions(server)
        told = [*sessions.sessions, *sessions.rest]
        server.core.tiers.close(lambda: server.now_ns)
    assert isinstance(insight, Insight)
    assert isinstance(counts, Counts)
    outcomes = {one.name: one.count for one in insight.outcomes}
    hits = outcomes["hit_memory"] + outcomes["hit_lower"]
    for kind in LedgerKind:
        rows = [row for row in insight.ledger if row.kind is kind]
        assert sum(row.prompts for row in rows) == 1500
        assert sum(row.asked for row in rows) == sum(outcomes.values())
        assert sum(row.promised for row in rows) == hits
        assert sum(row.saved_us for row in rows) == insight.saved_us
        assert sum(row.written_bytes for row in rows) == written
        assert sum(row.read_bytes for row in rows) == hits // BLOCK * RECORD_BYTES
        assert sum(row.memory_kib_s for row in rows) == pytest.approx(insight.memory_kib_s, rel=1e-3)
        assert [row.is_rest for row in rows].count(True) == 1
    assert insight.memory_kib_s > 60 * MIB // KIB
    models_told = [row for row in insight.ledger if row.kind is LedgerKind.MODEL]
    assert len(models_told) == MODEL_ACCOUNTS + 1
    assert models_told[-1].prompts > 0
    (traffic,) = counts.traffic
    assert traffic.written_bytes > 0
    assert sum(row.tier_written_bytes for row in models_told) == traffic.written_bytes
    assert len(told) == 101
    assert sum(one.turns for one in told) == 1500
    assert sum(one.promised for one in told) == hits
    assert sum(one.saved_us for one in told) == insight.saved_us
    ((name, kib_s),) = [(one.name, one.count) for one in insight.tier_kib_s]
    assert (name, kib_s > 0) == ("disk", True)


def test_what_tiers_bring_up_is_counted_by_model() -> None:
    tier = TierTraffic(MemoryTier(), TierSettings(), open_pidfd=lambda: 1_000_000)  # type: ignore[arg-type]
    with Server(tiers={"main": TierChain([tier])}) as server:  # type: ignore[dict-item]
        engine = server.process().join(HYBRID)
        server.core.tiers.on_moved("main", b"?" * 32, read_bytes=7)
        rows = rows_of(engine, LedgerKind.MODEL)
        assert sum(row.tier_read_bytes for row in rows) == 7
        server.core.tiers.close(lambda: server.now_ns)


def test_memory_is_occupied_for_as_long_as_blocks_are_there() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        store(engine, make_chain(1, 4))
        used_bytes = server.cache.stats.used_bytes
        server.core.advance(server.now_ns)
        for seconds in range(1, 11):
            server.core.advance(server.now_ns + seconds * LOOK_NS)
        server.cache.clear(engine.name_space)
        server.core.advance(server.now_ns + 12 * LOOK_NS)
        insight = engine.ask(Inspect())
        assert insight.memory_kib_s == 10 * used_bytes // KIB
        assert [row.memory_kib_s for row in insight.ledger if not row.is_rest] == [insight.memory_kib_s] * 2
