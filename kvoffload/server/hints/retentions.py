"""Prefixes of one domain that are kept from eviction, by leases of the server's own, until they end or give way.

They give way by one order: the lowest priority first, and among equals the one that ends soonest.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from kvoffload.cache import AcquireOutcome, LeaseFor, LeaseId, LocalCache, SessionId
from kvoffload.protocol import HintOutcome
from kvoffload.server.common.shares import has_share
from kvoffload.server.common.steps import Steps
from kvoffload.server.hints.prefix_blocks import Prefix, PrefixBlocks
from kvoffload.server.tiering.seen import look_for
from kvoffload.types import HASH_BYTES

RETAINED_SHARE = 0.5
"""Share of the memory that may be retained. A payer can take three quarters of it if there is no other, and so on."""
QUOTA_SHARE = 0.5
"""Share of its quota that a tenant may retain: over its quota it loses blocks, and some must be left to lose."""
MAX_RETAINED = 4096
"""Number of retained prefixes of a domain. No payer can take all of them."""
MAX_RETAINED_BLOCKS = 4_194_304
"""Number of blocks of a domain's retained prefixes, each counted for every prefix that has it: the server keeps their
names, 128 MiB at most. No payer can take all of them."""
RELIEF_SHARE = 1 / 16
"""Share of what may be retained that gives way at once when a reservation has found no room."""
_TRIES = 3
"""Attempts to keep a prefix of which a block may just have been evicted; each later one may keep a shorter prefix."""
CHECKED_BLOCKS = 4096
"""Number of blocks for which one call checks whether they are still there, rounded up to whole slices."""
SLICE_BLOCKS = 1024
"""Number of blocks of a retention that are checked at once."""
LEASED_BLOCKS = 8192
"""Number of blocks that are leased at once."""
ENDED_BLOCKS = 32_768
"""Number of blocks of the retentions that end at once, rounded up to whole retentions."""


class Caller(NamedTuple):
    """The engine or operator that gives a hint."""

    owner: str
    """The user or client to whom the engine belongs. Each owner has sessions of its own."""
    tenant: int = 0
    tenant_name: str = ""
    engine: str = ""
    """Name of the engine; empty: an operator asks, who may touch all owners' retentions."""

    @property
    def is_operator(self) -> bool:
        return not self.engine

    @property
    def payer(self) -> str:
        """Name of the share that pays: a named tenant's, else the owner's own."""
        return f"tenant {self.tenant_name}" if self.tenant_name else self.owner

    def may_touch(self, key: Key) -> bool:
        """Whether the caller may touch a retention: its own, or any if it is an operator."""
        return self.is_operator or (key.owner, key.tenant) == (self.owner, self.tenant)


class Key(NamedTuple):
    """Key of a retention: at most one prefix is retained for each."""

    owner: str
    tenant: int
    name_space: int
    session: str
    end: bytes = b""
    """Name of the prefix if the hint names no session, else empty."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How a hint wants a prefix to be retained."""

    session: str
    priority: int
    ends_s: float


@dataclass(eq=False, kw_only=True)
class Retention:
    """A prefix that is retained."""

    key: Key
    payer: str
    tenant_name: str
    engine: str
    priority: int
    ends_s: float
    end: bytes
    """Name of the prefix."""
    blocks: PrefixBlocks
    size_bytes: int
    count: int
    """Number of its blocks, over all groups."""
    leases: list[LeaseId]
    since: int
    """Value of the cache's `use_clock` when it began."""

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: the retention with the lowest gives way first."""
        return self.priority, self.ends_s


@dataclass(frozen=True, eq=False)
class Held:
    """The part of a prefix that was leased."""

    blocks: PrefixBlocks | None = None
    """The blocks that are leased, or None if no block is."""
    leases: list[LeaseId] = field(default_factory=list)
    since: int = 0
    """Value of the cache's `use_clock` before."""
    is_room_lacking: bool = False
    """Whether there was no room for the leases."""


@dataclass(eq=False)
class Retentions:
    """Belongs to the thread of the server's core. It has no cache until memory is taken or adopted."""

    tokens: Counter[str]
    """Number of tokens of retained prefixes by what came of them: `hit_retained`, `unused_retained` or `gave_way`."""
    cache: LocalCache | None = None
    _session: SessionId | None = None
    _by_key: dict[Key, Retention] = field(default_factory=dict)
    _unchecked: Iterator[tuple[Retention, int, bytes]] = field(default_factory=lambda: iter(()))
    """Slices of retentions that are checked next."""
    _is_ending: bool = False
    """Whether nothing is retained any more, as the server ends."""
    _seen: tuple[int, int] = (0, 0)
    """Values at the last look: reservations that found no room so far, and bytes of the pool that had their memory."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Retention]:
        """Yields the retentions in the order in which they give way."""
        return iter(sorted(self._by_key.values(), key=lambda one: one.rank))

    def attach(self, cache: LocalCache) -> None:
        """Connects the memory, once it is there."""
        self.cache = cache

    @property
    def size_bytes(self) -> int:
        """Bytes of all retentions, each counted with all its blocks."""
        return sum(one.size_bytes for one in self._by_key.values())

    @property
    def limit_bytes(self) -> int:
        """Bytes that all retentions together may have."""
        return 0 if self.cache is None else int(self.cache.ready_bytes * RETAINED_SHARE)

    def hold(self, prefix: Prefix) -> Steps[Held]:
        """Returns the steps that lease what memory has of a prefix, for `retain`. They may be done on any thread."""
        if self._session is None and self.cache is not None:
            # In adopted memory other sessions may have all places.
            with contextlib.suppress(RuntimeError):
                self._session = self.cache.open_session()
        return self._hold(prefix)

    def retain(self, caller: Caller, prefix: Prefix, held: Held, wish: Wish) -> tuple[HintOutcome, int]:
        """Keeps what was leased of a prefix. Returns the outcome, and how many tokens are kept.

        It replaces the session's former retention, which stays if this one cannot be made. Weaker ones of the same
        owner and tenant give way where their share is at its bound.
        """
        blocks = held.blocks
        if blocks is None:
            return (HintOutcome.NO_ROOM if held.is_room_lacking else HintOutcome.NOTHING), 0
        end = prefix.name(blocks.tokens)
        key = Key(caller.owner, caller.tenant, prefix.space.number, wish.session, b"" if wish.session else end)
        victims = self._choose_victims(caller, key, blocks, (wish.priority, wish.ends_s))
        if victims is None or self._is_ending:
            self._release(held.leases)
            return (HintOutcome.NOTHING if self._is_ending else HintOutcome.OVER_LIMIT), 0
        assert self.cache is not None
        if not self._by_key:
            # Reservations that found no room before are no reason to let it go.
            self._seen = self.cache.without_room, self.cache.ready_bytes
        for victim in victims:
            self._end(victim, gave_way=True)
        if (former := self._by_key.get(key)) is not None:
            self._end(former, is_replaced=True)
        self._by_key[key] = Retention(
            key=key,
            payer=caller.payer,
            tenant_name=caller.tenant_name,
            engine=caller.engine,
            priority=wish.priority,
            ends_s=wish.ends_s,
            end=end,
            blocks=blocks,
            size_bytes=blocks.size_bytes,
            count=blocks.count,
            leases=held.leases,
            since=held.since,
        )
        is_all = blocks.tokens >= prefix.most and not prefix.is_cut
        return (HintOutcome.DONE if is_all else HintOutcome.PARTLY), blocks.tokens

    def give_back(self, held: Held) -> None:
        """Releases what was leased and is not retained."""
        self._release(held.leases)

    def select(self, caller: Caller, name_space: int) -> list[Retention]:
        """Returns the retentions of an identity that the caller may touch."""
        return [one for one in self._by_key.values() if one.key.name_space == name_space and caller.may_touch(one.key)]

    def let_go(self, retentions: Iterable[Retention]) -> None:
        """Lets go of these, of many blocks not at once: the others end with the next calls of `advance`."""
        left = ENDED_BLOCKS
        for one in list(retentions):
            if left <= 0:
                one.ends_s = 0.0
            else:
                left -= one.count
                self._end(one)

    def forget_spaces(self, name_spaces: Set[int]) -> None:
        """Lets go of the retentions of these identities, whose blocks are about to go."""
        for one in [one for one in self._by_key.values() if one.key.name_space in name_spaces]:
            self._end(one)

    def let_all_go(self) -> None:
        """Lets go of all retentions, as the server ends."""
        self._is_ending = True
        for one in list(self._by_key.values()):
            self._end(one)

    def advance(self, now_s: float) -> None:
        """Ends retentions whose time is over or whose blocks are gone. If a reservation found no room since the last
        call, some more give way."""
        if self.cache is None or not self._by_key:
            return
        self.let_go([one for one in self._by_key.values() if one.ends_s <= now_s])
        self._check_some(self.cache)
        seen, self._seen = self._seen, (self.cache.without_room, self.cache.ready_bytes)
        # Nothing gives way while the pool grows, as it has more room in a moment. Memory that the server gives back
        # must not wait for the end of retentions.
        if (seen[0] != self._seen[0] and seen[1] == self._seen[1]) or self.cache.is_leaving:
            self._relieve(int(self.limit_bytes * RELIEF_SHARE))

    def _check_some(self, cache: LocalCache) -> None:
        """Lets go of those of which a block is not readable any more: it was damaged, or cleared.

        Such a block is quarantined for as long as the retention leases it, so nothing is checked while no block is
        quarantined.
        """
        if not cache.stats.quarantined:
            return
        left = CHECKED_BLOCKS
        for _ in range(2):
            for one, group, hashes in self._unchecked:
                left -= len(hashes) // HASH_BYTES
                is_kept = self._by_key.get(one.key) is one
                if is_kept and not cache.lookup(one.key.name_space, group, hashes).all():
                    self._end(one)
                if left <= 0:
                    return
            # All were checked, and it begins again.
            self._unchecked = self._list_slices()

    def _list_slices(self) -> Iterator[tuple[Retention, int, bytes]]:
        for one in list(self._by_key.values()):
            if self._by_key.get(one.key) is one:
                for group, hashes in one.blocks.cut_slices(SLICE_BLOCKS):
                    yield one, group, hashes

    def _relieve(self, size_bytes: int) -> None:
        left = ENDED_BLOCKS
        for one in self:
            self._end(one, gave_way=True)
            size_bytes -= one.size_bytes
            left -= one.count
            if size_bytes <= 0 or left <= 0:
                return

    def _choose_victims(
        self, caller: Caller, key: Key, blocks: PrefixBlocks, rank: tuple[int, float]
    ) -> list[Retention] | None:
        """Returns the retentions that have to give way for one more; None: it has no place."""
        others = [one for one in self._by_key.values() if one.key != key]
        size_bytes, names = blocks.size_bytes, blocks.count
        all_names = sum(one.count for one in others)
        names_of_payer = sum(one.count for one in others if one.payer == caller.payer)
        total, of_payer = _sum(others), _sum(one for one in others if one.payer == caller.payer)
        count, count_of_payer = len(others), sum(one.payer == caller.payer for one in others)
        weaker = sorted((one for one in others if one.key[:2] == key[:2] and one.rank < rank), key=lambda one: one.rank)
        most_bytes = self._limit_of(caller)
        victims: list[Retention] = []
        while not (
            has_share(count_of_payer, total=count, limit=MAX_RETAINED)
            and has_share(names_of_payer + names, total=all_names + names, limit=MAX_RETAINED_BLOCKS)
            and has_share(of_payer + size_bytes, total=total + size_bytes, limit=self.limit_bytes)
            and of_payer + size_bytes <= most_bytes
        ):
            if not weaker:
                return None
            victims.append(weaker.pop(0))
            total, of_payer = total - victims[-1].size_bytes, of_payer - victims[-1].size_bytes
            count, count_of_payer = count - 1, count_of_payer - 1
            all_names, names_of_payer = all_names - victims[-1].count, names_of_payer - victims[-1].count
        return victims

    def _limit_of(self, caller: Caller) -> int:
        """Returns how many bytes the caller's tenant may retain by its quota, or all that may be retained if it has
        none."""
        assert self.cache is not None
        tenants = self.cache.stats.tenants if caller.tenant_name else ()
        quota_bytes = next((one.quota_bytes for one in tenants if one.name == caller.tenant_name), 0)
        return int(quota_bytes * QUOTA_SHARE) if quota_bytes else self.limit_bytes

    def _hold(self, prefix: Prefix) -> Steps[Held]:
        cache, session = self.cache, self._session
        for _ in range(_TRIES if cache is not None else 0):
            assert cache is not None
            seen = yield from look_for(cache, prefix.space, prefix.rows, {})
            boundary = prefix.find_reach(seen.in_memory)
            if not boundary:
                break
            blocks, since, leases = prefix.cut(boundary), cache.use_clock, list[LeaseId]()
            outcome = AcquireOutcome.NO_ROOM if session is None else AcquireOutcome.HIT
            for group, hashes in blocks.cut_slices(LEASED_BLOCKS):
                if session is None:
                    break
                number = prefix.space.number
                found = cache.acquire_entries(session, number, group, hashes, lease_for=LeaseFor.KEEP)
                outcome = found.outcome
                if not found.is_hit:
                    break
                leases.append(found.lease)
                yield
            if outcome is AcquireOutcome.HIT:
                return Held(blocks, leases, since)
            self._release(leases)
            if outcome is not AcquireOutcome.MISS:
                return Held(is_room_lacking=True)
        return Held()

    def _end(self, one: Retention, *, gave_way: bool = False, is_replaced: bool = False) -> None:
        assert self.cache is not None
        del self._by_key[one.key]
        used = one.blocks.count_used(self.cache, since=one.since)
        self.tokens["hit_retained"] += used
        # A replaced retention goes on in its successor, and may still be used.
        self.tokens["unused_retained"] += 0 if used or is_replaced else one.blocks.tokens
        self.tokens["gave_way"] += one.blocks.tokens if gave_way else 0
        self._release(one.leases)

    def _release(self, leases: Iterable[LeaseId]) -> None:
        for lease in leases:
            assert self.cache is not None
            assert self._session is not None
            self.cache.release(self._session, lease)


def _sum(retentions: Iterable[Retention]) -> int:
    return sum(one.size_bytes for one in retentions)
