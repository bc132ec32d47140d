"""Rows of what a server tells: played by hand, so that there are as many as one wants."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kvoffload.client.inspector import Inspector
from kvoffload.errors import ServerError
from kvoffload.protocol import (
    AgentSession,
    AgentSessions,
    Counts,
    GroupTerms,
    IdentityField,
    Insight,
    Inspect,
    ListAgentSessions,
    MemorySize,
    Role,
    Stats,
)
from kvoffload.protocol.hints import ListRetained, Retained, RetainedPrefix
from kvoffload.protocol.limits import ARRAY_ITEMS
from kvoffload.protocol.message import Reply, Request
from kvoffload.protocol.survey import (
    UNKNOWN_S,
    BlockPlaces,
    BlocksFound,
    FindBlocks,
    FollowBlock,
    IdentityRead,
    Joined,
    JoinedProcess,
    ListJoined,
    ReadIdentity,
    ReadReport,
    ReportRead,
)
from kvoffload.types import ReuseRule

TOKEN = "the operator's"
MODEL = IdentityRead(
    total=2,
    name_space=3,
    fingerprint=b"\xab" * 32,
    used_bytes=5,
    hash_algorithm="sha256",
    hash_block_size=16,
    ranks=2,
    groups=(GroupTerms(record_bytes=64, block_size=16, reuse=ReuseRule.WINDOW, window=40, shards=2),),
    identity=(IdentityField(name="model", value="made-up"),),
)
COUNTS = Counts(
    capacity_bytes=4000,
    used_bytes=0,
    readable=0,
    reserved=0,
    quarantined=0,
    leases=0,
    sessions=0,
    namespaces=0,
    index_bytes=0,
    hits=0,
    misses=0,
    refused=0,
    duplicates=0,
    evicted=0,
    mismatches=0,
    moved_bytes=0,
    lost_touches=0,
)
NOTHING_ASKED = Insight(outcomes=(), errors=(), timings=(), asked_blocks=0, distinct_blocks=0, saved_us=0)
OTHER = IdentityRead(total=2, name_space=4, fingerprint=b"\xcd" * 32)


def pack(*numbers: int) -> bytes:
    return np.array(numbers, "<u8").tobytes()


@dataclass
class PlayedServer:
    processes: tuple[JoinedProcess, ...] = ()
    identities: tuple[IdentityRead, ...] = (MODEL, OTHER)
    agents: tuple[AgentSession, ...] = ()
    retained: tuple[RetainedPrefix, ...] = ()
    insight: Insight = NOTHING_ASKED
    asked: list[Request] = field(default_factory=list)

    def look_into(self, message: Request) -> Reply:
        self.asked.append(message)
        match message:
            case ListAgentSessions():
                told = self.agents[message.first : message.first + ARRAY_ITEMS]
                return AgentSessions(total=len(self.agents), sessions=told)
            case ListJoined():
                shown = self.processes[message.first : message.first + ARRAY_ITEMS]
                return Joined(total=len(self.processes), processes=shown)
            case ReadReport():
                return ReportRead(report=f"{message.engine} {message.rank}".encode() if message.rank < 2 else b"")
            case ReadIdentity():
                found = (
                    replace(read, place=at)
                    for at, read in enumerate(self.identities)
                    if at >= message.place and read.fingerprint.hex().startswith(message.identity)
                )
                return next(found, IdentityRead(total=len(self.identities), place=len(self.identities)))
            case ListRetained():
                shown = self.retained[message.first : message.first + ARRAY_ITEMS]
                return Retained(total=len(self.retained), size_bytes=5, limit_bytes=9, prefixes=shown)
            case Inspect():
                return self.insight
            case Stats():
                return COUNTS
            case FindBlocks():
                return BlocksFound(
                    total=9,
                    hashes=b"\1" * 32 + b"\2" * 32,
                    name_spaces=pack(3, 8),
                    groups=pack(0, 1),
                    seconds=pack(7, UNKNOWN_S),
                    leases=pack(1, 0),
                    used=pack(1, 0),
                )
        assert isinstance(message, FollowBlock)
        return BlockPlaces(
            in_memory=b"\1\0\0" if message.name_space == 3 else b"\0",
            seconds=pack(7, UNKNOWN_S, UNKNOWN_S) if message.name_space == 3 else pack(UNKNOWN_S),
            left=b"\0\1\0" if message.name_space == 3 else b"\0",
            left_seconds=pack(0, 30, 0) if message.name_space == 3 else pack(0),
            missing_bytes=pack(0, 4096, 0) if message.name_space == 3 else pack(0),
            tiers=("disk", "s3"),
            in_tiers=b"\1\0\0" + b"\0\0\1" if message.name_space == 3 else b"\0\0",
        )


def worker(engine: str, rank: int = 0, *, has_report: bool = True) -> JoinedProcess:
    return JoinedProcess(engine=engine, role=Role.WORKER, rank=rank, pid=1, uid=2, has_report=has_report)


def test_all_pages_of_sessions_are_read_and_the_token_is_told() -> None:
    server = PlayedServer(processes=tuple(worker(f"engine {at}") for at in range(2 * ARRAY_ITEMS + 1)))
    rows = Inspector(server.look_into, token=TOKEN).list_sessions()
    assert [row["engine"] for row in rows] == [f"engine {at}" for at in range(2 * ARRAY_ITEMS + 1)]
    assert len(server.asked) == 3
    assert {message.token for message in server.asked if isinstance(message, ListJoined)} == {TOKEN}


def test_all_pages_of_agents_sessions_are_read() -> None:
    agents = tuple(
        AgentSession(name=f"agent {at}", turns=2, asked=30, promised=20, lower=5, saved_us=1_500_000, read_bytes=64)
        for at in range(ARRAY_ITEMS + 1)
    )
    server = PlayedServer(agents=agents)
    rows = Inspector(server.look_into, token=TOKEN).list_agents()
    assert [row.pop("session") for row in rows] == [one.name for one in agents]
    assert rows[0] == {
        "turns": 2,
        "asked_tokens": 30,
        "hit_tokens": 20,
        "from_tiers": 5,
        "saved_s": 1.5,
        "read_bytes": 64,
    }
    assert {message.token for message in server.asked if isinstance(message, ListAgentSessions)} == {TOKEN}


def test_who_is_not_of_this_machine_has_no_numbers_of_it() -> None:
    guest = JoinedProcess(engine="", role=Role.OBSERVER, rank=0, pid=0, uid=2**32 - 1, is_open=False)
    [row] = Inspector(PlayedServer(processes=(guest,)).look_into).list_sessions()
    assert (row["pid"], row["uid"], row["state"]) == (None, None, "ending")


def test_identities_are_rows() -> None:
    first, second = Inspector(PlayedServer().look_into).list_identities()
    assert first["made_of"] == {"model": "made-up"}
    assert first["groups"] == [{"block_tokens": 16, "record_bytes": 64, "shards": 2, "reuse": "window", "window": 40}]
    assert (second["hash_algorithm"], second["ranks"], second["groups"]) == (None, None, [])
    assert Inspector(PlayedServer(identities=()).look_into).list_identities() == []


def test_the_report_of_the_only_engine_needs_no_name() -> None:
    both_ranks = (worker("a", 0), worker("a", 1), worker("silent", has_report=False))
    assert Inspector(PlayedServer(processes=both_ranks).look_into).read_report(rank=1) == "a 1"
    assert Inspector(PlayedServer().look_into).read_report("b") == "b 0"
    with pytest.raises(ServerError, match="no report of rank 2 of engine 'a'"):
        Inspector(PlayedServer(processes=both_ranks).look_into).read_report(rank=2)
    with pytest.raises(ServerError, match="2 engines told what they registered: a, b"):
        Inspector(PlayedServer(processes=(worker("a"), worker("b"))).look_into).read_report()
    with pytest.raises(ServerError, match="0 engines"):
        Inspector(PlayedServer().look_into).read_report()


def test_blocks_have_their_models_names() -> None:
    rows, total = Inspector(PlayedServer().look_into).find_blocks(b"\1", 2)
    assert total == 9
    assert rows[0] == {
        "hash": "01" * 32,
        "identity": "made-up abababababab",
        "group": 0,
        "stored_s": 7,
        "leases": 1,
        "loaded": True,
    }
    assert (rows[1]["identity"], rows[1]["stored_s"], rows[1]["loaded"]) == ("8", None, False)


def test_a_block_is_told_of_where_something_is_known() -> None:
    rows = Inspector(PlayedServer().look_into).follow_block(b"\1" * 32)
    assert [(row["group"], row["where"]) for row in rows] == [(0, ["memory", "disk"]), (1, []), (2, ["s3"])]
    assert [row["stored_s"] for row in rows] == [7, None, None]
    assert [(row["left_memory"], row["left_s"], row["missing_bytes"]) for row in rows] == [
        (None, None, None),
        ("evicted", 30, 4096),
        (None, None, None),
    ]


def test_all_that_is_retained_is_asked_for_in_parts() -> None:
    prefix = RetainedPrefix(
        session="s",
        engine="e",
        owner="user 7",
        tenant="t",
        fingerprint="ab",
        tokens=64,
        size_bytes=4096,
        ttl_ms=1520,
        priority=2,
        was_used=True,
    )
    server = PlayedServer(retained=(prefix,) * (ARRAY_ITEMS + 1))
    rows, size_bytes, limit_bytes = Inspector(server.look_into, token=TOKEN).list_retained()
    assert (len(rows), size_bytes, limit_bytes) == (ARRAY_ITEMS + 1, 5, 9)
    assert rows[0] == {
        "session": "s",
        "engine": "e",
        "owner": "user 7",
        "tenant": "t",
        "identity": "ab",
        "tokens": 64,
        "size_bytes": 4096,
        "ends_s": 1.5,
        "priority": 2,
        "loaded": True,
    }
    assert [message.token for message in server.asked if isinstance(message, ListRetained)] == [TOKEN] * 2
    assert Inspector(PlayedServer().look_into).list_retained() == ([], 5, 9)


def test_other_memories_are_rows_with_shares() -> None:
    sizes = (
        MemorySize(quarters=1, hit_blocks=10, hit_bytes=5),
        MemorySize(quarters=16, hit_blocks=20, hit_bytes=40),
    )
    told = replace(NOTHING_ASKED, curve_blocks=30, curve_bytes=50, curve_one_in=8, curve=sizes)
    rows, asked, one_in = Inspector(PlayedServer(insight=told).look_into).list_memories()
    assert (asked, one_in) == (30, 8)
    assert rows == [
        {"memory": 0.25, "size_bytes": 1000, "blocks_hit": 0.3333, "bytes_hit": 0.1},
        {"memory": 4.0, "size_bytes": 16_000, "blocks_hit": 0.6667, "bytes_hit": 0.8},
    ]
    assert Inspector(PlayedServer().look_into).list_memories() == ([], 0, 1)


def test_joined_engines_are_counted_by_their_kind_and_model() -> None:
    def told(byte: bytes, **parts: str) -> IdentityRead:
        fields = tuple(IdentityField(name=name, value=value) for name, value in parts.items())
        return replace(MODEL, fingerprint=byte * 32, identity=fields)

    def process(engine: str, fingerprint: str, **more: Any) -> JoinedProcess:
        return replace(worker(engine), fingerprint=fingerprint, **more)

    server = PlayedServer(
        identities=(
            told(b"\x01", engine="vllm 0.31.0", model="m"),
            OTHER,
            told(b"\x02", engine="sglang 0.5.23", model="m"),
            told(b"\x03", engine="sglang 0.5.23", model="m"),
        ),
        processes=(
            process("a", "010101"),
            process("a", "010101"),
            process("rank 0", "020202"),
            process("rank 1", "030303"),
            process("it has told nothing", "cdcdcd"),
            process("ended", "010101", is_open=False),
            worker("observer"),
        ),
    )
    survey = Inspector(server.look_into, token=TOKEN).survey_engines()
    assert survey.list_kinds() == [
        {"engine": "vllm 0.31.0", "model": "m", "sessions": 1, "processes": 2},
        {"engine": "sglang 0.5.23", "model": "m", "sessions": 2, "processes": 2},
        {"engine": "", "model": "", "sessions": 1, "processes": 1},
    ]
    assert survey.find_differing() == ()
