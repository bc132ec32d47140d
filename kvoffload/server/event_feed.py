"""Events for routers and dashboards: a bounded queue for each subscriber, and what has to be told when it is gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvoffload.cache import LocalCache, StoredBlocks
from kvoffload.hash_rows import as_rows
from kvoffload.protocol import Cleared, EventsLost, Medium, NamespaceOpened, Removed, Stored
from kvoffload.protocol.message import Event
from kvoffload.server.shares import has_shares
from kvoffload.server.terms import ServerLimits
from kvoffload.server.tiering.watched_blocks import FindThere, WatchedBlocks
from kvoffload.types import HASH_BYTES

SpaceEvent: TypeAlias = Stored | Removed | Cleared
EVENT_BLOCKS = 1024
"""In one event: a frame has 64 KiB then, so that frames that a subscriber has not read are bounded in bytes, too."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """A namespace of a domain, as events speak of it."""

    domain: str
    name_space: int
    fingerprint: bytes


@dataclass(kw_only=True)
class _Subscriber:
    domain: str
    owner: str
    name_spaces: frozenset[int]
    """Empty: all."""
    queue: deque[Event] = field(default_factory=deque)
    hashes: int = 0
    lost: int = 0
    sent: int = 0
    told: set[int] = field(default_factory=set)
    """Namespaces whose fingerprint was said."""


class EventFeed:
    """Belongs to the thread of the server's core."""

    def __init__(self, limits: ServerLimits, on_heard: Callable[[bool], None] = lambda _: None) -> None:
        """`on_heard` is told before the first subscriber hears of anything, and after the last."""
        self._limits = limits
        self._on_heard = on_heard
        self._subscribers: dict[bytes, _Subscriber] = {}
        self._caches: dict[str, LocalCache] = {}
        self._unswept: set[str] = set()
        """Domains in which more has left than was told at once."""
        self._watched: dict[str, WatchedBlocks[Space]] = {}
        """By domain: what its disks have."""
        self._former: dict[str, dict[int, bytes]] = {}
        """By domain: fingerprints of namespaces that are nobody's any more, until the end of all their blocks is
        told."""

    @property
    def is_behind(self) -> bool:
        """Something can be told at once that was not taken yet."""
        return bool(self._unswept) or any(subscriber.queue for subscriber in self._subscribers.values())

    def attach(self, domain: str, cache: LocalCache) -> None:
        """The domain has its memory, which says what leaves it while anybody hears of it."""
        self._caches[domain] = cache
        cache.watch_removed(self._is_heard(domain))

    def subscribe(self, key: bytes, domain: str, name_spaces: tuple[int, ...], *, owner: str = "") -> bool:
        """Replaces the connection's earlier subscription. False: there are too many, or too many of its owner's."""
        if key not in self._subscribers and not self._has_room(domain, owner):
            return False
        self._subscribers[key] = _Subscriber(domain=domain, owner=owner, name_spaces=frozenset(name_spaces))
        self._on_heard(True)
        self._watch(domain)
        return True

    def unsubscribe(self, key: bytes) -> None:
        ended = self._subscribers.pop(key, None)
        if ended is not None and not self._is_heard(ended.domain):
            self._watch(ended.domain)
            self._unswept.discard(ended.domain)
            self._former.pop(ended.domain, None)
            self._watched.pop(ended.domain, None)
            self._on_heard(bool(self._subscribers))

    def ready(self) -> list[bytes]:
        """Connections that have events to be taken."""
        return [key for key, subscriber in self._subscribers.items() if subscriber.queue or subscriber.lost]

    def take(self, key: bytes, limit: int) -> list[tuple[Event, int]]:
        """The next events of a connection with their numbers, to be sent in this order."""
        subscriber = self._subscribers.get(key)
        if subscriber is None:
            return []
        taken: list[tuple[Event, int]] = []
        while len(taken) < limit and (subscriber.queue or subscriber.lost):
            if not subscriber.queue:
                subscriber.queue.append(EventsLost(count=subscriber.lost))
                subscriber.lost = 0
            event = subscriber.queue.popleft()
            subscriber.hashes -= _count_hashes(event)
            subscriber.sent += 1
            taken.append((event, subscriber.sent))
        return taken

    def tell_stored(self, space: Space, stored: StoredBlocks) -> None:
        """These blocks can be found from now on."""
        group, hashes, parents = stored
        if not hashes or not self._is_heard(space.domain):
            return
        name_space = space.name_space
        event = Stored(name_space=name_space, medium=Medium.MEMORY, group=group, hashes=hashes, parents=parents)
        self._tell(space, event)
        # Whatever leaves from here on is told later; some may have left before.
        self._tell_gone(space, group, hashes)

    def tell_written(self, space: Space, stored: StoredBlocks, *, medium: Medium, find: FindThere | None) -> None:
        """These blocks are in a slower tier from now on. `find` says later which are there still; None: nobody can."""
        if not self._is_heard(space.domain):
            return
        group, hashes, parents = stored
        if find is not None:
            watched = self._watched.setdefault(space.domain, WatchedBlocks(self._limits.watched_blocks))
            hashes = watched.add(space, group, hashes, find)
        if hashes:
            name_space, parents = space.name_space, parents[: len(hashes)]
            self._tell(space, Stored(name_space=name_space, medium=medium, group=group, hashes=hashes, parents=parents))

    def tell_missing(self, space: Space, group: int, hashes: bytes, *, medium: Medium) -> None:
        """A slower tier was found not to have these blocks."""
        if hashes and self._is_heard(space.domain):
            self._tell(space, Removed(name_space=space.name_space, medium=medium, group=group, hashes=hashes))

    def tell_lost(self, count: int) -> None:
        """So many blocks were stored of which nothing else is known."""
        for domain in {subscriber.domain for subscriber in self._subscribers.values()}:
            self._lose(domain, count)

    def tell_cleared(self, space: Space) -> None:
        """Nothing of this namespace can be found from now on."""
        self._tell(space, Cleared(name_space=space.name_space, medium=Medium.MEMORY))

    def forget(self, domain: str, fingerprints: Mapping[int, bytes]) -> None:
        """Nobody has these numbers any more, nor any block of theirs. Whoever thinks so is told by the next sweeps; of
        what disks have of them nothing more is told."""
        if domain in self._watched:
            self._watched[domain].forget(lambda space: space.name_space in fingerprints)
        if self._is_heard(domain):
            self._former.setdefault(domain, {}).update(fingerprints)

    def sweep(self, domain: str, fingerprints: Mapping[int, bytes]) -> None:
        """Tells of some of the blocks that have left, which `is_behind` says if there are more. `fingerprints`: of the
        domain's namespaces."""
        cache, former = self._caches.get(domain), self._former.get(domain, {})
        if cache is None or not self._is_heard(domain) or self._has_much(domain):
            return
        removed = cache.take_removed(self._limits.swept_blocks)
        if removed.lost:
            self._lose(domain, removed.lost)
        for name_space, group, hashes in removed.parts:
            fingerprint = fingerprints.get(name_space) or former.get(name_space)
            # Adopted memory has identities that nobody has named: nobody has heard of them.
            if fingerprint is not None:
                self._tell_gone(Space(domain=domain, name_space=name_space, fingerprint=fingerprint), group, hashes)
        if not removed.is_all:
            self._unswept.add(domain)
            return
        self._unswept.discard(domain)
        for subscriber in self._subscribers.values() if former else ():
            if subscriber.domain == domain:
                subscriber.told -= former.keys()
        self._former.pop(domain, None)

    def check_disks(self, domain: str) -> None:
        """Is called now and then: tells of some of the blocks that disks have no more."""
        watched = self._watched.get(domain)
        for space, group, hashes in () if watched is None else watched.check(self._limits.swept_blocks):
            self.tell_missing(space, group, hashes, medium=Medium.DISK)

    def _tell_gone(self, space: Space, group: int, hashes: bytes) -> None:
        """Tells of those of these blocks that are not there now. Others came again, which was told or will be."""
        cache = self._caches.get(space.domain)
        if cache is None:
            return
        is_there = cache.lookup(space.name_space, group, hashes)
        if not is_there.all():
            gone = as_rows(hashes)[~is_there].tobytes()
            self._tell(space, Removed(name_space=space.name_space, medium=Medium.MEMORY, group=group, hashes=gone))

    def _has_much(self, domain: str) -> bool:
        """A subscriber is to take what it has first: memory keeps what has left for longer than queues do."""
        most = self._limits.queued_hashes // 2
        return any(one.hashes > most for one in self._subscribers.values() if one.domain == domain)

    def _watch(self, domain: str) -> None:
        cache = self._caches.get(domain)
        if cache is not None:
            cache.watch_removed(self._is_heard(domain))

    def _tell(self, space: Space, event: SpaceEvent) -> None:
        parts = list(_cut(event))
        for subscriber in self._subscribers.values():
            is_wanted = not subscriber.name_spaces or space.name_space in subscriber.name_spaces
            if subscriber.domain == space.domain and is_wanted:
                for part in parts:
                    self._enqueue(subscriber, space, part)

    def _enqueue(self, subscriber: _Subscriber, space: Space, event: SpaceEvent) -> None:
        """All that this event needs, or a count of what was lost."""
        before: list[Event] = [EventsLost(count=subscriber.lost)] if subscriber.lost else []
        if space.name_space not in subscriber.told:
            before.append(NamespaceOpened(name_space=space.name_space, fingerprint=space.fingerprint))
        is_full = len(subscriber.queue) + len(before) + 1 > self._limits.queued_events
        # One event may be larger than the bound: it is then alone in the queue.
        is_heavy = bool(subscriber.queue) and subscriber.hashes + _count_hashes(event) > self._limits.queued_hashes
        if is_full or is_heavy:
            subscriber.lost += 1
            return
        subscriber.lost = 0
        subscriber.told.add(space.name_space)
        subscriber.queue.extend([*before, event])
        subscriber.hashes += _count_hashes(event)

    def _lose(self, domain: str, count: int) -> None:
        for subscriber in self._subscribers.values():
            if subscriber.domain == domain:
                subscriber.lost += count

    def _has_room(self, domain: str, owner: str) -> bool:
        """No owner gets all of them, and no domain."""
        total, limit = len(self._subscribers), self._limits.subscribers
        of_owner = sum(one.owner == owner for one in self._subscribers.values())
        of_domain = sum(one.domain == domain for one in self._subscribers.values())
        return has_shares(of_owner, of_domain, total=total, limit=limit)

    def _is_heard(self, domain: str) -> bool:
        return any(subscriber.domain == domain for subscriber in self._subscribers.values())


def _cut(event: SpaceEvent) -> Iterator[SpaceEvent]:
    """Into parts of at most `EVENT_BLOCKS`, in their order."""
    if isinstance(event, Cleared):
        yield event
        return
    for first in range(0, len(event.hashes), EVENT_BLOCKS * HASH_BYTES):
        part = slice(first, first + EVENT_BLOCKS * HASH_BYTES)
        if isinstance(event, Stored):
            yield replace(event, hashes=event.hashes[part], parents=event.parents[part])
        else:
            yield replace(event, hashes=event.hashes[part])


def _count_hashes(event: Event) -> int:
    if isinstance(event, Stored):
        return (len(event.hashes) + len(event.parents)) // HASH_BYTES
    return len(event.hashes) // HASH_BYTES if isinstance(event, Removed) else 0
