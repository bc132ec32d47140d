"""Prefixes of one domain that are kept from eviction, by leases of the server's own, until they end or give way.

They give way by one order: the lowest priority first, and among equals the one that ends soonest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from kvoffload.cache import AcquireOutcome, LeaseFor, LeaseId, LocalCache, SessionId
from kvoffload.protocol import HintOutcome
from kvoffload.server.hints.prefix_blocks import Prefix, PrefixBlocks
from kvoffload.server.shares import has_share

RETAINED_SHARE = 0.5
"""Of the memory, that may be retained; whoever pays gets three quarters of it if nobody else has any, and so on."""
QUOTA_SHARE = 0.5
"""Of a tenant's quota, that it may retain: over its quota it loses blocks, and some have to be there to be lost."""
MAX_RETAINED = 4096
"""Prefixes of a domain; nobody gets all."""
RELIEF_SHARE = 1 / 16
"""Of what may be retained, that gives way at once when a reservation has found no room."""
_TRIES = 3
"""To keep a prefix of which a block may just have been evicted: then what is kept is shorter."""
CHECKED_BLOCKS = 4096
"""That are looked for at a time, of as many retentions as have so many together: whether they are there yet."""


class Caller(NamedTuple):
    """Who gives a hint."""

    owner: str
    """Whose engine it is; sessions are its own."""
    tenant: int = 0
    tenant_name: str = ""
    engine: str = ""
    """Empty: an operator asks, who may touch everybody's."""

    @property
    def is_operator(self) -> bool:
        return not self.engine

    @property
    def payer(self) -> str:
        """Whose share pays: a tenant's with a name, else the owner's own."""
        return f"tenant {self.tenant_name}" if self.tenant_name else self.owner

    def may_touch(self, key: Key) -> bool:
        """Others' are an operator's only."""
        return self.is_operator or (key.owner, key.tenant) == (self.owner, self.tenant)


class Key(NamedTuple):
    """What at most one prefix is retained for."""

    owner: str
    tenant: int
    name_space: int
    session: str
    end: bytes = b""
    """The prefix's name, where there is no session."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How a prefix is to be retained."""

    session: str
    priority: int
    ends_s: float


@dataclass(eq=False, kw_only=True)
class Retention:
    """Is one retained prefix."""

    key: Key
    payer: str
    tenant_name: str
    engine: str
    priority: int
    ends_s: float
    end: bytes
    """The prefix's name."""
    blocks: PrefixBlocks
    size_bytes: int
    leases: list[LeaseId]
    since: int
    """The cache's `use_clock` when it began."""

    @property
    def rank(self) -> tuple[int, float]:
        """The lowest gives way first."""
        return self.priority, self.ends_s


@dataclass(eq=False)
class Retentions:
    """Belongs to the thread of the server's core. It has no cache until memory is taken or adopted."""

    tokens: Counter[str]
    """Of prefixes, by what came of them: `hit_retained`, `unused_retained` or `gave_way`."""
    cache: LocalCache | None = None
    _session: SessionId | None = None
    _by_key: dict[Key, Retention] = field(default_factory=dict)
    _unchecked: deque[Key] = field(default_factory=deque)
    """Those whose turn to be looked for comes next."""
    _seen: tuple[int, int] = (0, 0)
    """At the last look: reservations that found no room, and bytes that had their memory."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Retention]:
        """In the order in which they give way."""
        return iter(sorted(self._by_key.values(), key=lambda one: one.rank))

    def attach(self, cache: LocalCache) -> None:
        """The memory is there."""
        self.cache = cache

    @property
    def size_bytes(self) -> int:
        """Of all, each with all its blocks."""
        return sum(one.size_bytes for one in self._by_key.values())

    @property
    def limit_bytes(self) -> int:
        """That may be retained together."""
        return 0 if self.cache is None else int(self.cache.ready_bytes * RETAINED_SHARE)

    def retain(self, caller: Caller, prefix: Prefix, wish: Wish) -> tuple[HintOutcome, int]:
        """Keeps what memory has of a prefix; what came of it, and for how many tokens.

        A session's former one is replaced, and stays if this one is not to be had. Weaker ones of the same owner and
        tenant give way where their share is at its bound.
        """
        for _ in range(_TRIES):
            outcome, tokens = self._try_retain(caller, prefix, wish)
            if outcome is not None:
                return outcome, tokens
        return HintOutcome.NOTHING, 0

    def _try_retain(self, caller: Caller, prefix: Prefix, wish: Wish) -> tuple[HintOutcome | None, int]:
        """None: a block has gone meanwhile."""
        cache = self.cache
        boundary = 0 if cache is None else prefix.find_reach(prefix.look_up(cache))
        if cache is None or not boundary:
            return HintOutcome.NOTHING, 0
        blocks, end = prefix.cut(boundary), prefix.name(boundary)
        key = Key(caller.owner, caller.tenant, prefix.space.number, wish.session, b"" if wish.session else end)
        victims = self._choose_victims(caller, key, blocks.size_bytes, (wish.priority, wish.ends_s))
        if victims is None:
            return HintOutcome.OVER_LIMIT, 0
        since = cache.use_clock
        leases, held = self._hold(cache, blocks)
        if held is not AcquireOutcome.HIT:
            return (None if held is AcquireOutcome.MISS else HintOutcome.NO_ROOM), 0
        if not self._by_key:
            # What was lacking before is no reason to let it go.
            self._seen = cache.without_room, cache.ready_bytes
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
            leases=leases,
            since=since,
        )
        return (HintOutcome.DONE if boundary >= prefix.most else HintOutcome.PARTLY), boundary

    def select(self, caller: Caller, name_space: int, session: str, ends: Set[bytes]) -> list[Retention]:
        """Those of a session that the caller may touch, or without one those whose prefixes have these names."""
        return [
            one
            for one in self._by_key.values()
            if one.key.name_space == name_space
            and caller.may_touch(one.key)
            and (one.key.session == session if session else one.end in ends)
        ]

    def let_go(self, retentions: Iterable[Retention]) -> None:
        for one in list(retentions):
            self._end(one)

    def forget_spaces(self, name_spaces: Set[int]) -> None:
        """Blocks of these identities are to go."""
        self.let_go([one for one in self._by_key.values() if one.key.name_space in name_spaces])

    def let_all_go(self) -> None:
        """The server ends."""
        self.let_go(self._by_key.values())

    def advance(self, now_s: float) -> None:
        """Ends what is over or cannot be found; and where a reservation found no room since the last time, some give
        way."""
        if self.cache is None or not self._by_key:
            return
        self.let_go([one for one in self._by_key.values() if one.ends_s <= now_s])
        self._check_some(self.cache)
        seen, self._seen = self._seen, (self.cache.without_room, self.cache.ready_bytes)
        # While a pool grows nobody makes room: there is more in a moment.
        if seen[0] != self._seen[0] and seen[1] == self._seen[1]:
            self._relieve(int(self.limit_bytes * RELIEF_SHARE))

    def _check_some(self, cache: LocalCache) -> None:
        """Lets go of those of which a block is not readable any more: it was damaged, or cleared."""
        if not self._unchecked:
            self._unchecked.extend(self._by_key)
        left = CHECKED_BLOCKS
        while self._unchecked and left > 0:
            one = self._by_key.get(self._unchecked.popleft())
            if one is not None:
                left -= one.blocks.count
                if not one.blocks.is_there(cache):
                    self._end(one)

    def _relieve(self, size_bytes: int) -> None:
        for one in self:
            self._end(one, gave_way=True)
            size_bytes -= one.size_bytes
            if size_bytes <= 0:
                return

    def _choose_victims(
        self, caller: Caller, key: Key, size_bytes: int, rank: tuple[int, float]
    ) -> list[Retention] | None:
        """Which have to give way for one more; None: it has no place."""
        others = [one for one in self._by_key.values() if one.key != key]
        total, of_payer = _sum(others), _sum(one for one in others if one.payer == caller.payer)
        count, count_of_payer = len(others), sum(one.payer == caller.payer for one in others)
        weaker = sorted((one for one in others if one.key[:2] == key[:2] and one.rank < rank), key=lambda one: one.rank)
        most_bytes = self._limit_of(caller)
        victims: list[Retention] = []
        while not (
            has_share(count_of_payer, total=count, limit=MAX_RETAINED)
            and has_share(of_payer + size_bytes, total=total + size_bytes, limit=self.limit_bytes)
            and of_payer + size_bytes <= most_bytes
        ):
            if not weaker:
                return None
            victims.append(weaker.pop(0))
            total, of_payer = total - victims[-1].size_bytes, of_payer - victims[-1].size_bytes
            count, count_of_payer = count - 1, count_of_payer - 1
        return victims

    def _limit_of(self, caller: Caller) -> int:
        """What a tenant's quota permits."""
        assert self.cache is not None
        tenants = self.cache.stats.tenants if caller.tenant_name else ()
        quota_bytes = next((one.quota_bytes for one in tenants if one.name == caller.tenant_name), 0)
        return int(quota_bytes * QUOTA_SHARE) if quota_bytes else self.limit_bytes

    def _hold(self, cache: LocalCache, blocks: PrefixBlocks) -> tuple[list[LeaseId], AcquireOutcome]:
        """Leases on all of them; or none, and why."""
        if self._session is None:
            try:
                self._session = cache.open_session()
            except RuntimeError:
                # Of adopted memory others may have all places.
                return [], AcquireOutcome.NO_ROOM
        leases: list[LeaseId] = []
        for group, hashes in blocks.parts:
            found = cache.acquire_entries(self._session, blocks.space.number, group, hashes, lease_for=LeaseFor.KEEP)
            if not found.is_hit:
                self._release(leases)
                return [], found.outcome
            leases.append(found.lease)
        return leases, AcquireOutcome.HIT

    def _end(self, one: Retention, *, gave_way: bool = False, is_replaced: bool = False) -> None:
        assert self.cache is not None
        del self._by_key[one.key]
        used = min(one.blocks.count_used(self.cache, since=one.since), one.blocks.tokens)
        self.tokens["hit_retained"] += used
        # What is replaced goes on, and may be used yet.
        self.tokens["unused_retained"] += 0 if used or is_replaced else one.blocks.tokens
        self.tokens["gave_way"] += one.blocks.tokens if gave_way else 0
        self._release(one.leases)

    def _release(self, leases: Iterable[LeaseId]) -> None:
        assert self.cache is not None
        assert self._session is not None
        for lease in leases:
            self.cache.release(self._session, lease)


def _sum(retentions: Iterable[Retention]) -> int:
    return sum(one.size_bytes for one in retentions)
