"""Events: complete and in order, or the loss is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffload.cache import StoredBlocks
from kvoffload.protocol import (
    Cleared,
    Error,
    ErrorCode,
    EventsLost,
    Invalidate,
    NamespaceOpened,
    Removed,
    Stored,
    Subscribe,
    Subscribed,
)
from kvoffload.protocol.message import Event
from kvoffload.server import DomainTerms, ServerCore, ServerLimits
from kvoffload.server.event_feed import EVENT_BLOCKS, EventFeed, Space
from tests.kit.cache.cache_model import MIB, PLAIN, fingerprint, make_chain
from tests.kit.server.chains import save_chain
from tests.kit.server.harness import Client, Server, core_terms


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(limits=ServerLimits(queued_events=4, swept_blocks=8)) as made:
        yield made


@pytest.fixture
def engine(server: Server) -> Client:
    return server.process().join(PLAIN)


@pytest.fixture
def router(server: Server, engine: Client) -> Client:
    watching = server.process("router").watch()
    assert watching.ask(Subscribe()) == Subscribed()
    return watching


def take(client: Client, limit: int = 100) -> list[Event]:
    taken = client.server.core.feed.take(client.key, limit)
    client.number = 0
    return [event for event, _ in taken]


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_stored_blocks_are_told_with_their_parents(server: Server, engine: Client, router: Client) -> None:
    chain = make_chain(1, 3)
    save_chain(server.cache, engine, chain, PLAIN)
    assert server.core.feed.ready() == [router.key]
    opened, stored = take(router)
    assert opened == NamespaceOpened(name_space=engine.name_space, fingerprint=fingerprint("model"))
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.parents) == (chain, bytes(32) + chain[:-32])
    assert server.core.feed.ready() == []


def test_events_are_small_whatever_was_stored_at_once() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        router = server.process("router").watch()
        router.ask(Subscribe())
        space = Space(domain="main", name_space=engine.name_space, fingerprint=fingerprint("model"))
        chain = make_chain(1, 2 * EVENT_BLOCKS + 1)
        parents = bytes(32) + chain[:-32]
        server.core.tell_stored(space, StoredBlocks(0, chain, parents))
        stored = [event for event in take(router) if isinstance(event, Stored)]
        assert [len(event.hashes) // 32 for event in stored] == [EVENT_BLOCKS, EVENT_BLOCKS, 1]
        assert b"".join(event.hashes for event in stored) == chain
        assert b"".join(event.parents for event in stored) == parents
        # Nobody has stored them, so that they are gone at the next look.
        server.core.tick()
        removed = [event for event in take(router) if isinstance(event, Removed)]
        assert [len(event.hashes) // 32 for event in removed] == [EVENT_BLOCKS, EVENT_BLOCKS, 1]
        assert b"".join(event.hashes for event in removed) == chain


def test_numbers_have_no_holes(server: Server, engine: Client, router: Client) -> None:
    numbers = []
    for conversation in range(3):
        save_chain(server.cache, engine, make_chain(conversation, 2), PLAIN)
        numbers += [number for _, number in server.core.feed.take(router.key, 1)]
    numbers += [number for _, number in server.core.feed.take(router.key, 100)]
    assert numbers == [1, 2, 3, 4]


def test_a_block_is_told_once_all_shards_are_there(server: Server) -> None:
    engine = server.process().join()
    router = server.process("router").watch()
    router.ask(Subscribe())
    chain = make_chain(1, 4)
    save_chain(server.cache, engine, chain)
    stored = [event for event in take(router) if isinstance(event, Stored)]
    assert [(event.group, len(event.hashes) // 32) for event in stored] == [(0, 4), (1, 2), (2, 1)]


def test_removed_blocks_are_told_whatever_removed_them(server: Server, engine: Client, router: Client) -> None:
    chain = make_chain(1, 20)
    save_chain(server.cache, engine, chain, PLAIN)
    take(router)
    engine.tell(Invalidate(name_space=engine.name_space, group=0, hashes=chain[: 2 * 32]))
    for _ in range(3):
        server.core.tick()
    (removed,) = take(router)
    assert isinstance(removed, Removed)
    assert removed.hashes == chain[: 2 * 32]
    server.cache.evict(MIB)
    told = b""
    for _ in range(3):
        server.core.tick()
        told += b"".join(event.hashes for event in take(router) if isinstance(event, Removed))
    assert told == chain[2 * 32 :]
    server.core.tick()
    assert take(router) == []


def test_what_was_gone_before_it_was_told_is_told_too(server: Server, engine: Client, router: Client) -> None:
    """Blocks that came by an express channel are told a moment later."""
    for _ in range(3):
        server.core.tick()
    gone = make_chain(1, 2)
    space = Space(domain="main", name_space=engine.name_space, fingerprint=fingerprint("model"))
    server.core.tell_stored(space, StoredBlocks(0, gone, b""))
    server.core.tick()
    assert kinds(take(router)) == ["NamespaceOpened", "Stored", "Removed"]


def test_nothing_is_looked_up_while_nothing_changes(
    server: Server, engine: Client, router: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_chain(server.cache, engine, make_chain(1, 20), PLAIN)
    for _ in range(4):
        server.core.tick()
    looked: list[int] = []
    monkeypatch.setattr(server.cache, "lookup", lambda *_: looked.append(1))
    server.core.tick()
    assert looked == []
    monkeypatch.undo()
    server.cache.evict(MIB)
    server.core.tick()
    assert kinds(take(router))[-1] == "Removed"


def test_a_cleared_namespace_is_one_event(server: Server, engine: Client, router: Client) -> None:
    save_chain(server.cache, engine, make_chain(1, 5), PLAIN)
    take(router)
    server.core.tell_cleared("main", engine.name_space)
    assert server.cache.clear(engine.name_space) == 5
    (cleared,) = take(router)
    assert isinstance(cleared, Cleared)
    server.core.tick()
    assert take(router) == []


def test_a_namespace_may_be_cleared_while_its_blocks_are_looked_at(
    server: Server, engine: Client, router: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """A tick looks at 8 of the 20."""
    save_chain(server.cache, engine, make_chain(1, 20), PLAIN)
    server.core.tick()
    server.core.tell_cleared("main", engine.name_space)
    server.cache.clear(engine.name_space)
    server.core.tick()
    save_chain(server.cache, engine, make_chain(2, 2), PLAIN)
    server.cache.evict(MIB)
    assert kinds(take(router)) == ["NamespaceOpened", "Stored", "Cleared", "Stored"]
    server.core.tick()
    assert kinds(take(router)) == ["Removed"]
    assert caplog.records == []


def test_a_slow_subscriber_is_told_what_it_lost(server: Server, engine: Client, router: Client) -> None:
    """The queue holds 4: one namespace and three of the five events."""
    for conversation in range(5):
        save_chain(server.cache, engine, make_chain(conversation, 2), PLAIN)
    events = take(router)
    assert kinds(events) == ["NamespaceOpened", "Stored", "Stored", "Stored", "EventsLost"]
    assert events[-1] == EventsLost(count=2)


def test_the_loss_is_told_where_it_was(server: Server, engine: Client, router: Client) -> None:
    for conversation in range(5):
        save_chain(server.cache, engine, make_chain(conversation, 2), PLAIN)
    assert kinds(take(router, 3)) == ["NamespaceOpened", "Stored", "Stored"]
    save_chain(server.cache, engine, make_chain(9, 2), PLAIN)
    events = take(router)
    assert kinds(events) == ["Stored", "EventsLost", "Stored"]
    assert events[1] == EventsLost(count=2)
    assert events[2].hashes == make_chain(9, 2)  # type: ignore[attr-defined]


def test_a_namespace_is_opened_for_whoever_lost_it(server: Server, engine: Client, router: Client) -> None:
    other = server.process("other").join(PLAIN, "another")
    for conversation in range(4):
        save_chain(server.cache, engine, make_chain(conversation, 2), PLAIN)
    save_chain(server.cache, other, make_chain(1, 2), PLAIN)
    take(router)
    save_chain(server.cache, other, make_chain(2, 2), PLAIN)
    assert kinds(take(router)) == ["NamespaceOpened", "Stored"]


def test_hashes_in_a_queue_are_bounded() -> None:
    with Server(limits=ServerLimits(queued_hashes=10)) as server:
        engine = server.process().join(PLAIN)
        router = server.process("router").watch()
        router.ask(Subscribe())
        # Larger than the bound, but alone; then no other until it is taken.
        for conversation in range(2):
            save_chain(server.cache, engine, make_chain(conversation, 20), PLAIN)
        assert kinds(take(router)) == ["NamespaceOpened", "Stored", "EventsLost"]
        # What was taken does not count any more: two events of four hashes each.
        for conversation in (5, 6):
            save_chain(server.cache, engine, make_chain(conversation, 2), PLAIN)
        assert kinds(take(router)) == ["Stored", "Stored"]


def test_blocks_beyond_the_watch_are_a_loss() -> None:
    with Server(limits=ServerLimits(watched_blocks=3)) as server:
        engine = server.process().join(PLAIN)
        router = server.process("router").watch()
        router.ask(Subscribe())
        save_chain(server.cache, engine, make_chain(1, 5), PLAIN)
        events = take(router)
        assert events[-1] == EventsLost(count=2)
        server.cache.evict(MIB)
        server.core.tick()
        (removed,) = take(router)
        assert removed.hashes == make_chain(1, 3)  # type: ignore[attr-defined]


def test_a_subscription_is_of_the_namespaces_that_it_names(server: Server, engine: Client) -> None:
    other = server.process("other").join(PLAIN, "another")
    router = server.process("router").watch()
    router.ask(Subscribe(name_spaces=(other.name_space,)))
    save_chain(server.cache, engine, make_chain(1, 2), PLAIN)
    assert take(router) == []
    save_chain(server.cache, other, make_chain(1, 2), PLAIN)
    assert kinds(take(router)) == ["NamespaceOpened", "Stored"]


def test_once_more_replaces_the_subscription(server: Server, engine: Client, router: Client) -> None:
    save_chain(server.cache, engine, make_chain(1, 2), PLAIN)
    router.ask(Subscribe())
    assert take(router) == []
    save_chain(server.cache, engine, make_chain(2, 2), PLAIN)
    assert [number for _, number in server.core.feed.take(router.key, 100)] == [1, 2]


@pytest.mark.parametrize("how", ["hello", "close", "lifeline"])
def test_a_subscription_ends_with_its_connection(server: Server, engine: Client, router: Client, how: str) -> None:
    save_chain(server.cache, engine, make_chain(1, 2), PLAIN)
    key = router.key
    match how:
        case "hello":
            router.connect()
            router.server.core.close_connection(key)
        case "close":
            server.core.close_connection(key)
        case "lifeline":
            server.core.close_lifeline(router.lifeline)
    assert server.core.feed.take(key, 10) == []
    assert server.core.feed.ready() == []


def test_subscribers_are_bounded() -> None:
    with Server(limits=ServerLimits(subscribers=1)) as server:
        first, second = server.process("a").watch(), server.process("b").watch()
        assert first.ask(Subscribe()) == Subscribed()
        assert first.ask(Subscribe()) == Subscribed()
        refused = second.ask(Subscribe())
        assert isinstance(refused, Error)
        assert refused.code is ErrorCode.BUSY


def test_no_user_and_no_domain_gets_all_subscriptions() -> None:
    domains = tuple(DomainTerms(name=name) for name in ("red", "blue"))
    with Server(domains=domains, limits=ServerLimits(subscribers=8)) as server:

        def subscribe(uid: int, domain: str) -> bool:
            return bool(server.process("router", uid=uid, domain=domain).watch().ask(Subscribe()) == Subscribed())

        assert [subscribe(1, "red") for _ in range(7)] == [True] * 6 + [False]
        assert [subscribe(uid, "red") for uid in (2, 3)] == [True, False]
        assert subscribe(4, "blue")


def make_feed() -> tuple[EventFeed, list[bool]]:
    heard: list[bool] = []
    return EventFeed(ServerLimits(subscribers=3), heard.append), heard


def test_it_is_told_whether_anybody_hears() -> None:
    """Of any domain."""
    feed, heard = make_feed()
    feed.unsubscribe(b"nobody")
    assert heard == []
    for key, domain in ((b"1", "a"), (b"2", "b"), (b"3", "b")):
        assert feed.subscribe(key, domain, ())
        assert heard[-1]
    assert not feed.subscribe(b"4", "c", ())
    for key in (b"1", b"2"):
        feed.unsubscribe(key)
        assert heard[-1]
    feed.unsubscribe(b"3")
    assert not heard[-1]
    feed.subscribe(b"3", "b", ())
    assert heard[-1]


def test_a_server_is_told_with_a_subscription_and_its_end() -> None:
    heard: list[bool] = []
    core = ServerCore(core_terms(), (DomainTerms(name="main"),), draw=lambda: 1, on_heard=heard.append)
    with Server() as server:
        server.core = core
        router = server.process("router").watch()
        assert heard == []
        assert router.ask(Subscribe()) == Subscribed()
        assert heard == [True]
        core.close_connection(router.key)
        assert heard == [True, False]


def test_what_was_stored_without_the_core_is_told_likewise(server: Server, engine: Client, router: Client) -> None:
    chain = make_chain(1, 2)
    space = Space(domain="main", name_space=engine.name_space, fingerprint=fingerprint("model"))
    server.core.tell_stored(space, StoredBlocks(0, chain, bytes(32) + chain[:-32]))
    opened, stored = take(router)
    assert opened == NamespaceOpened(name_space=engine.name_space, fingerprint=fingerprint("model"))
    assert isinstance(stored, Stored)
    assert (stored.group, stored.hashes, stored.parents) == (0, chain, bytes(32) + chain[:-32])
    # It is watched, too: they are not there.
    server.core.tick()
    assert kinds(take(router)) == ["Removed"]


def test_what_is_not_known_is_lost_to_all(server: Server, router: Client) -> None:
    other = server.process("other").watch()
    assert other.ask(Subscribe(name_spaces=(99,))) == Subscribed()
    server.core.feed.tell_lost(3)
    server.core.feed.tell_lost(4)
    for client in (router, other):
        assert take(client) == [EventsLost(count=7)]
        assert take(client) == []


def test_what_is_lost_is_lost_to_every_domain_that_hears() -> None:
    feed, _ = make_feed()
    for key, domain in ((b"1", "a"), (b"2", "b"), (b"3", "b")):
        feed.subscribe(key, domain, ())
    feed.unsubscribe(b"1")
    feed.tell_lost(2)
    assert feed.ready() == [b"2", b"3"]
    feed.unsubscribe(b"2")
    feed.unsubscribe(b"3")
    feed.tell_lost(2)
    feed.subscribe(b"1", "a", ())
    assert feed.ready() == []
