"""Peers that may open links to a server and introduce identities, and the news of what they store."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvoffload.cache import LocalCache
from kvoffload.config.tcp_address import TcpAddress
from kvoffload.peers import PeerSpace, SpaceTable
from kvoffload.peers.loop_queue import LoopQueue
from kvoffload.peers.peer_server import LinkSession
from kvoffload.protocol import Done, ErrorCode, GroupTerms, Introduce, LinkOpened, OpenLink, Registered
from kvoffload.server import DomainSettings, peer_links
from kvoffload.server.peer_links import PeeringPlan, PeerLinks, open_peer_links
from kvoffload.server.sessions.event_feed import Space
from kvoffload.tiers.base import RecordNames, RecordOutcome
from kvoffload.types import ReuseRule
from tests.kit.cache.cache_model import HYBRID, PLAIN, SMALL, fingerprint, make_chain
from tests.kit.server.guests import HELLO, Visitor
from tests.kit.server.harness import Server, code_of, core_settings, greeted, register_of
from tests.kit.server.tier_setting import TierSetting

PEER = "peer"


@dataclass
class Opener:
    port: int = 7600
    is_sealed: bool = True
    opened: list[tuple[str, str]] = field(default_factory=list)

    def open_session(self, peer: str, domain: str) -> LinkSession:
        self.opened.append((peer, domain))
        return LinkSession(b"t" * 16, b"s" * 32)


@pytest.fixture
def opener() -> Opener:
    return Opener()


@pytest.fixture
def server(opener: Opener) -> Iterator[Server]:
    with Server(links=opener) as made:
        yield made


def peer_of(server: Server, *, is_peer: bool = True) -> Visitor:
    from dataclasses import replace

    visitor = Visitor(server)
    visitor.guest = replace(visitor.guest, name=PEER, is_peer=is_peer)
    visitor.ask(HELLO)
    return visitor


def introduce(geometry: Any = HYBRID, name: str = "model") -> Introduce:
    register = register_of()
    groups = (
        register.groups if geometry is HYBRID else (GroupTerms(record_bytes=1, block_size=16, reuse=ReuseRule.PREFIX),)
    )
    return Introduce(fingerprint=register.fingerprint, hash_block_size=register.hash_block_size, groups=groups)


def test_a_peer_is_told_where_links_go(server: Server, opener: Opener) -> None:
    answer = peer_of(server).ask(OpenLink(is_sealed=True))
    assert answer == LinkOpened(port=7600, token=b"t" * 16, secret=b"s" * 32)
    assert opener.opened == [(PEER, "main")]


def test_who_is_no_peer_opens_nothing(server: Server, opener: Opener) -> None:
    watcher = peer_of(server, is_peer=False)
    for message in (OpenLink(), introduce()):
        assert code_of(watcher.ask(message)) is ErrorCode.NOT_ALLOWED
    engine = greeted(server, "engine")
    for message in (OpenLink(), introduce()):
        assert code_of(engine.ask(message)) is ErrorCode.NOT_ALLOWED
    assert opener.opened == []


def test_both_sides_must_say_whether_links_are_sealed(server: Server, opener: Opener) -> None:
    answer = peer_of(server).ask(OpenLink(is_sealed=False))
    assert code_of(answer) is ErrorCode.MISMATCH
    assert "set peer_link = 'sealed'" in answer.message
    assert opener.opened == []


def test_a_server_without_links_says_so_at_hello() -> None:
    from dataclasses import replace

    settings = core_settings()
    without = replace(settings.handshake, capabilities=settings.handshake.capabilities - {PEER})
    with Server(settings=replace(settings, handshake=without)) as server:
        visitor = Visitor(server)
        assert PEER not in visitor.ask(HELLO).capabilities
        assert code_of(visitor.ask(OpenLink())) is ErrorCode.UNSUPPORTED


def test_an_identity_may_come_from_a_peer_before_any_engine(server: Server) -> None:
    assert peer_of(server).ask(introduce()) == Done()
    assert peer_of(server).ask(introduce()) == Done()
    registered = greeted(server, "engine").ask(register_of())
    assert isinstance(registered, Registered)
    assert server.cache.stats.namespaces == 1


def test_another_geometry_of_a_known_identity_is_refused(server: Server) -> None:
    greeted(server, "engine").ask(register_of())
    assert code_of(peer_of(server).ask(introduce(PLAIN))) is ErrorCode.MISMATCH


def test_before_memory_is_there_a_peer_is_told_to_come_again(opener: Opener) -> None:
    with Server(links=opener, memory=None, domains=(DomainSettings(name="main"),)) as server:
        assert code_of(peer_of(server).ask(introduce())) is ErrorCode.BUSY


def test_there_is_an_office_where_there_is_a_plan() -> None:
    assert open_peer_links(None, open_pidfd=lambda: -1, clock=time.monotonic) is None


class Core:
    """A core that notes what it is told, and has a disk from which everything comes at once."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    @property
    def tiers(self) -> Any:
        return self

    @property
    def feed(self) -> Any:
        return self

    def tell_stored(self, *stored: Any) -> None:
        self.told.append(("stored", *stored))

    def tell_lost(self, lost: int) -> None:
        self.told.append(("lost", lost))

    def forget(self, *removed: Any) -> bool:
        self.told.append(("removed", *removed))
        return True

    def bring(self, *wanted: Any, wait_s: float, then: Callable[[], None]) -> None:
        self.told.append(("wanted", *wanted, wait_s))
        then()


def test_the_loop_hears_of_what_links_do() -> None:
    spaces = SpaceTable()
    plan = PeeringPlan(address=TcpAddress("127.0.0.1", 0), spaces=spaces)
    opener = PeerLinks(plan, open_pidfd=lambda: os.pidfd_open(os.getpid()), clock=time.monotonic)
    with LocalCache.create(SMALL) as cache:
        number = cache.open_namespace(fingerprint("model"), PLAIN)
        spaces.learn(number, fingerprint("model"), PLAIN)
        setting = TierSetting(PLAIN)
        access = opener.attach("main", cache, setting.chain)
        names = RecordNames(fingerprint=fingerprint("model"), hashes=b"h" * 32)
        room = access.reserve(names, PLAIN.groups[0].record_bytes)
        assert room is not None
        digests = np.array([5], np.uint64)
        access.commit(room, names, claimed=digests, found=digests, parents=b"p" * 32)
        # A removal is answered when the loop has done its part, and no sooner.
        assert access.remove(names, wait_s=0).tolist() == [RecordOutcome.FAILED]
        outcomes: list[int] = []
        link = threading.Thread(target=lambda: outcomes.extend(access.remove(names, wait_s=30)))
        core = Core()
        opener.tell(core, 7)
        link.start()
        assert select.select([opener], [], [], 30)[0]
        assert outcomes == []
        opener.tell(core, 7)
        link.join()
        assert outcomes == [RecordOutcome.MISSING]
        space = Space(domain="main", name_space=number, fingerprint=fingerprint("model"))
        removed = ("removed", space, 0, b"h" * 32)
        assert core.told == [("stored", space, (0, b"h" * 32, b"p" * 32)), removed, removed]
        # Blocks of the disk are promoted for a link that waits, on a thread of its own.
        chain = make_chain(1, 4)
        setting.save_below(chain)
        below = RecordNames(fingerprint=fingerprint("model"), hashes=chain)
        assert access.look(below).tolist() == [RecordOutcome.FOUND] * 4
        link = threading.Thread(
            target=access.acquire, args=(below, PLAIN.groups[0].record_bytes), kwargs={"wait_s": 30}
        )
        link.start()
        assert select.select([opener], [], [], 30)[0]
        core.told.clear()
        opener.tell(core, 7)
        link.join()
        assert core.told == [("wanted", space, 0, chain, 7, 30)]
        opener.tick()
        setting.close()
        opener.close()


def test_a_server_that_ends_keeps_no_link_waiting() -> None:
    queue = LoopQueue()
    loop = peer_links.LoopLink("main", queue, None)
    space = PeerSpace(number=1, fingerprint=fingerprint("model"), geometry=PLAIN)
    link = threading.Thread(target=loop.bring, args=(space, 0, b"h" * 32, 3600.0))
    link.start()
    assert select.select([queue], [], [], 30)[0]
    queue.refuse()
    link.join(30)
    assert not link.is_alive()
    queue.close()
