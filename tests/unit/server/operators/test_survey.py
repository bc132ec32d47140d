"""What operators are told: who is joined, what was registered, which blocks there are and where; and nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.protocol import Call, Clear, ErrorCode, GroupTerms, Hello, IdentityField, Invalidate, Role
from kvoffload.protocol.survey import (
    UNKNOWN_S,
    BlockPlaces,
    BlocksFound,
    FindBlocks,
    FollowBlock,
    IdentityRead,
    Joined,
    ListJoined,
    ReadIdentity,
    ReadReport,
    ReportRead,
)
from kvoffload.server import DomainTerms
from kvoffload.server.operators import survey
from kvoffload.server.outbox import Later
from kvoffload.server.sessions.domain import TenantTerms
from kvoffload.server.sessions.session import Guest
from tests.kit.cache.cache_model import HYBRID, PLAIN, fingerprint, make_chain
from tests.kit.server.explained import store
from tests.kit.server.harness import UID, Client, Server, code_of, core_terms, numbers

TERMS = core_terms(operator_uids=frozenset({UID}))


def find(operator: Client, message: FindBlocks) -> BlocksFound:
    """It is looked for beside the loop."""
    server = operator.server
    operator.number += 1
    call = Call(message=message, number=operator.number, session=operator.session, expires_ns=0)
    [later] = server.core.handle(operator.key, call, server.now_ns)
    assert isinstance(later, Later)
    answer = server.deliver(server.core.finish(later, later.find), key=operator.key)
    assert isinstance(answer, BlocksFound), answer
    return answer


def follow(operator: Client, engine: Client, block_hash: bytes) -> BlockPlaces:
    answer = operator.ask(FollowBlock(name_space=engine.name_space, block_hash=block_hash))
    assert isinstance(answer, BlockPlaces), answer
    return answer


@pytest.mark.parametrize(
    "message",
    [
        ListJoined(),
        ReadReport(engine="a"),
        ReadIdentity(place=0),
        FindBlocks(),
        FollowBlock(name_space=0, block_hash=bytes(32)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_only_operators_are_told(message: Any) -> None:
    with Server(terms=core_terms(operator_token="secret")) as server:
        observer = server.process("top", uid=77).watch()
        assert code_of(observer.ask(message)) is ErrorCode.NOT_ALLOWED


def test_all_processes_and_what_their_sessions_hold() -> None:
    tenants = (TenantTerms(name="own"), TenantTerms(name="other"))
    with Server(terms=TERMS, domains=[DomainTerms(name="main", tenants=tenants)]) as server:
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
    with Server(terms=TERMS) as server:
        server.process("alone").join(PLAIN, report=b"all of it")
        [engine, _] = server.process("inspect").watch().ask(ListJoined()).processes
        assert (engine.role, engine.has_report) == (Role.SCHEDULER, True)


def test_who_comes_over_tcp_is_listed_too() -> None:
    with Server(terms=TERMS) as server:
        hello = Call(message=Hello(protocol_min=1, protocol_max=1), number=1, session=0, expires_ns=0)
        server.core.handle_guest(b"guest", hello, Guest(domain="main", name="far"), server.now_ns)
        told = server.process("inspect").watch().ask(ListJoined())
        [guest] = [one for one in told.processes if not one.pid]
        assert (guest.role, guest.engine, guest.uid) == (Role.OBSERVER, "", 2**32 - 1)


def test_what_a_worker_registered_is_read_by_its_rank() -> None:
    with Server(terms=TERMS) as server:
        for rank in range(2):
            server.process("first", role=Role.WORKER).join(PLAIN, rank=rank, ranks=2, report=b"rank %d" % rank)
        operator = server.process("inspect").watch()
        assert operator.ask(ReadReport(engine="first", rank=1)) == ReportRead(report=b"rank 1")
        assert operator.ask(ReadReport(engine="first", rank=2)) == ReportRead(report=b"")
        assert operator.ask(ReadReport(engine="second")) == ReportRead(report=b"")


def test_reports_are_bounded_and_the_oldest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "MAX_REPORT_BYTES", 100)
    with Server(terms=TERMS) as server:
        for name in ("a", "b", "c"):
            server.process(name, role=Role.WORKER).join(PLAIN, report=name.encode() * 40)
        operator = server.process("inspect").watch()
        kept = [operator.ask(ReadReport(engine=name)).report for name in ("a", "b", "c")]
        assert [len(report) for report in kept] == [0, 40, 40]


def test_identities_are_told_with_their_geometry() -> None:
    made_of = (IdentityField(name="model", value="made-up"),)
    with Server(terms=TERMS) as server:
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


def test_blocks_are_found_by_the_beginning_of_their_names() -> None:
    with Server(terms=TERMS) as server:
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
    with Server(terms=TERMS) as server:
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
    with Server(terms=TERMS) as server:
        operator = server.process("inspect").watch()
        assert code_of(operator.ask(FollowBlock(name_space=7, block_hash=bytes(32)))) is ErrorCode.NOT_FOUND


def test_before_there_is_memory() -> None:
    with Server(terms=TERMS, memory=None) as server:
        operator = server.process("inspect").watch()
        assert operator.ask(ReadIdentity(place=0)) == IdentityRead(total=0)
        assert operator.ask(ListJoined()).total == 1
        assert code_of(operator.ask(FindBlocks())) is ErrorCode.BUSY
        assert code_of(operator.ask(FollowBlock(name_space=0, block_hash=bytes(32)))) is ErrorCode.NOT_FOUND
