"""Lets operators see which engines are joined, what workers registered, which identities there are, and where blocks
and prompts are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np

from kvoffload.cache import LocalCache, find_reach
from kvoffload.hash_rows import as_rows
from kvoffload.protocol import Call, ClientMessage, ErrorCode, Register, Role, ServerMessage
from kvoffload.protocol.limits import MAX_BATCH, NAME_BYTES
from kvoffload.protocol.opening import find_model
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
    JoinedProcess,
    ListJoined,
    PrefixFound,
    ReadIdentity,
    ReadReport,
    ReportRead,
)
from kvoffload.server.common.refusal import refuse
from kvoffload.server.common.steps import Find, FoundLater, run_steps
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.session import Connection, EngineSession
from kvoffload.server.sessions.tier_requests import TierRequests
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.counts import cut_text
from kvoffload.server.tiering.looks import Found
from kvoffload.server.tiering.seen import Seen, bound_tokens, count_looks, look_for, serve_in_parts
from kvoffload.units import MIB

MAX_REPORT_BYTES = 16 * MIB
"""Bytes of all reports together. Beyond it the oldest are dropped."""
MAX_REPORTS = 4096
"""Number of all reports together. Beyond it the oldest are dropped."""
GUEST_BLOCKS = 1024
"""Number of blocks that a client over TCP is told of at once, so that its unread answers are bounded in bytes."""
MAX_WAIT_MS = 10_000
LISTED = 64
"""Number of processes in one answer."""
LOOKED_AT = 64
"""Number of identities among which one question looks for one."""
_SHOWN_DIGITS = 12
_NOBODY = 2**32 - 1

_TELLS = (Role.OBSERVER, Role.SCHEDULER, Role.WORKER)

_Answer: TypeAlias = ServerMessage | Find | None
"""An answer, or a callable that finds it. None: the answer comes later."""
_Tell: TypeAlias = Callable[[ServerMessage], None]


class Survey:
    """Belongs to the thread of the server's core. All callers are operators."""

    def __init__(self, sessions: Iterable[EngineSession], tiers: TierRequests) -> None:
        self._sessions = sessions
        self._tiers = tiers
        self._reports: dict[tuple[int, int], bytes] = {}
        """Reports by session and rank, the oldest first."""
        self._report_bytes = 0
        self.handlers: Mapping[type[ClientMessage], Callable[[Connection, ClientMessage], _Answer]] = dict.fromkeys(
            (ListJoined, ReadReport, ReadIdentity, FindBlocks), self._serve
        )

    def keep_report(self, session: EngineSession, message: Register) -> None:
        """Keeps a process's report of what it registered."""
        if not message.report:
            return
        key = session.number, message.rank
        self._drop(key)
        self._reports[key] = message.report
        self._report_bytes += len(message.report)
        while len(self._reports) > MAX_REPORTS or self._report_bytes > MAX_REPORT_BYTES:
            self._drop(next(iter(self._reports)))

    def tick(self) -> None:
        """Drops the reports of sessions that have ended. The event loop calls it periodically."""
        present = {session.number for session in self._sessions}
        for key in [key for key in self._reports if key[0] not in present]:
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        self._report_bytes -= len(self._reports.pop(key, b""))

    def find(self, connection: Connection, call: Call, now_ns: int) -> _Answer:
        """Finds where a block is, or how much of a prompt is there. The answer comes when the tiers have said what they
        have."""
        message, domain = call.message, connection.session.domain
        assert isinstance(message, FollowBlock | FindPrefix)
        if domain.cache is None or message.name_space not in domain.fingerprints:
            return refuse(message, ErrorCode.NOT_FOUND, f"there is no namespace {message.name_space}")
        answer = partial(self._tiers.answer, connection.key, call.number)
        if isinstance(message, FollowBlock):
            return _follow(domain, message, now_ns / 1e9, answer)
        return _find_prefix(domain, message, now_ns / 1e9, answer)

    def _serve(self, connection: Connection, message: ClientMessage) -> _Answer:
        domain = connection.session.domain
        match message:
            case ListJoined():
                return self._list_joined(domain, message.first)
            case ReadReport():
                keys = [(session.number, message.rank) for session in self._of(domain, message.engine)]
                return ReportRead(report=next((self._reports[key] for key in keys if key in self._reports), b""))
            case ReadIdentity():
                return _read_identity(domain, message)
            case FindBlocks():
                if domain.cache is None:
                    return refuse(message, ErrorCode.BUSY, "the memory is not there yet")
                most = MAX_BATCH if connection.session.guest is None else GUEST_BLOCKS
                return partial(find_blocks, domain.cache, message, most)
        return refuse(message, ErrorCode.UNKNOWN_OPERATION, "is not served here")

    def _list_joined(self, domain: Domain, first: int) -> Joined:
        """Describes only those that are in the answer, of any number of processes."""
        rows: list[JoinedProcess] = []
        total = 0
        for session in self._of(domain):
            count, skipped = len(session.processes) + (session.guest is not None), first - total
            if len(rows) < LISTED and skipped < count:
                rows += islice(self._describe(session), max(skipped, 0), None)
            total += count
        return Joined(total=total, processes=tuple(rows[:LISTED]))

    def _of(self, domain: Domain, engine: str = "") -> Iterator[EngineSession]:
        for session in self._sessions:
            if session.domain is domain and engine in ("", session.engine):
                yield session

    def _describe(self, session: EngineSession) -> Iterator[JoinedProcess]:
        """Yields a row for each process. A guest has no process, and gets one row."""
        registration, cache = session.registration, session.domain.cache
        held_bytes = 0
        if cache is not None and session.cache_session is not None:
            held_bytes = cache.held_bytes(session.cache_session)
        tenant = ""
        if registration is not None:
            names = {number: name for name, number in registration.tenants.items()}
            tenant = names.get(registration.tenant, "")
        row = partial(
            JoinedProcess,
            engine=session.engine if session.guest is None else cut_text(session.guest.name, NAME_BYTES),
            is_open=session.is_open,
            fingerprint="" if registration is None else registration.register.fingerprint.hex()[:_SHOWN_DIGITS],
            tenant=tenant,
            held_bytes=held_bytes,
        )
        if session.guest is not None:
            yield row(role=Role.OBSERVER, rank=0, pid=0, uid=_NOBODY)
        # An engine of one process has no workers.
        telling = max((process.role for process in session.processes.values()), key=_TELLS.index, default=None)
        for process in session.processes.values():
            yield row(
                role=process.role,
                rank=process.rank,
                pid=process.peer.pid,
                uid=process.peer.uid,
                has_report=process.role is telling and (session.number, process.rank) in self._reports,
            )


def _read_identity(domain: Domain, message: ReadIdentity) -> ServerMessage:
    known, place = domain.fingerprints, message.place
    for place, found in enumerate(islice(known.items(), message.place, message.place + LOOKED_AT), message.place):
        register = domain.registers.get(found[1])
        model = find_model(() if register is None else register.identity)
        if found[1].hex().startswith(message.identity) and message.model in ("", model):
            return _describe_identity(domain, place, *found)
    return IdentityRead(total=len(known), place=place)


def _describe_identity(domain: Domain, place: int, name_space: int, fingerprint: bytes) -> IdentityRead:
    read = IdentityRead(
        total=len(domain.fingerprints),
        place=place,
        name_space=name_space,
        fingerprint=fingerprint,
        used_bytes=0 if domain.cache is None else domain.cache.used_by(name_space),
    )
    register = domain.registers.get(fingerprint)
    if register is None:
        return read
    return replace(
        read,
        hash_algorithm=register.hash_algorithm,
        hash_block_size=register.hash_block_size,
        ranks=register.ranks,
        groups=register.groups,
        identity=register.identity,
        hash_seed=register.hash_seed,
    )


def find_blocks(cache: LocalCache, message: FindBlocks, most: int) -> ServerMessage:
    """Finds blocks by the beginning of their names. May be called on any thread."""
    found = cache.survey(message.prefix, limit=min(message.count or most, most))
    return BlocksFound(
        total=found.matches,
        hashes=found.hashes,
        name_spaces=found.name_spaces.tobytes(),
        groups=found.groups.tobytes(),
        seconds=found.seconds.tobytes(),
        leases=found.leases.tobytes(),
        used=found.used.tobytes(),
    )


def _follow(domain: Domain, message: FollowBlock, now_s: float, answer: _Tell) -> _Answer:
    cache, chain, space = domain.cache, domain.traffic, domain.find_space(message.name_space)
    assert cache is not None
    rows = [as_rows(message.block_hash) for _ in space.rules]

    def ask_tiers(places: BlockPlaces, seen: Seen | None) -> BlockPlaces | None:
        if chain is None or seen is None:
            return places
        chain.find_places(
            space,
            rows,
            seen,
            now_s=now_s,
            wait_s=_wait_s(message),
            then=lambda found: answer(_add_tiers(places, _kinds(chain), found)),
        )
        return None

    def look() -> FoundLater:
        # Finding which blocks left memory may have to wait for threads that write.
        places = _describe_memory(cache, message.name_space, range(len(rows)), message.block_hash)
        # Tiers may have what memory has, too.
        seen = None if chain is None else run_steps(chain.look_for(space, rows, is_memory_asked=False))
        return partial(ask_tiers, places, seen)

    return look


def _find_prefix(domain: Domain, message: FindPrefix, now_s: float, answer: _Tell) -> _Answer:
    cache, chain, space = domain.cache, domain.traffic, domain.find_space(message.name_space)
    assert cache is not None
    limit = min(message.limit, bound_tokens(space))
    rows = space.chain_rows_of(message.chain, limit)
    reach = partial(find_reach, space.rules, local=0, limit=limit, alignment=message.alignment)

    def ask_tiers(seen: Seen) -> ServerMessage | None:
        in_memory = reach(seen.in_memory)
        if chain is None:
            return PrefixFound(in_memory=in_memory)

        def conclude(found: list[Found | None]) -> None:
            together, reaches = seen.in_memory, []
            for tier in found:
                if tier is not None:
                    together = [known | more for known, more in zip(together, tier, strict=True)]
                reaches.append(NOT_ASKED if tier is None else reach(together))
            answer(PrefixFound(in_memory=in_memory, tiers=_kinds(chain) if found else (), reaches=_pack(reaches)))

        chain.find_places(space, rows, seen, now_s=now_s, wait_s=_wait_s(message), then=conclude)
        return None

    steps = look_for(cache, space, rows, {}) if chain is None else chain.look_for(space, rows)
    return serve_in_parts(steps, ask_tiers, looks=count_looks(space, rows))


def _kinds(chain: TierChain) -> tuple[str, ...]:
    return tuple(tier.settings.name for tier in chain.tiers)


def _wait_s(message: FollowBlock | FindPrefix) -> float:
    return min(message.wait_ms, MAX_WAIT_MS) / 1000


def _describe_memory(cache: LocalCache, name_space: int, groups: range, block_hash: bytes) -> BlockPlaces:
    there = [bool(cache.lookup(name_space, group, block_hash)[0]) for group in groups]
    stored = [cache.find_stored(name_space, group, block_hash)[0] for group in groups]
    left = [cache.find_departed(name_space, group, block_hash)[0] for group in groups]
    return BlockPlaces(
        in_memory=bytes(there),
        seconds=_pack(UNKNOWN_S if seconds is None else seconds for seconds in stored),
        left=bytes(0 if one is None else one.why.value for one in left),
        left_seconds=_pack(0 if one is None else one.seconds_ago for one in left),
        missing_bytes=_pack(0 if one is None else one.missing_bytes for one in left),
    )


def _add_tiers(places: BlockPlaces, kinds: tuple[str, ...], found: list[Found | None]) -> BlockPlaces:
    """Adds what the tiers have. A tier that was not asked counts as having nothing."""
    nothing = bytes(len(places.in_memory))
    in_tiers = b"".join(nothing if tier is None else bytes(bool(group[0]) for group in tier) for tier in found)
    return replace(places, tiers=kinds if found else (), in_tiers=in_tiers)


def _pack(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, "<u8").tobytes()
