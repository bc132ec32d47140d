"""Events: complete and in order, or the loss is told."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.cache import RemovedBlocks, StoredBlocks
from kvoffload.protocol import (
    BlocksListed,
    Error,
    ErrorCode,
    EventsLost,
    Invalidate,
    ListBlocks,
    Medium,
    NamespaceOpened,
    Removed,
    ServerMessage,
    Stored,
    Subscribe,
    Subscribed,
)
from kvoffload.protocol.message import Event
from kvoffload.server import DomainSettings, ServerCore, ServerLimits
from kvoffload.server.core import LISTINGS_AT_ONCE
from kvoffload.server.sessions.event_feed import EVENT_BLOCKS, EventFeed, Space
from kvoffload.server.sessions.outbox import ToConnection
from tests.kit.cache.cache_model import MIB, PLAIN, SMALL, fingerprint, make_chain
from tests.kit.server.chains import save_chain
from tests.kit.server.harness import CacheWithoutProcesses, Client, Server, core_settings


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


def cut(names: bytes) -> list[bytes]:
    return [names[at : at + 32] for at in range(0, len(names), 32)]


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
        events = take(router)
        stored = [event for event in events if isinstance(event, Stored)]
        assert [len(event.hashes) // 32 for event in stored] == [EVENT_BLOCKS, EVENT_BLOCKS, 1]
        assert b"".join(event.hashes for event in stored) == chain
        assert b"".join(event.parents for event in stored) == parents
        # No engine has stored these blocks, so that they are gone already.
        removed = [event for event in events if isinstance(event, Removed)]
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
    assert sorted(cut(told)) == sorted(cut(chain[2 * 32 :]))
    server.core.tick()
    assert take(router) == []


def test_what_was_gone_before_it_was_told_is_told_too(server: Server, engine: Client, router: Client) -> None:
    """Blocks that came by an express channel are told a moment later."""
    gone = make_chain(1, 2)
    space = Space(domain="main", name_space=engine.name_space, fingerprint=fingerprint("model"))
    server.core.tell_stored(space, StoredBlocks(0, gone, b""))
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


def test_a_cleared_namespace_is_told_at_once_and_its_blocks_soon(
    server: Server, engine: Client, router: Client
) -> None:
    save_chain(server.cache, engine, make_chain(1, 5), PLAIN)
    take(router)
    server.core.tell_cleared("main", {engine.name_space})
    assert kinds(take(router)) == ["Cleared"]
    # Blocks stored before the clear are told, and so is their removal.
    save_chain(server.cache, engine, make_chain(2, 2), PLAIN)
    assert server.cache.clear(engine.name_space) == 7
    server.core.tick()
    stored, removed = take(router)
    assert (type(stored), type(removed)) == (Stored, Removed)
    assert removed.hashes == make_chain(1, 5) + make_chain(2, 2)  # type: ignore[attr-defined]


def test_what_came_again_has_not_left(server: Server, engine: Client, router: Client) -> None:
    chain = make_chain(1, 2)
    save_chain(server.cache, engine, chain, PLAIN)
    server.cache.evict(MIB)
    save_chain(server.cache, engine, chain, PLAIN)
    server.core.tick()
    assert kinds(take(router)) == ["NamespaceOpened", "Stored", "Stored"]


def test_what_left_is_told_in_parts_and_no_part_is_waited_for(server: Server, engine: Client, router: Client) -> None:
    """Of 20 blocks a tick tells 8, and each turn of the loop 8 more."""
    save_chain(server.cache, engine, make_chain(1, 20), PLAIN)
    take(router)
    assert not server.core.feed.is_behind
    server.cache.evict(MIB)
    server.core.tick()
    told = [take(router)]
    while server.core.feed.is_behind:
        server.core.tell_more()
        told.append(take(router))
    assert [len(event.hashes) // 32 for events in told for event in events if isinstance(event, Removed)] == [8, 8, 4]


def test_a_subscriber_takes_what_it_has_before_more_is_told() -> None:
    with Server(limits=ServerLimits(queued_hashes=30, swept_blocks=8)) as server:
        engine = server.process().join(PLAIN)
        router = server.process("router").watch()
        router.ask(Subscribe())
        save_chain(server.cache, engine, make_chain(1, 10), PLAIN)
        server.cache.evict(MIB)
        for _ in range(5):
            server.core.tick()
        assert kinds(take(router)) == ["NamespaceOpened", "Stored"]
        for _ in range(2):
            server.core.tick()
        assert kinds(take(router)) == ["Removed", "Removed"]


def test_who_hears_nothing_costs_nothing(server: Server, engine: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    save_chain(server.cache, engine, make_chain(1, 5), PLAIN)
    server.cache.evict(MIB)
    assert server.cache.take_removed(100).parts == []
    called: list[str] = []
    monkeypatch.setattr(server.cache, "lookup", lambda *_: called.append("lookup"))
    monkeypatch.setattr(server.cache, "take_removed", lambda *_: called.append("take_removed"))
    server.core.tell_stored(
        Space(domain="main", name_space=engine.name_space, fingerprint=fingerprint("model")),
        StoredBlocks(0, make_chain(1, 1), b""),
    )
    server.core.tick()
    assert called == []


def test_nothing_is_kept_for_those_who_have_gone(server: Server, engine: Client, router: Client) -> None:
    save_chain(server.cache, engine, make_chain(1, 5), PLAIN)
    server.core.close_connection(router.key)
    server.cache.evict(MIB)
    assert server.cache.take_removed(100).parts == []


def test_a_subscriber_that_came_before_the_memory_hears_what_leaves_it() -> None:
    with Server(memory=None) as server:
        router = server.process("router").watch()
        assert router.ask(Subscribe()) == Subscribed()
        server.attach("main", CacheWithoutProcesses.create(SMALL))
        engine = server.process().join(PLAIN)
        save_chain(server.cache, engine, make_chain(1, 2), PLAIN)
        server.cache.evict(MIB)
        server.core.tick()
        assert kinds(take(router)) == ["NamespaceOpened", "Stored", "Removed"]


def ask_listing(client: Client, name_space: int, first: int = 0) -> ServerMessage:
    assert client.ask(ListBlocks(name_space=name_space, first=first)) is None
    (sent,) = client.server.core.advance(client.server.now_ns)
    assert isinstance(sent, ToConnection)
    assert (sent.connection, sent.number) == (client.key, client.number)
    return sent.message


def list_all(client: Client, name_space: int) -> list[BlocksListed]:
    parts: list[BlocksListed] = []
    while not parts or parts[-1].next:
        answer = ask_listing(client, name_space, parts[-1].next if parts else 0)
        assert isinstance(answer, BlocksListed)
        parts.append(answer)
    return parts


def test_an_inventory_has_all_blocks_of_an_identity_in_parts() -> None:
    with Server(limits=ServerLimits(listed_blocks=4)) as server:
        engine = server.process().join()
        other = server.process("other").join(PLAIN, "another")
        save_chain(server.cache, engine, make_chain(1, 4))
        save_chain(server.cache, other, make_chain(2, 3), PLAIN)
        router = server.process("router").watch()
        parts = list_all(router, engine.name_space)
        assert all(len(part.hashes) <= 4 * 32 for part in parts)
        rows = [
            (group, part.hashes[at * 32 : at * 32 + 32], part.parents[at * 32 : at * 32 + 32])
            for part in parts
            for at, group in enumerate(np.frombuffer(part.groups, "<u8").tolist())
        ]
        assert sorted(group for group, _, _ in rows) == [0, 0, 0, 0, 1, 1, 2]
        chain = make_chain(1, 4)
        before = {name: parent for group, name, parent in rows if group == 0}
        assert before == {chain[at : at + 32]: (bytes(32) + chain)[at : at + 32] for at in range(0, 128, 32)}


def test_an_inventory_of_what_nobody_has_is_refused(server: Server, engine: Client, router: Client) -> None:
    refused = ask_listing(router, 99)
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.NOT_FOUND
    with Server(memory=None) as empty:
        refused = ask_listing(empty.process("router").watch(), 0)
        assert isinstance(refused, Error)
        assert refused.code is ErrorCode.BUSY


def test_a_turn_of_the_loop_has_few_listings_and_one_of_a_connection() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        save_chain(server.cache, engine, make_chain(1, 2), PLAIN)
        routers = [server.process(f"router {at}").watch() for at in range(LISTINGS_AT_ONCE + 2)]
        asked = ListBlocks(name_space=engine.name_space)
        for router in routers:
            assert router.ask(asked) is None
        assert not server.core.feed.is_behind
        refused = routers[0].ask(asked)
        assert isinstance(refused, Error)
        assert refused.code is ErrorCode.BUSY
        server.core.close_connection(routers[-1].key)
        answered = []
        while server.core.is_behind:
            turn = [sent.connection for sent in server.core.advance(server.now_ns) if isinstance(sent, ToConnection)]
            answered.append(turn)
        keys = [router.key for router in routers]
        assert answered == [keys[:LISTINGS_AT_ONCE], [keys[LISTINGS_AT_ONCE]]]


@pytest.mark.parametrize("seed", range(20))
def test_who_subscribes_and_takes_the_inventory_knows_what_is_there(seed: int) -> None:
    """Blocks are stored and removed meanwhile, and after lost events it takes the inventory again."""
    random = Random(seed)
    limits = ServerLimits(listed_blocks=5, swept_blocks=7, queued_events=6 if seed % 2 else 1024)
    with Server(limits=limits) as server:
        engine = server.process().join(PLAIN)
        router = server.process("router").watch()

        def change() -> None:
            match random.randrange(4):
                case 0 | 1:
                    save_chain(server.cache, engine, make_chain(random.randrange(6), random.randrange(1, 12)), PLAIN)
                case 2:
                    gone = make_chain(random.randrange(6), 12)[32 * random.randrange(12) :][:64]
                    server.cache.invalidate(engine.name_space, 0, gone)
                case _:
                    server.cache.evict(random.randrange(1, 4) * 4096)
            if random.random() < 0.3:
                server.core.tick()

        for _ in range(10):
            change()
        assert router.ask(Subscribe()) == Subscribed()
        known: set[bytes] = set()
        confirmed: set[bytes] = set()
        first, is_listing, has_lost = 0, True, False

        def hear(limit: int) -> bool:
            lost = False
            for event in take(router, limit):
                if isinstance(event, Stored):
                    known.update(cut(event.hashes))
                    confirmed.update(cut(event.hashes))
                elif isinstance(event, Removed):
                    known.difference_update(cut(event.hashes))
                lost |= isinstance(event, EventsLost)
            return lost

        for at in range(200):
            if at < 100:
                change()
            else:
                server.core.tick()
            has_lost |= hear(random.randrange(4) if at < 100 else 100)
            if has_lost:
                first, is_listing, has_lost = 0, True, False
                confirmed.clear()
            elif is_listing:
                answer = ask_listing(router, engine.name_space, first)
                assert isinstance(answer, BlocksListed)
                known.update(cut(answer.hashes))
                confirmed.update(cut(answer.hashes))
                first, is_listing = answer.next, answer.next != 0
                if not is_listing:
                    known &= confirmed
        there = set(cut(server.cache.survey(b"", limit=1000).hashes))
        assert not is_listing
        assert known == there


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
        # Events that were taken do not count any more: two events of four hashes each.
        for conversation in (5, 6):
            save_chain(server.cache, engine, make_chain(conversation, 2), PLAIN)
        assert kinds(take(router)) == ["Stored", "Stored"]


def test_what_memory_lost_count_of_is_a_loss(
    server: Server, engine: Client, router: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = RemovedBlocks(parts=[], lost=3, is_all=True)
    monkeypatch.setattr(server.cache, "take_removed", lambda _: removed)
    server.core.tick()
    assert take(router) == [EventsLost(count=3)]


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
    domains = tuple(DomainSettings(name=name) for name in ("red", "blue"))
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
    """The feed tells whether any domain has a subscriber."""
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
    core = ServerCore(core_settings(), (DomainSettings(name="main"),), draw=lambda: 1, on_heard=heard.append)
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
    opened, stored, removed = take(router)
    assert opened == NamespaceOpened(name_space=engine.name_space, fingerprint=fingerprint("model"))
    assert isinstance(stored, Stored)
    # They are not there.
    assert isinstance(removed, Removed)
    assert (stored.group, stored.hashes, stored.parents) == (0, chain, bytes(32) + chain[:-32])


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


def test_of_forgotten_identities_nothing_is_told_of_disks() -> None:
    feed = EventFeed(ServerLimits())
    feed.subscribe(b"router", "main", ())
    spaces = [Space(domain="main", name_space=number, fingerprint=bytes([number]) * 32) for number in (7, 8)]
    chain, kept = make_chain(1, 4), True

    def find(group: int, hashes: bytes) -> npt.NDArray[np.bool_]:
        return np.full(len(hashes) // 32, kept)

    for space in spaces:
        feed.tell_written(space, StoredBlocks(0, chain, bytes(128)), medium=Medium.DISK, find=find)
    feed.take(b"router", 100)
    feed.forget("main", {7: spaces[0].fingerprint})
    kept = False
    feed.check_disks("main")
    (event, _), *rest = feed.take(b"router", 100)
    assert (event, rest) == (Removed(name_space=8, medium=Medium.DISK, group=0, hashes=chain), [])
