"""Events for routers and dashboards: a bounded queue for each subscriber, and the blocks whose loss has to be told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvoffload.cache import LocalCache, StoredBlocks
from kvoffload.hash_rows import as_rows
from kvoffload.protocol import Cleared, EventsLost, Medium, NamespaceOpened, Removed, Stored
from kvoffload.protocol.message import Event
from kvoffload.server.common.shares import has_shares
from kvoffload.server.sessions.settings import ServerLimits
from kvoffload.server.tiering.watched_blocks import FindThere, WatchedBlocks
from kvoffload.types import HASH_BYTES

SpaceEvent: TypeAlias = Stored | Removed | Cleared
EVENT_BLOCKS = 1024
"""Number of blocks in one event: its frame has 64 KiB then, so that the unread frames of a subscriber are bounded in
bytes, too."""


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
    """Namespaces that it wants to hear of; empty: all."""
    queue: deque[Event] = field(default_factory=deque)
    hashes: int = 0
    lost: int = 0
    sent: int = 0
    told: set[int] = field(default_factory=set)
    """Namespaces whose fingerprint it was told."""


class EventFeed:
    """Belongs to the thread of the server's core."""

    def __init__(self, limits: ServerLimits, on_heard: Callable[[bool], None] = lambda _: None) -> None:
        """`on_heard` is told whether there are subscribers: True before the first one hears of anything, False after
        the last one has gone."""
        self._limits = limits
        self._on_heard = on_heard
        self._subscribers: dict[bytes, _Subscriber] = {}
        self._caches: dict[str, LocalCache] = {}
        self._unswept: set[str] = set()
        """Domains from whose memory more blocks have left than could be told at once."""
        self._watched: dict[str, WatchedBlocks[Space]] = {}
        """The blocks that each domain's disks have, as far as subscribers were told, by domain."""
        self._former: dict[str, dict[int, bytes]] = {}
        """Fingerprints of forgotten namespaces, by domain, kept until subscribers were told that all blocks of these
        are gone."""

    @property
    def is_behind(self) -> bool:
        """Whether there are events to send that were not taken yet."""
        return bool(self._unswept) or any(subscriber.queue for subscriber in self._subscribers.values())

    def attach(self, domain: str, cache: LocalCache) -> None:
        """Connects a domain's memory. It reports which blocks leave it for as long as the domain has a subscriber."""
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
        """Returns the connections that have events to take."""
        return [key for key, subscriber in self._subscribers.items() if subscriber.queue or subscriber.lost]

    def take(self, key: bytes, limit: int) -> list[tuple[Event, int]]:
        """Returns the next events of a connection with their numbers, in the order in which to send them."""
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
        """Queues events for subscribers: these blocks can be found in memory from now on."""
        group, hashes, parents = stored
        if not hashes or not self._is_heard(space.domain):
            return
        name_space = space.name_space
        event = Stored(name_space=name_space, medium=Medium.MEMORY, group=group, hashes=hashes, parents=parents)
        self._tell(space, event)
        # The next sweeps tell of blocks that leave from here on, but some may have left before.
        self._tell_gone(space, group, hashes)

    def tell_written(self, space: Space, stored: StoredBlocks, *, medium: Medium, find: FindThere | None) -> None:
        """Queues events for subscribers: these blocks are in a slower tier from now on. `find` returns later which of
        them are still there; None: that cannot be found out."""
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
        """Queues events for subscribers: a slower tier turned out not to have these blocks."""
        if hashes and self._is_heard(space.domain):
            self._tell(space, Removed(name_space=space.name_space, medium=medium, group=group, hashes=hashes))

    def tell_lost(self, count: int) -> None:
        """Counts so many blocks as lost for every subscriber: they were stored, but nothing else is known of them."""
        for domain in {subscriber.domain for subscriber in self._subscribers.values()}:
            self._lose(domain, count)

    def tell_cleared(self, domain: str, fingerprints: Mapping[int, bytes]) -> None:
        """Queues events for subscribers: no block of these namespaces can be found from now on."""
        for name_space, fingerprint in fingerprints.items() if self._is_heard(domain) else ():
            space = Space(domain=domain, name_space=name_space, fingerprint=fingerprint)
            self._tell(space, Cleared(name_space=name_space, medium=Medium.MEMORY))

    def forget(self, domain: str, fingerprints: Mapping[int, bytes]) -> None:
        """Notes that these namespaces no longer exist, and have no blocks in memory. The next sweeps tell that to
        subscribers who still believe in such blocks; blocks of theirs on disks are not told of any more."""
        if domain in self._watched:
            self._watched[domain].forget(lambda space: space.name_space in fingerprints)
        if self._is_heard(domain):
            self._former.setdefault(domain, {}).update(fingerprints)

    def sweep(self, domain: str, fingerprints: Mapping[int, bytes]) -> None:
        """Queues events for some of the blocks that have left memory; `is_behind` is true if there are more.
        `fingerprints`: those of the domain's namespaces."""
        cache, former = self._caches.get(domain), self._former.get(domain, {})
        if cache is None or not self._is_heard(domain) or self._has_much(domain):
            return
        removed = cache.take_removed(self._limits.swept_blocks)
        if removed.lost:
            self._lose(domain, removed.lost)
        for name_space, group, hashes in removed.parts:
            fingerprint = fingerprints.get(name_space) or former.get(name_space)
            # No subscriber has heard of identities of adopted memory that no engine has named yet.
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
        """Queues events for some of the blocks that the disks no longer have. The event loop calls it periodically."""
        watched = self._watched.get(domain)
        for space, group, hashes in () if watched is None else watched.check(self._limits.swept_blocks):
            self.tell_missing(space, group, hashes, medium=Medium.DISK)

    def _tell_gone(self, space: Space, group: int, hashes: bytes) -> None:
        """Queues events for those of these blocks that are not in memory now. The others have come again, which was
        told or will be."""
        cache = self._caches.get(space.domain)
        if cache is None:
            return
        is_there = cache.lookup(space.name_space, group, hashes)
        if not is_there.all():
            gone = as_rows(hashes)[~is_there].tobytes()
            self._tell(space, Removed(name_space=space.name_space, medium=Medium.MEMORY, group=group, hashes=gone))

    def _has_much(self, domain: str) -> bool:
        """Whether a subscriber should first take the events it has: memory remembers which blocks left for longer than
        queues do."""
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
        """Queues this event and those that have to precede it, or counts it as lost."""
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
        """Whether one more subscriber has a place. No owner and no domain can take all of them."""
        total, limit = len(self._subscribers), self._limits.subscribers
        of_owner = sum(one.owner == owner for one in self._subscribers.values())
        of_domain = sum(one.domain == domain for one in self._subscribers.values())
        return has_shares(of_owner, of_domain, total=total, limit=limit)

    def _is_heard(self, domain: str) -> bool:
        return any(subscriber.domain == domain for subscriber in self._subscribers.values())


def _cut(event: SpaceEvent) -> Iterator[SpaceEvent]:
    """Cuts an event into parts of at most `EVENT_BLOCKS`, in their order."""
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
