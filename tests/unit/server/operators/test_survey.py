"""Operators, and no other users, are told which processes have joined, what they registered, and where blocks are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.cache import Ask, CommitOutcome, LocalCache, SessionId
from kvoffload.protocol import Call, Clear, ErrorCode, GroupTerms, Hello, IdentityField, Invalidate, Registered, Role
from kvoffload.protocol.survey import (
    NOT_ASKED,
    UNKNOWN_S,
    BlockPlaces,
    BlocksFound,
    FindBlocks,
    FindPrefix,
    FollowBlock,
    IdentityRead,
    Joined,
    ListJoined,
    PrefixFound,
    ReadIdentity,
    ReadReport,
    ReportRead,
)
from kvoffload.server import DomainSettings
from kvoffload.server.operators import survey
from kvoffload.server.operators.survey import LOOKED_AT
from kvoffload.server.sessions.domain import TenantSettings
from kvoffload.server.sessions.outbox import Later
from kvoffload.server.sessions.session import Guest
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.settings import TierSettings
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.tiers import RecordNames, RecordOutcome
from tests.kit.cache.cache_model import HYBRID, PLAIN, block_hashes, fingerprint, make_chain
from tests.kit.server.explained import store
from tests.kit.server.harness import UID, Client, Server, code_of, core_settings, numbers, register_of
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.memory_tier import MemoryTier
from tests.kit.tiers.tier_contract import finish

SETTINGS = core_settings(operator_uids=frozenset({UID}))


def find(operator: Client, message: FindBlocks) -> BlocksFound:
    """Asks for blocks, for which the server looks on the thread for long calls."""
    server = operator.server
    operator.number += 1
    call = Call(message=message, number=operator.number, session=operator.session, expires_ns=0)
    [later] = server.core.handle(operator.key, call, server.now_ns)
    assert isinstance(later, Later)
    answer = server.deliver(server.core.finish(later, later.find_all), key=operator.key)
    assert isinstance(answer, BlocksFound), answer
    return answer


def follow(operator: Client, engine: Client, block_hash: bytes) -> BlockPlaces:
    answer = operator.ask(FollowBlock(name_space=engine.name_space, block_hash=block_hash))
    assert isinstance(answer, BlockPlaces), answer
    return answer


def save_all(cache: LocalCache, session: SessionId, name_space: int, chain: bytes) -> None:
    """The blocks of all groups."""
    for group, settings in enumerate(HYBRID.groups):
        hashes = b"".join(block_hashes(chain, HYBRID, group))
        tickets = cache.reserve(session, name_space, group, hashes=hashes).tickets
        for shard in range(settings.shards):
            outcomes = cache.commit(session, name_space, group, tickets, hashes=hashes, shard=shard)
        assert set(outcomes) == {CommitOutcome.READABLE}


@pytest.mark.parametrize(
    "message",
    [
        ListJoined(),
        ReadReport(engine="a"),
        ReadIdentity(place=0),
        FindBlocks(),
        FollowBlock(name_space=0, block_hash=bytes(32)),
        FindPrefix(name_space=0, chain=bytes(32)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_only_operators_are_told(message: Any) -> None:
    with Server(settings=core_settings(operator_token="secret")) as server:
        observer = server.process("top", uid=77).watch()
        assert code_of(observer.ask(message)) is ErrorCode.NOT_ALLOWED


def test_all_processes_and_what_their_sessions_hold() -> None:
    tenants = (TenantSettings(name="own"), TenantSettings(name="other"))
    with Server(settings=SETTINGS, domains=[DomainSettings(name="main", tenants=tenants)]) as server:
        engine = server.process("first").join(PLAIN, tenant="other")
        worker = server.process("first", role=Role.WORKER).join(PLAIN, tenant="other", report=b"all of it")
        store(engine, make_chain(1, 3))
        operator = server.process("inspect").watch()
        told = operator.ask(ListJoined())
        assert isinstance(told, Joined)
        rows = [(one.engine, one.role, one.pid, one.tenant, one.has_report) for one in told.processes]
        assert rows == [
            ("first", Role.SCHEDULER, engine.lifeline, "other", False),
            ("first", Role.WORKER, worker.lifeline, "other", True),
            ("inspect", Role.OBSERVER, operator.lifeline, "", False),
        ]
        assert told.processes[0].fingerprint == fingerprint("model").hex()[:12]
        assert {one.uid for one in told.processes} == {UID}
        rest = operator.ask(ListJoined(first=2))
        assert (rest.total, [one.engine for one in rest.processes]) == (3, ["inspect"])


def test_an_engine_of_one_process_tells_itself() -> None:
    with Server(settings=SETTINGS) as server:
        server.process("alone").join(PLAIN, report=b"all of it")
        [engine, _] = server.process("inspect").watch().ask(ListJoined()).processes
        assert (engine.role, engine.has_report) == (Role.SCHEDULER, True)


def test_who_comes_over_tcp_is_listed_too() -> None:
    with Server(settings=SETTINGS) as server:
        hello = Call(message=Hello(protocol_min=1, protocol_max=1), number=1, session=0, expires_ns=0)
        server.core.handle_guest(b"guest", hello, Guest(domain="main", name="far"), server.now_ns)
        told = server.process("inspect").watch().ask(ListJoined())
        [guest] = [one for one in told.processes if not one.pid]
        assert (guest.role, guest.engine, guest.uid) == (Role.OBSERVER, "far", 2**32 - 1)


def test_what_a_worker_registered_is_read_by_its_rank() -> None:
    with Server(settings=SETTINGS) as server:
        for rank in range(2):
            server.process("first", role=Role.WORKER).join(PLAIN, rank=rank, ranks=2, report=b"rank %d" % rank)
        operator = server.process("inspect").watch()
        assert operator.ask(ReadReport(engine="first", rank=1)) == ReportRead(report=b"rank 1")
        assert operator.ask(ReadReport(engine="first", rank=2)) == ReportRead(report=b"")
        assert operator.ask(ReadReport(engine="second")) == ReportRead(report=b"")


def test_reports_are_bounded_and_the_oldest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "MAX_REPORT_BYTES", 100)
    with Server(settings=SETTINGS) as server:
        for name in ("a", "b", "c"):
            server.process(name, role=Role.WORKER).join(PLAIN, report=name.encode() * 40)
        operator = server.process("inspect").watch()
        kept = [operator.ask(ReadReport(engine=name)).report for name in ("a", "b", "c")]
        assert [len(report) for report in kept] == [0, 40, 40]


def test_identities_are_told_with_their_geometry() -> None:
    made_of = (IdentityField(name="model", value="made-up"),)
    with Server(settings=SETTINGS) as server:
        operator = server.process("inspect").watch()
        assert operator.ask(ReadIdentity(place=0)) == IdentityRead(total=0)
        engine = server.process("first").join(PLAIN, name="one", identity=made_of)
        server.process("second").join(HYBRID, name="two")
        store(engine, make_chain(1, 3))
        first, second = (operator.ask(ReadIdentity(place=place)) for place in range(2))
        assert (first.total, first.fingerprint, first.identity) == (2, fingerprint("one"), made_of)
        assert first.used_bytes == 3 * PLAIN.groups[0].record_bytes
        assert (second.used_bytes, len(second.groups)) == (0, len(HYBRID.groups))
        assert all(isinstance(group, GroupTerms) for group in second.groups)


def test_an_identity_is_found_by_its_model_among_some_at_a_time() -> None:
    with Server(settings=SETTINGS) as server:
        operator = server.process("inspect").watch()
        for number in range(LOOKED_AT + 2):
            named = (IdentityField(name="model", value=f"model {number}"),)
            server.exit_process(server.process(f"engine {number}").join(PLAIN, name=f"{number}", identity=named))
        last = f"model {LOOKED_AT + 1}"
        assert operator.ask(ReadIdentity(place=0, model=last)) == IdentityRead(total=LOOKED_AT + 2, place=LOOKED_AT - 1)
        for wanted in ({"model": last}, {"identity": fingerprint(f"{LOOKED_AT + 1}").hex()[:9]}):
            found = operator.ask(ReadIdentity(place=LOOKED_AT, **wanted))
            assert (found.place, found.fingerprint) == (LOOKED_AT + 1, fingerprint(f"{LOOKED_AT + 1}"))
        assert operator.ask(ReadIdentity(place=LOOKED_AT + 9)) == IdentityRead(total=LOOKED_AT + 2, place=LOOKED_AT + 9)


def test_blocks_are_found_by_the_beginning_of_their_names() -> None:
    with Server(settings=SETTINGS) as server:
        engine = server.process("first").join(PLAIN)
        chain = make_chain(1, 5)
        store(engine, chain)
        operator = server.process("inspect").watch()
        assert find(operator, FindBlocks()).total == 5
        told = find(operator, FindBlocks(count=2))
        assert (told.total, len(told.hashes)) == (5, 64)
        [wanted] = [chain[64:96]]
        told = find(operator, FindBlocks(prefix=wanted[:6]))
        assert (told.total, told.hashes) == (1, wanted)
        columns = (told.name_spaces, told.groups, told.leases, told.used)
        assert [numbers(column).tolist() for column in columns] == [[engine.name_space], [0], [0], [0]]
        assert numbers(told.seconds)[0] < 60


def test_a_block_is_followed_out_of_memory() -> None:
    with Server(settings=SETTINGS) as server:
        engine = server.process("first").join(PLAIN)
        chain = make_chain(1, 3)
        block = chain[:32]
        operator = server.process("inspect").watch()
        assert follow(operator, engine, block) == BlockPlaces(
            in_memory=b"\0", seconds=b"\xff" * 8, left=b"\0", left_seconds=bytes(8), missing_bytes=bytes(8)
        )
        store(engine, chain)
        there = follow(operator, engine, block)
        assert (there.in_memory, there.left, there.tiers) == (b"\1", b"\0", ())
        assert numbers(there.seconds)[0] != UNKNOWN_S
        doubt = Invalidate(name_space=engine.name_space, group=0, hashes=block)
        assert engine.tell(doubt) is None
        gone = follow(operator, engine, block)
        assert (gone.in_memory, gone.left) == (b"\0", b"\2")
        operator.ask(Clear())
        assert follow(operator, engine, chain[32:64]).left == b"\3"


def test_a_block_of_nobody_is_not_found() -> None:
    with Server(settings=SETTINGS) as server:
        operator = server.process("inspect").watch()
        assert code_of(operator.ask(FollowBlock(name_space=7, block_hash=bytes(32)))) is ErrorCode.NOT_FOUND


def test_before_there_is_memory() -> None:
    with Server(settings=SETTINGS, memory=None) as server:
        operator = server.process("inspect").watch()
        assert operator.ask(ReadIdentity(place=0)) == IdentityRead(total=0)
        assert operator.ask(ListJoined()).total == 1
        assert code_of(operator.ask(FindBlocks())) is ErrorCode.BUSY
        assert code_of(operator.ask(FollowBlock(name_space=0, block_hash=bytes(32)))) is ErrorCode.NOT_FOUND
        assert code_of(operator.ask(FindPrefix(name_space=0, chain=bytes(32)))) is ErrorCode.NOT_FOUND


def test_of_a_prompt_the_leading_blocks_count() -> None:
    with Server(settings=SETTINGS) as server:
        engine = server.process("first").join(PLAIN)
        chain = make_chain(1, 6)
        store(engine, chain[:64] + chain[96:])
        operator = server.process("inspect").watch()
        found = partial(FindPrefix, name_space=engine.name_space)
        assert operator.ask(found(chain=chain)) == PrefixFound(in_memory=32)
        assert operator.ask(found(chain=chain[:64])) == PrefixFound(in_memory=32)
        assert operator.ask(found(chain=chain, limit=31)) == PrefixFound(in_memory=16)
        assert operator.ask(found(chain=chain, alignment=32)) == PrefixFound(in_memory=32)
        assert operator.ask(found(chain=chain, alignment=48)) == PrefixFound(in_memory=0)
        assert operator.ask(found(chain=chain[96:])) == PrefixFound(in_memory=48)
        assert operator.ask(found(chain=b"")) == PrefixFound(in_memory=0)
        assert code_of(operator.ask(FindPrefix(name_space=99, chain=chain))) is ErrorCode.NOT_FOUND


def test_of_a_hybrid_model_only_boundaries_of_all_groups_count() -> None:
    """The answer is the boundary that an acquire of the same prompt finds, whatever is missing."""
    blocks = 16
    chain = make_chain(1, blocks)
    with Server(settings=SETTINGS) as server:
        engine = server.process("first").join(HYBRID)
        operator = server.process("inspect").watch()
        session = server.cache.open_session()
        save_all(server.cache, session, engine.name_space, chain)
        seen = set()
        for group, lost in [(0, 15), (2, 3), (1, 5), (2, 1), (1, 0), (0, 2)]:
            names = block_hashes(chain, HYBRID, group)
            server.cache.invalidate(engine.name_space, group, names[lost])
            told = operator.ask(FindPrefix(name_space=engine.name_space, chain=chain))
            hit = server.cache.acquire(session, engine.name_space, Ask(chain))
            server.cache.release(session, hit.lease)
            assert told.in_memory == hit.boundary
            seen.add(told.in_memory)
        assert len(seen) > 2


def test_a_question_is_no_use() -> None:
    with Server(settings=SETTINGS) as server:
        engine = server.process("first").join(PLAIN)
        old, new = make_chain(1, 3), make_chain(2, 3)
        store(engine, old)
        store(engine, new)
        operator = server.process("inspect").watch()
        before = server.cache.stats
        for _ in range(20):
            assert operator.ask(FindPrefix(name_space=engine.name_space, chain=old)).in_memory == 48
        assert server.cache.stats == before
        assert not server.cache.find_used(engine.name_space, 0, old).any()
        # It is evicted as if the operator had not asked: the policy of this memory is LRU.
        while server.cache.lookup(engine.name_space, 0, old + new).all():
            server.cache.evict(1)
        assert server.cache.lookup(engine.name_space, 0, new).all()


def test_nobody_hears_of_another_domain() -> None:
    domains = [DomainSettings(name="one", uids=frozenset({UID})), DomainSettings(name="two", uids=frozenset({UID + 1}))]
    settings = core_settings(operator_uids=frozenset({UID, UID + 1}))
    with Server(settings=settings, domains=domains) as server:
        engine = server.process("first").join(PLAIN)
        chain = make_chain(1, 3)
        store(engine, chain)
        question = FindPrefix(name_space=engine.name_space, chain=chain)
        assert server.process("own").watch().ask(question) == PrefixFound(in_memory=48)
        other = server.process("other", uid=UID + 1).watch()
        assert code_of(other.ask(question)) is ErrorCode.NOT_FOUND
        assert other.ask(ReadIdentity(place=0)) == IdentityRead(total=0)
        server.process("second", uid=UID + 1).join(PLAIN)
        assert other.ask(question) == PrefixFound(in_memory=0)


class FarTier(MemoryTier):
    """Others write to its place, too: it has to be asked."""

    knows_all = False

    def contains(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        return np.zeros(len(names), np.bool_)


def find_in_tiers(operator: Client, message: FindPrefix, *, steps: int = 4) -> PrefixFound:
    """Finds blocks as the loop does: the tiers' answer comes a few turns later."""
    server = operator.server
    answer = operator.ask(message)
    while answer is None:
        assert steps
        steps -= 1
        server.now_ns += 1_000_000
        answer = server.deliver(server.core.tiers.advance(server.now_ns), key=operator.key)
    assert isinstance(answer, PrefixFound), answer
    return answer


def test_tiers_add_to_what_memory_has() -> None:
    chain = make_chain(1, 6)
    near, far = FaultyTier(MemoryTier()), FaultyTier(FarTier())
    tiers = [
        TierTraffic(tier, TierSettings(name=name), open_pidfd=lambda: 1_000_000)
        for name, tier in (("disk", near), ("valkey", far))
    ]
    with Server(settings=SETTINGS, tiers={"main": TierChain(tiers)}) as server:
        engine = server.process("first").join(PLAIN)
        store(engine, chain)
        for _ in range(8):
            server.now_ns += 1_000_000
            assert server.core.tiers.advance(server.now_ns) == []
        for tier, gone in ((near, chain[96:]), (far, chain[:32] + chain[160:])):
            names = RecordNames(fingerprint=fingerprint("model"), hashes=gone, group=0, shard=0)
            ended = finish(tier.inner, tier.inner.remove(names, timeout_s=1.0))  # type: ignore[arg-type]
            assert ended.count(RecordOutcome.REMOVED) == len(gone) // 32
        server.cache.invalidate(engine.name_space, 0, chain[64:])
        operator = server.process("inspect").watch()
        asked, uses = len(far.asked), server.cache.stats
        question = FindPrefix(name_space=engine.name_space, chain=chain)
        told = find_in_tiers(operator, question)
        assert (told.in_memory, told.tiers) == (32, ("disk", "valkey"))
        assert numbers(told.reaches).tolist() == [48, NOT_ASKED]
        assert len(far.asked) == asked
        told = find_in_tiers(operator, replace(question, wait_ms=100))
        assert numbers(told.reaches).tolist() == [48, 80]
        # Nothing came up, and nothing was counted.
        assert (server.cache.stats, server.cache.lookup(engine.name_space, 0, chain).sum()) == (uses, 2)
        assert {verb for verb, *_ in far.asked[asked:]} == {"look"}
        server.core.tiers.close(lambda: server.now_ns)


def test_reports_are_bounded_in_number_and_end_with_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks an engine says that it has, and however many reports ended sessions had."""
    monkeypatch.setattr(survey, "MAX_REPORTS", 8)
    with Server(settings=SETTINGS) as server:
        operator = server.process("inspect").watch()

        def bring(name: str, count: int) -> Client:
            engine = server.process(name).join(HYBRID, ranks=100)
            for rank in range(count):
                assert isinstance(engine.ask(register_of(HYBRID, rank=rank, ranks=100, report=b"r")), Registered)
            return engine

        def has_report(engine: str, rank: int) -> bool:
            answer = operator.ask(ReadReport(engine=engine, rank=rank))
            assert isinstance(answer, ReportRead)
            return bool(answer.report)

        bring("first", 1)
        second = bring("second", 7)
        assert has_report("first", 0)
        server.exit_process(second)
        bring("third", 7)
        assert has_report("first", 0)
        bring("fourth", 3)
        assert [has_report("first", 0), *(has_report("third", rank) for rank in range(4))] == [
            False,
            False,
            False,
            True,
            True,
        ]
