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


@dataclass(kw_only=True)
class _Watch:
    """What a domain's subscribers believe to be stored, so that its end can be told: the cache does not say who had to
    go. A few are looked up at each tick, and none while nothing has changed."""

    hashes: dict[tuple[int, int], bytearray] = field(default_factory=dict)
    """By namespace and group."""
    fingerprints: dict[int, bytes] = field(default_factory=dict)
    todo: list[tuple[int, int]] = field(default_factory=list)
    """Of the present pass; the last one from `offset` on."""
    offset: int = 0
    pass_version: int = -1
    done_version: int = -1

    def count(self) -> int:
        return sum(map(len, self.hashes.values())) // HASH_BYTES


class EventFeed:
    """Belongs to the thread of the server's core."""

    def __init__(self, limits: ServerLimits, on_heard: Callable[[bool], None] = lambda _: None) -> None:
        """`on_heard` is told before the first subscriber hears of anything, and after the last."""
        self._limits = limits
        self._on_heard = on_heard
        self._subscribers: dict[bytes, _Subscriber] = {}
        self._watches: dict[str, _Watch] = {}

    @property
    def watched_blocks(self) -> int:
        """Blocks whose end subscribers are to hear of, of all domains."""
        return sum(watch.count() for watch in self._watches.values())

    @property
    def watched_namespaces(self) -> int:
        """Identities that such blocks have, or had until now."""
        return sum(len(watch.fingerprints) for watch in self._watches.values())

    def subscribe(self, key: bytes, domain: str, name_spaces: tuple[int, ...], *, owner: str = "") -> bool:
        """Replaces the connection's earlier subscription. False: there are too many, or too many of its owner's."""
        if key not in self._subscribers and not self._has_room(domain, owner):
            return False
        self._subscribers[key] = _Subscriber(domain=domain, owner=owner, name_spaces=frozenset(name_spaces))
        self._on_heard(True)
        self._watches.setdefault(domain, _Watch())
        return True

    def unsubscribe(self, key: bytes) -> None:
        ended = self._subscribers.pop(key, None)
        if ended is not None and not self._is_heard(ended.domain):
            del self._watches[ended.domain]
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
        watch = self._watches.get(space.domain)
        if watch is None or not hashes:
            return
        name_space = space.name_space
        event = Stored(name_space=name_space, medium=Medium.MEMORY, group=group, hashes=hashes, parents=parents)
        self._tell(space, event)
        watch.fingerprints[name_space] = space.fingerprint
        # They may be gone already, at a version that was looked at before they were told.
        watch.done_version = -1
        room = max(self._limits.watched_blocks - watch.count(), 0) * HASH_BYTES
        watch.hashes.setdefault((name_space, group), bytearray()).extend(hashes[:room])
        if len(hashes) > room:
            self._lose(space.domain, (len(hashes) - room) // HASH_BYTES)

    def tell_lost(self, count: int) -> None:
        """So many blocks were stored of which nothing else is known."""
        for domain in self._watches:
            self._lose(domain, count)

    def tell_cleared(self, space: Space) -> None:
        """Nothing of this namespace can be found from now on."""
        watch = self._watches.get(space.domain)
        if watch is None:
            return
        self._tell(space, Cleared(name_space=space.name_space, medium=Medium.MEMORY))
        for key in [key for key in watch.hashes if key[0] == space.name_space]:
            del watch.hashes[key]
        watch.todo, watch.offset = [], 0

    def forget(self, domain: str, fingerprints: Mapping[int, bytes]) -> None:
        """Nobody has these numbers any more, nor any block of theirs. Whoever thinks so is told."""
        watch = self._watches.get(domain)
        if watch is None:
            return
        step = self._limits.swept_blocks * HASH_BYTES
        for name_space, group in [key for key in watch.hashes if key[0] in fingerprints]:
            space = Space(domain=domain, name_space=name_space, fingerprint=fingerprints[name_space])
            gone = bytes(watch.hashes.pop((name_space, group)))
            for first in range(0, len(gone), step):
                part = gone[first : first + step]
                self._tell(space, Removed(name_space=name_space, medium=Medium.MEMORY, group=group, hashes=part))
        watch.todo, watch.offset = [], 0
        for subscriber in self._subscribers.values():
            if subscriber.domain == domain:
                subscriber.told -= fingerprints.keys()

    def sweep(self, domain: str, cache: LocalCache) -> None:
        """Tells of some of the blocks that are gone."""
        watch = self._watches.get(domain)
        if watch is None or (not watch.todo and watch.done_version == cache.version):
            return
        if not watch.todo:
            watch.todo, watch.offset, watch.pass_version = list(watch.hashes), 0, cache.version
        left = self._limits.swept_blocks * HASH_BYTES
        while left and watch.todo:
            key = watch.todo[-1]
            part = bytes(watch.hashes[key][watch.offset : watch.offset + left])
            left -= len(part)
            kept = self._check(domain, watch, key, part, cache)
            watch.hashes[key][watch.offset : watch.offset + len(part)] = kept
            watch.offset += len(kept)
            if watch.offset == len(watch.hashes[key]):
                watch.todo.pop()
                watch.offset = 0
                if not watch.hashes[key]:
                    del watch.hashes[key]
        if not watch.todo:
            watch.done_version = watch.pass_version
            watched = {name_space for name_space, _ in watch.hashes}
            watch.fingerprints = {number: name for number, name in watch.fingerprints.items() if number in watched}

    def _check(self, domain: str, watch: _Watch, key: tuple[int, int], hashes: bytes, cache: LocalCache) -> bytes:
        """Those that are still there; subscribers hear of the others."""
        name_space, group = key
        rows = as_rows(hashes)
        is_there = cache.lookup(name_space, group, hashes)
        if not is_there.all():
            gone = rows[~is_there].tobytes()
            space = Space(domain=domain, name_space=name_space, fingerprint=watch.fingerprints[name_space])
            self._tell(space, Removed(name_space=name_space, medium=Medium.MEMORY, group=group, hashes=gone))
        return rows[is_there].tobytes()

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
