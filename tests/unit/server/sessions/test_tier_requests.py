"""The core serves engines' requests to tiers: over the wire, with a tier below one of two domains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.cache import NO_LIMIT, SessionId
from kvoffload.protocol import (
    Credits,
    ErrorCode,
    HelloAccepted,
    Invalidate,
    Medium,
    Prefetch,
    Promote,
    Promoted,
    PromotionOutcome,
    Publish,
    Removed,
    Stats,
    Stored,
    Subscribe,
)
from kvoffload.protocol.message import Event
from kvoffload.server import DomainSettings
from kvoffload.server.sessions.outbox import ToConnection
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.settings import TierSettings
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.tiers import RecordNames, RecordOutcome
from tests.kit.cache.cache_model import PLAIN, SMALL, fingerprint, make_chain
from tests.kit.server.chains import save_chain
from tests.kit.server.harness import CacheWithoutProcesses, Client, Server, code_of, numbers
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.memory_tier import MemoryTier

CHAIN = make_chain(1, 4)
PIDFD = 1_000_000


@dataclass
class Setting:
    server: Server
    tier: FaultyTier
    lost: set[int] = field(default_factory=set)
    """Places in batches that are read, of records that are not there any more."""

    def turn(self) -> list[Promoted]:
        """Turns as the loop does, and returns what was answered."""
        answers = []
        for _ in range(4):
            self.server.now_ns += 1_000_000
            for sent in self.server.core.tiers.advance(self.server.now_ns):
                assert isinstance(sent, ToConnection)
                assert isinstance(sent.message, Promoted)
                answers.append(sent.message)
        return answers

    def save(self, engine: Client) -> None:
        slots = numbers(engine.ask(Credits(name_space=engine.name_space, group=0, count=4)).tickets)
        parents = bytes(32) + CHAIN[:-32]
        told = Publish(
            name_space=engine.name_space, group=0, shard=0, tickets=slots.tobytes(), hashes=CHAIN, parents=parents
        )
        assert engine.tell(told) is None


@pytest.fixture
def setting() -> Iterator[Setting]:
    def decide(verb: str, place: int) -> RecordOutcome | None:
        return RecordOutcome.MISSING if verb == "get" and place in made.lost else None

    tier = FaultyTier(MemoryTier(), decide)
    traffic = TierChain([TierTraffic(tier, TierSettings(), open_pidfd=lambda: PIDFD)])
    with Server(domains=(DomainSettings(name="main"), DomainSettings(name="plain")), tiers={"main": traffic}) as server:
        made = Setting(server, tier)
        yield made
        tier.is_held = False
        server.core.tiers.close(lambda: server.now_ns)


def test_blocks_go_down_and_come_up_again_and_routers_hear_of_it(setting: Setting) -> None:
    engine, router = setting.server.process().join(PLAIN), setting.server.process("router").watch()
    router.ask(Subscribe())
    setting.save(engine)
    setting.turn()
    setting.server.core.feed.take(router.key, 100)
    setting.server.cache.clear(engine.name_space)
    assert engine.ask(Promote(name_space=engine.name_space, chain=CHAIN, wait_ms=1000)) is None
    assert [answer.outcome for answer in setting.turn()] == [PromotionOutcome.COMPLETE]
    assert setting.server.cache.lookup(engine.name_space, 0, CHAIN).all()
    told = [event for event, _ in setting.server.core.feed.take(router.key, 100)]
    assert [event.hashes for event in told if isinstance(event, Stored)] == [CHAIN]


def told_of(setting: Setting, router: Client, medium: Medium) -> list[tuple[type[Event], bytes]]:
    told = [event for event, _ in setting.server.core.feed.take(router.key, 100)]
    return [(type(one), one.hashes) for one in told if isinstance(one, Stored | Removed) and one.medium is medium]


def test_routers_hear_what_a_disk_has_and_what_it_has_no_more(setting: Setting) -> None:
    engine, router = setting.server.process().join(PLAIN), setting.server.process("router").watch()
    router.ask(Subscribe())
    setting.save(engine)
    setting.turn()
    assert told_of(setting, router, Medium.DISK) == [(Stored, CHAIN)]
    # Memory may lose them.
    setting.server.cache.clear(engine.name_space)
    setting.server.core.tick()
    assert told_of(setting, router, Medium.DISK) == []
    names = RecordNames(fingerprint=fingerprint("model"), hashes=CHAIN[:64])
    setting.tier.remove(names, timeout_s=1.0)
    setting.server.core.tick()
    assert told_of(setting, router, Medium.DISK) == [(Removed, CHAIN[:64])]
    setting.server.core.tick()
    assert told_of(setting, router, Medium.DISK) == []


def test_what_comes_to_a_disk_block_by_block_is_looked_up_at_once(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, router = setting.server.process().join(PLAIN), setting.server.process("router").watch()
    router.ask(Subscribe())
    for at in range(0, len(CHAIN), 32):
        save_chain(setting.server.cache, engine, CHAIN[at : at + 32], PLAIN)
        setting.turn()
    assert [hashes for _, hashes in told_of(setting, router, Medium.DISK)] == [
        CHAIN[at : at + 32] for at in range(0, len(CHAIN), 32)
    ]
    asked: list[bytes] = []
    contains = MemoryTier.contains

    def note(tier: MemoryTier, names: RecordNames) -> npt.NDArray[np.bool_]:
        asked.append(names.hashes)
        return contains(tier, names)

    monkeypatch.setattr(MemoryTier, "contains", note)
    setting.server.core.feed.check_disks("main")
    assert asked == [CHAIN]


def test_routers_hear_what_was_written_to_a_store_of_others_and_was_not_found_there(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryTier, "knows_all", False)
    engine, router = setting.server.process().join(PLAIN), setting.server.process("router").watch()
    router.ask(Subscribe())
    setting.save(engine)
    setting.turn()
    assert told_of(setting, router, Medium.REMOTE) == [(Stored, CHAIN)]
    setting.server.cache.clear(engine.name_space)
    setting.lost = {1, 2}
    engine.ask(Promote(name_space=engine.name_space, chain=CHAIN, wait_ms=1000))
    setting.turn()
    assert told_of(setting, router, Medium.REMOTE) == [(Removed, CHAIN[32:96])]


def test_nothing_is_watched_for_nobody(setting: Setting) -> None:
    engine, router = setting.server.process().join(PLAIN), setting.server.process("router").watch()
    setting.save(engine)
    setting.turn()
    router.ask(Subscribe())
    setting.server.core.tick()
    assert told_of(setting, router, Medium.DISK) == []


def test_an_answer_that_waits_has_a_time(setting: Setting) -> None:
    engine = setting.server.process().join(PLAIN)
    setting.save(engine)
    setting.turn()
    setting.server.cache.clear(engine.name_space)
    assert setting.server.core.tiers.next_ns() is None
    setting.tier.is_held = True
    engine.ask(Promote(name_space=engine.name_space, chain=CHAIN, wait_ms=50))
    due_ns = setting.server.core.tiers.next_ns()
    assert due_ns == pytest.approx(setting.server.now_ns + 50_000_000, abs=1000)
    setting.server.now_ns = due_ns
    assert [answer.outcome for answer in setting.turn()] == [PromotionOutcome.PARTLY]


def test_what_is_invalidated_is_gone_below_too(setting: Setting) -> None:
    engine = setting.server.process().join(PLAIN)
    setting.save(engine)
    setting.turn()
    assert engine.tell(Invalidate(name_space=engine.name_space, group=0, hashes=CHAIN)) is None
    engine.ask(Promote(name_space=engine.name_space, chain=CHAIN, wait_ms=50))
    assert [answer.outcome for answer in setting.turn()] == [PromotionOutcome.NOTHING]


def test_only_a_domain_with_a_tier_says_that_it_can_promote(setting: Setting) -> None:
    for domain, has_tier in (("main", True), ("plain", False)):
        engine = setting.server.process(domain=domain)
        engine.greet()
        accepted = engine.connect()
        assert isinstance(accepted, HelloAccepted)
        assert ("promote" in accepted.capabilities) is has_tier
    other = setting.server.process(domain="plain").join(PLAIN)
    assert code_of(other.ask(Promote(name_space=other.name_space, chain=CHAIN))) is ErrorCode.UNSUPPORTED
    assert other.tell(Prefetch(name_space=other.name_space, chain=CHAIN)) is None
    setting.save(other)
    setting.turn()
    assert setting.tier.asked == []


def test_another_namespace_cannot_be_named(setting: Setting) -> None:
    engine = setting.server.process().join(PLAIN)
    assert code_of(engine.ask(Promote(name_space=9, chain=CHAIN))) is ErrorCode.NOT_FOUND
    assert code_of(engine.tell(Prefetch(name_space=9, chain=CHAIN))) is ErrorCode.NOT_FOUND


def test_a_prefetch_has_no_answer_but_an_effect(setting: Setting) -> None:
    engine = setting.server.process().join(PLAIN)
    setting.save(engine)
    setting.turn()
    setting.server.cache.clear(engine.name_space)
    assert engine.tell(Prefetch(name_space=engine.name_space, chain=CHAIN)) is None
    assert setting.turn() == []
    assert setting.server.cache.lookup(engine.name_space, 0, CHAIN).all()


def test_nothing_is_promoted_for_a_server_that_ends(setting: Setting) -> None:
    engine = setting.server.process().join(PLAIN)
    setting.save(engine)
    setting.server.core.start_drain(setting.server.now_ns)
    answer = engine.ask(Promote(name_space=engine.name_space, chain=CHAIN))
    assert code_of(answer) is ErrorCode.DRAINING


def test_a_fault_of_the_tier_is_one_line_and_the_server_goes_on(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = setting.server.process().join(PLAIN)
    monkeypatch.setattr(setting.tier, "poll", lambda: 1 / 0)
    assert setting.turn() == []
    assert [record.message for record in caplog.records] == ["tier traffic met a fault; the server goes on"]
    assert engine.ask(Stats()) is not None


class FullCache(CacheWithoutProcesses):
    """The session that is opened as the `full_at`th has no place."""

    full_at = 0

    def open_session(self, *, held_limit_bytes: int = NO_LIMIT, owner: int | None = None) -> SessionId:
        self.full_at -= 1
        if self.full_at == 0:
            raise RuntimeError("there are 4096 sessions, more are not served")
        return super().open_session(held_limit_bytes=held_limit_bytes, owner=owner)


@pytest.mark.parametrize("full_at", [1, 2])
def test_adopted_memory_without_a_place_for_a_tier_is_served_without_it(
    full_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FaultyTier(MemoryTier())
    traffic = TierChain([TierTraffic(tier, TierSettings(), open_pidfd=lambda: PIDFD)])
    with Server(memory=None, tiers={"main": traffic}) as server:
        cache = FullCache.create(SMALL)
        cache.full_at = full_at
        server.attach("main", cache)
        assert "attaching tiers to domain 'main' met a fault; the server goes on" in caplog.text
        setting, engine = Setting(server, tier), server.process().join(PLAIN)
        setting.save(engine)
        engine.ask(Promote(name_space=engine.name_space, chain=CHAIN, wait_ms=50))
        assert [answer.outcome for answer in setting.turn()] == [PromotionOutcome.NOTHING]
        assert tier.asked == []
        assert cache.lookup(engine.name_space, 0, CHAIN).all()
        server.core.tiers.close(lambda: server.now_ns)
