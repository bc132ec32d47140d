"""What operators look into: who is joined, what workers registered, identities, and where blocks and prompts are."""

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
from kvoffload.protocol.limits import ARRAY_ITEMS, MAX_BATCH, NAME_BYTES
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
from kvoffload.server.operators.counts import cut_text
from kvoffload.server.outbox import FoundLater
from kvoffload.server.refusal import refuse
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.session import Connection, EngineSession
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.looks import Found
from kvoffload.server.tiering.requests import TierRequests
from kvoffload.server.tiering.terms import TierSpace
from kvoffload.units import MIB

MAX_REPORT_BYTES = 16 * MIB
"""Of all reports together; the oldest give way."""
GUEST_BLOCKS = 1024
"""That a client over TCP is told of at once: what it does not read is bounded in bytes."""
MAX_WAIT_MS = 10_000
_SHOWN_DIGITS = 12
_NOBODY = 2**32 - 1

_TELLS = (Role.OBSERVER, Role.SCHEDULER, Role.WORKER)

_Answer: TypeAlias = ServerMessage | Callable[[], FoundLater] | None
"""None: it comes later."""
_Tell: TypeAlias = Callable[[ServerMessage], None]


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
        """Keeps what a process says that it registered."""
        if not message.report:
            return
        key = session.number, message.rank
        self._reports.pop(key, None)
        self._reports[key] = message.report
        while sum(map(len, self._reports.values())) > MAX_REPORT_BYTES:
            del self._reports[next(iter(self._reports))]

    def find(self, connection: Connection, call: Call, now_ns: int) -> _Answer:
        """Where a block is, or how much of a prompt is there. The answer comes when the tiers have said what they
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
        hash_seed=register.hash_seed,
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


def _follow(domain: Domain, message: FollowBlock, now_s: float, answer: _Tell) -> _Answer:
    cache, chain = domain.cache, domain.traffic
    assert cache is not None
    groups = range(len(domain.geometries[message.name_space].groups))
    rows = [as_rows(message.block_hash) for _ in groups]

    def ask_tiers(places: BlockPlaces) -> BlockPlaces | None:
        if chain is None:
            return places
        chain.find_places(
            message.name_space,
            rows,
            [np.ones(1, np.bool_) for _ in groups],
            now_s=now_s,
            wait_s=_wait_s(message),
            then=lambda found: answer(_add_tiers(places, _kinds(chain), found)),
        )
        return None

    def look() -> FoundLater:
        # What left memory is known to those that write, who may be waited for.
        return partial(ask_tiers, _describe_memory(cache, message.name_space, groups, message.block_hash))

    return look


def _find_prefix(domain: Domain, message: FindPrefix, now_s: float, answer: _Tell) -> ServerMessage | None:
    cache, chain, number = domain.cache, domain.traffic, message.name_space
    assert cache is not None
    space = TierSpace(number=number, fingerprint=domain.fingerprints[number], geometry=domain.geometries[number])
    rows = [space.chain_rows(group, message.chain, message.limit) for group in range(len(space.rules))]
    there = [cache.lookup(number, group, hashes.tobytes()) for group, hashes in enumerate(rows)]
    reach = partial(find_reach, space.rules, local=0, limit=message.limit, alignment=message.alignment)
    in_memory = reach(there)
    if chain is None:
        return PrefixFound(in_memory=in_memory)

    def conclude(found: list[Found | None]) -> None:
        together, reaches = there, []
        for tier in found:
            if tier is not None:
                together = [known | more for known, more in zip(together, tier, strict=True)]
            reaches.append(NOT_ASKED if tier is None else reach(together))
        answer(PrefixFound(in_memory=in_memory, tiers=_kinds(chain) if found else (), reaches=_pack(reaches)))

    lacking = [~known for known in there]
    chain.find_places(number, rows, lacking, now_s=now_s, wait_s=_wait_s(message), then=conclude)
    return None


def _kinds(chain: TierChain) -> tuple[str, ...]:
    return tuple(tier.terms.name for tier in chain.tiers)


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
    """A tier that was not asked has nothing."""
    nothing = bytes(len(places.in_memory))
    in_tiers = b"".join(nothing if tier is None else bytes(bool(group[0]) for group in tier) for tier in found)
    return replace(places, tiers=kinds if found else (), in_tiers=in_tiers)


def _pack(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, "<u8").tobytes()
