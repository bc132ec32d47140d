"""What operators look into: who is joined, what workers registered, identities, and where single blocks are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np

from kvoffload.cache import LocalCache
from kvoffload.protocol import Call, ClientMessage, ErrorCode, Register, Role, ServerMessage
from kvoffload.protocol.limits import ARRAY_ITEMS, MAX_BATCH
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
from kvoffload.server.outbox import FoundLater
from kvoffload.server.refusal import refuse
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.session import Connection, EngineSession
from kvoffload.server.tiering.looks import Found
from kvoffload.server.tiering.requests import TierRequests
from kvoffload.units import MIB

MAX_REPORT_BYTES = 16 * MIB
"""Of all reports together; the oldest give way."""
GUEST_BLOCKS = 1024
"""That a client over TCP is told of at once: what it does not read is bounded in bytes."""
MAX_WAIT_MS = 10_000
_SHOWN_DIGITS = 12
_NOBODY = 2**32 - 1

_TELLS = (Role.OBSERVER, Role.SCHEDULER, Role.WORKER)

_Answer: TypeAlias = ServerMessage | Callable[[], FoundLater]


class Survey:
    """Belongs to the thread of the server's core. Whoever asks is an operator."""

    def __init__(self, sessions: Iterable[EngineSession], tiers: TierRequests) -> None:
        self._sessions = sessions
        self._tiers = tiers
        self._reports: dict[tuple[int, int], bytes] = {}
        """By session and rank; the oldest first."""
        self.handlers: Mapping[type[ClientMessage], Callable[[Connection, ClientMessage], _Answer]] = dict.fromkeys(
            (ListJoined, ReadReport, ReadIdentity, FindBlocks), self._serve
        )

    def keep_report(self, session: EngineSession, message: Register) -> None:
        """What a process says that it registered."""
        if not message.report:
            return
        key = session.number, message.rank
        self._reports.pop(key, None)
        self._reports[key] = message.report
        while sum(map(len, self._reports.values())) > MAX_REPORT_BYTES:
            del self._reports[next(iter(self._reports))]

    def follow(self, connection: Connection, call: Call, now_ns: int) -> _Answer:
        """Where a block is. The answer comes when the tiers have said what they have."""
        message, domain = call.message, connection.session.domain
        assert isinstance(message, FollowBlock)
        if domain.cache is None or message.name_space not in domain.fingerprints:
            return refuse(message, ErrorCode.NOT_FOUND, f"there is no namespace {message.name_space}")
        cache, chain = domain.cache, self._tiers.find_chain(domain.name)
        groups = range(len(domain.geometries[message.name_space].groups))

        def ask_tiers(places: BlockPlaces) -> BlockPlaces | None:
            if chain is None:
                return places
            kinds = tuple(tier.terms.name for tier in chain.tiers)
            chain.find_places(
                message.name_space,
                message.block_hash,
                now_s=now_ns / 1e9,
                wait_s=min(message.wait_ms, MAX_WAIT_MS) / 1000,
                then=lambda found: self._tiers.answer(connection.key, call.number, _add_tiers(places, kinds, found)),
            )
            return None

        def look() -> FoundLater:
            return partial(ask_tiers, _describe_memory(cache, message.name_space, groups, message.block_hash))

        return look

    def _serve(self, connection: Connection, message: ClientMessage) -> _Answer:
        domain = connection.session.domain
        match message:
            case ListJoined():
                rows = [row for session in self._of(domain) for row in self._describe(session)]
                return Joined(total=len(rows), processes=tuple(rows[message.first : message.first + ARRAY_ITEMS]))
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

    def _of(self, domain: Domain, engine: str = "") -> Iterator[EngineSession]:
        for session in self._sessions:
            if session.domain is domain and engine in ("", session.engine):
                yield session

    def _describe(self, session: EngineSession) -> Iterator[JoinedProcess]:
        """A row for each process; a guest has none, and one row."""
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
            engine=session.engine,
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
    known = domain.fingerprints
    found = next(islice(known.items(), message.place, None), None)
    if found is None:
        return IdentityRead(total=len(known))
    name_space, fingerprint = found
    used_by = {} if domain.cache is None else domain.cache.stats.used_by
    read = partial(
        IdentityRead,
        total=len(known),
        name_space=name_space,
        fingerprint=fingerprint,
        used_bytes=used_by.get(name_space, 0),
    )
    register = domain.registers.get(fingerprint)
    if register is None:
        return read()
    return read(
        hash_algorithm=register.hash_algorithm,
        hash_block_size=register.hash_block_size,
        ranks=register.ranks,
        groups=register.groups,
        identity=register.identity,
    )


def find_blocks(cache: LocalCache, message: FindBlocks, most: int) -> ServerMessage:
    """Finds blocks, on whatever thread it is called."""
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


def _add_tiers(places: BlockPlaces, kinds: tuple[str, ...], found: list[Found]) -> BlockPlaces:
    in_tiers = b"".join(bytes(bool(group[0]) for group in tier) for tier in found)
    return replace(places, tiers=kinds if found else (), in_tiers=in_tiers)


def _pack(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, "<u8").tobytes()
