"""A cache server as its operator sees it: who is joined, what they registered, and single blocks. As plain rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import numpy as np

from kvoffload.cache import Leaving
from kvoffload.client.insight import read_insight
from kvoffload.errors import ServerError
from kvoffload.protocol import AgentSession, AgentSessions, Counts, Insight, Inspect, ListAgentSessions, Stats
from kvoffload.protocol.differences import describe_pair, differ_by_setting, tell_differences
from kvoffload.protocol.hints import ListRetained, Retained, RetainedPrefix
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
from kvoffload.types import HASH_BYTES

Row = dict[str, Any]
_Kind = TypeVar("_Kind", bound=Reply)
_SHOWN_DIGITS = 12
_NOBODY = 2**32 - 1


MAX_COMPARED = 16
"""Number of identities of joined engines, the latest ones, that are compared with each other."""


@dataclass(frozen=True, kw_only=True)
class EngineSurvey:
    """The processes that have joined a server, and what they told about their identities."""

    processes: Sequence[JoinedProcess]
    identities: Mapping[str, IdentityRead]
    """By the first letters of their fingerprints, as processes have them. The latest `MAX_COMPARED`."""

    def find_differing(self) -> tuple[str, ...]:
        """Returns a line for each pair of engines that have the same weights and share no blocks because a setting
        differs."""
        known = list(self.identities.values())
        pairs = ((one, other) for at, one in enumerate(known) for other in known[at + 1 :])
        return tuple(describe_pair(*pair) for pair in pairs if differ_by_setting(*pair))

    def list_kinds(self) -> list[Row]:
        """A row for each kind of engine, by its name, its version and its model, with the number of its sessions and
        of their processes. An empty name is an engine that has not told it."""
        found: dict[tuple[str, str], list[str]] = {}
        for process in self.processes:
            if process.fingerprint and process.is_open:
                read = self.identities.get(process.fingerprint)
                parts = {} if read is None else {part.name: part.value for part in read.identity}
                found.setdefault((parts.get("engine", ""), parts.get("model", "")), []).append(process.engine)
        return [
            {"engine": kind, "model": model, "sessions": len(set(names)), "processes": len(names)}
            for (kind, model), names in found.items()
        ]


NO_ENGINES = EngineSurvey(processes=(), identities={})


def survey_engines(token: str = "") -> Generator[Request, Reply, EngineSurvey]:
    """Yields what to ask the server, as an operator, and takes the replies."""
    joined = yield ListJoined(first=0, token=token)
    assert isinstance(joined, Joined)
    names = list(dict.fromkeys(one.fingerprint for one in joined.processes if one.fingerprint))[-MAX_COMPARED:]
    known: dict[str, IdentityRead] = {}
    for name in names:
        read = IdentityRead(total=1, place=-1)
        while not read.fingerprint and read.place + 1 < read.total:
            found = yield ReadIdentity(place=read.place + 1, identity=name, token=token)
            assert isinstance(found, IdentityRead)
            read = found
        if read.ranks:
            known[name] = read
    return EngineSurvey(processes=joined.processes, identities=known)


class Inspector:
    """Every call asks the server and waits, for the client's call deadline at most. ServerError: it refuses."""

    def __init__(self, look_into: Callable[[Request], Reply], *, token: str = "") -> None:
        """Takes a client's `look_into`, and the operator's `token`, which the server's own user does not need."""
        self._look_into = look_into
        self._token = token

    def list_sessions(self) -> list[Row]:
        """A row for each process."""
        return [_describe_process(process) for process in self._processes()]

    def list_agents(self) -> list[Row]:
        """A row for each agent's session that the server remembers, the one with the latest turn first."""
        rows: list[Row] = []
        while True:
            answer = self._ask(ListAgentSessions(first=len(rows), token=self._token), AgentSessions)
            rows += map(describe_agent, answer.sessions)
            if len(rows) >= answer.total or not answer.sessions:
                return rows

    def list_identities(self) -> list[Row]:
        """A row for each identity, in the order in which they came."""
        return [_describe_identity(read) for read in self._identities()]

    def survey_engines(self) -> EngineSurvey:
        """Reads which engines have joined."""
        steps, reply = survey_engines(self._token), None
        while True:
            try:
                message = next(steps) if reply is None else steps.send(reply)
            except StopIteration as end:
                survey: EngineSurvey = end.value
                return survey
            reply = self._look_into(message)

    def list_differences(self) -> list[Row]:
        """Returns a row for each part in which an identity differs from one that came before it, of those that have the
        same weights; all pairs, if there are no such."""
        known = [read for read in self._identities() if read.ranks]
        pairs = [(one, other) for at, one in enumerate(known) for other in known[:at]]
        alike = [pair for pair in pairs if differ_by_setting(*pair)]
        return [
            {
                "identity": _name(one),
                "differs from": _name(other),
                "part": told.name,
                "here": told.ours if told.is_readable else told.ours[:_SHOWN_DIGITS],
                "there": told.theirs if told.is_readable else told.theirs[:_SHOWN_DIGITS],
            }
            for one, other in alike or pairs
            for told in tell_differences(one, other)
        ]

    def read_report(self, engine: str = "", rank: int = 0) -> str:
        """Returns what a worker of this engine registered; without a name, of the only engine that has told."""
        if not engine:
            engines = sorted({one.engine for one in self._processes() if one.has_report})
            if len(engines) != 1:
                raise ServerError(
                    f"{len(engines)} engines told what they registered{': ' if engines else ''}{', '.join(engines)}",
                    remedy="name one of them" if engines else "an engine tells when it starts with kvoffload",
                )
            (engine,) = engines
        text = self._ask(ReadReport(engine=engine, rank=rank, token=self._token), ReportRead).report.decode()
        if not text:
            raise ServerError(
                f"there is no report of rank {rank} of engine {engine!r}", remedy="see `kvoffload inspect sessions`"
            )
        return text

    def find_blocks(self, prefix: bytes = b"", limit: int = 0) -> tuple[list[Row], int]:
        """Blocks in memory whose hashes begin so, `limit` at most; and how many there are. 0: as many as fit."""
        found = self._ask(FindBlocks(prefix=prefix, count=limit, token=self._token), BlocksFound)
        names = {read.name_space: _name(read) for read in self._identities()}
        columns = [_numbers(column) for column in (found.name_spaces, found.groups, found.seconds, found.leases)]
        rows = [
            {
                "hash": found.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES].hex(),
                "identity": names.get(name_space, str(name_space)),
                "group": group,
                "stored_s": _known(seconds),
                "leases": leases,
                "loaded": bool(used),
            }
            for at, (name_space, group, seconds, leases, used) in enumerate(
                zip(*columns, _numbers(found.used), strict=True)
            )
        ]
        return rows, found.total

    def list_retained(self) -> tuple[list[Row], int, int]:
        """Returns rows of the retained prefixes, the first to give way first; their bytes in all; and the limit in
        bytes."""
        told: list[Retained] = []
        while not told or (told[-1].prefixes and sum(len(one.prefixes) for one in told) < told[-1].total):
            first = sum(len(one.prefixes) for one in told)
            told.append(self._ask(ListRetained(first=first, token=self._token), Retained))
        rows = [_describe_retained(prefix) for one in told for prefix in one.prefixes]
        return rows, told[-1].size_bytes, told[-1].limit_bytes

    def list_memories(self) -> tuple[list[Row], int, int]:
        """Returns a row for each memory size that the server follows, or none if no block was asked for; the number of
        blocks behind the shares, old ones counting less; and the sampling rate: one block in so many is followed."""
        curve = read_insight(self._ask(Inspect(), Insight)).curve
        memory_bytes = self._ask(Stats(), Counts).capacity_bytes
        shown = curve.points if curve.asked_blocks else ()
        rows: list[Row] = [
            {
                "memory": one.memory,
                "size_bytes": round(one.memory * memory_bytes),
                "blocks_hit": round(one.hit_blocks / curve.asked_blocks, 4),
                "bytes_hit": round(one.hit_bytes / max(curve.asked_bytes, 1), 4),
            }
            for one in shown
        ]
        return rows, curve.asked_blocks, curve.one_in

    def follow_block(self, block_hash: bytes) -> list[Row]:
        """A row for each group of each identity that knows anything of it."""
        rows: list[Row] = []
        for read in self._identities():
            message = FollowBlock(name_space=read.name_space, block_hash=block_hash, token=self._token)
            rows += _describe_places(_name(read), self._ask(message, BlockPlaces))
        return rows

    def _processes(self) -> Iterator[JoinedProcess]:
        seen = 0
        while True:
            answer = self._ask(ListJoined(first=seen, token=self._token), Joined)
            yield from answer.processes
            seen += len(answer.processes)
            if seen >= answer.total or not answer.processes:
                return

    def _identities(self) -> Iterator[IdentityRead]:
        for place in count():
            read = self._ask(ReadIdentity(place=place, token=self._token), IdentityRead)
            if read.fingerprint:
                yield read
            if place + 1 >= read.total:
                return

    def _ask(self, message: Request, kind: type[_Kind]) -> _Kind:
        answer = self._look_into(message)
        assert isinstance(answer, kind), answer
        return answer


def describe_agent(session: AgentSession) -> Row:
    """Returns a row with what the turns of an agent's session asked for, and the hits."""
    return {
        "session": session.name,
        "turns": session.turns,
        "asked_tokens": session.asked,
        "hit_tokens": session.promised,
        "from_tiers": session.lower,
        "saved_s": round(session.saved_us / 1e6, 3),
        "read_bytes": session.read_bytes,
    }


def _describe_process(process: JoinedProcess) -> Row:
    return {
        "engine": process.engine,
        "role": process.role.name.lower(),
        "rank": process.rank,
        "pid": process.pid or None,
        "uid": None if process.uid == _NOBODY else process.uid,
        "state": "open" if process.is_open else "ending",
        "identity": process.fingerprint,
        "tenant": process.tenant,
        "held_bytes": process.held_bytes,
        "report": process.has_report,
    }


def _describe_identity(read: IdentityRead) -> Row:
    """Describes an identity, without what the server was not told."""
    groups = [
        {
            "block_tokens": group.block_size,
            "record_bytes": group.record_bytes,
            "shards": group.shards,
            "reuse": group.reuse.label,
            "window": group.window or None,
        }
        for group in read.groups
    ]
    return {
        "identity": read.fingerprint.hex()[:_SHOWN_DIGITS],
        "fingerprint": read.fingerprint.hex(),
        "used_bytes": read.used_bytes,
        "hash_algorithm": read.hash_algorithm or None,
        "hash_block_tokens": read.hash_block_size or None,
        "ranks": read.ranks or None,
        "groups": groups,
        "made_of": {part.name: part.value for part in read.identity},
    }


def _describe_retained(prefix: RetainedPrefix) -> Row:
    return {
        "session": prefix.session,
        "engine": prefix.engine,
        "owner": prefix.owner,
        "tenant": prefix.tenant,
        "identity": prefix.fingerprint,
        "tokens": prefix.tokens,
        "size_bytes": prefix.size_bytes,
        "ends_s": round(prefix.ttl_ms / 1000, 1),
        "priority": prefix.priority,
        "loaded": prefix.was_used,
    }


def _describe_places(identity: str, places: BlockPlaces) -> Iterator[Row]:
    """Yields a row for each group of an identity that knows something of the block."""
    columns = map(_numbers, (places.seconds, places.left_seconds, places.missing_bytes))
    groups = len(places.in_memory)
    for group, (seconds, left_s, missing_bytes) in enumerate(zip(*columns, strict=True)):
        in_tiers = [tier for at, tier in enumerate(places.tiers) if places.in_tiers[at * groups + group]]
        in_memory, left = bool(places.in_memory[group]), places.left[group]
        if in_memory or left or in_tiers:
            yield {
                "identity": identity,
                "group": group,
                "where": (["memory"] if in_memory else []) + in_tiers,
                "stored_s": _known(seconds) if in_memory else None,
                "left_memory": Leaving(left).name.lower() if left else None,
                "left_s": left_s if left else None,
                "missing_bytes": missing_bytes if left else None,
            }


def _name(read: IdentityRead) -> str:
    """Returns the model's name, if the engine told it, and the first digits of the fingerprint."""
    model = next((part.value for part in read.identity if part.name == "model"), "")
    return f"{model} {read.fingerprint.hex()[:_SHOWN_DIGITS]}".strip()


def _known(seconds: int) -> int | None:
    return None if seconds == UNKNOWN_S else seconds


def _numbers(column: bytes) -> list[int]:
    return [int(number) for number in np.frombuffer(column, "<u8")]
