"""Each message costs what its row in the table of prices says, and no more, also where it is as long as it may be.

How long the loop is away is measured by its thread's own clock, in times of what a `mark` takes at that moment: on any
machine, and however busy it is, that is about the same.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvoffload.cache import CacheGeometry, CacheGroup, CacheTerms, GroupRule
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import (
    CAPABILITIES,
    CODEC,
    MESSAGES,
    Adopt,
    Bye,
    Call,
    Channel,
    Clear,
    ClientMessage,
    Credits,
    Drain,
    Explain,
    Hello,
    Hint,
    HintAction,
    IdentityField,
    Inspect,
    ListAgentSessions,
    ListBlocks,
    Mark,
    Prefetch,
    Promote,
    Publish,
    Query,
    SetQuota,
    Stats,
    Subscribe,
)
from kvoffload.protocol.hints import ListRetained
from kvoffload.protocol.limits import (
    LINE_BYTES,
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_IDENTITY,
    MAX_QUERIES,
    MAX_REPORT,
    NAME_BYTES,
)
from kvoffload.protocol.message import OneWay
from kvoffload.protocol.survey import FindBlocks, FindPrefix, FollowBlock, ListJoined, ReadIdentity, ReadReport
from kvoffload.server.common.steps import Unfinished
from kvoffload.server.operators.agent_ledger import MAX_AGENTS
from kvoffload.server.prices import PRICES, Place
from kvoffload.server.sessions.outbox import Later, Sendable, ToConnection
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.terms import TierTerms
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.units import MIB
from tests.kit.cache.cache_model import PLAIN
from tests.kit.server.explained import store
from tests.kit.server.harness import UID, Client, Server, core_terms, register_of
from tests.kit.tiers.memory_tier import MemoryTier

PIDFD = 1_000_000
SHARDS = 16
STORED = 4096
"""Number of blocks that are stored where a test wants some."""
TRIES = 3
MARKS = 200
WIDE = CacheGeometry(
    hash_block_size=16,
    groups=tuple(
        CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=64, shards=SHARDS)
        for _ in range(MAX_GROUPS)
    ),
)
"""As many groups as an identity may have, each with every block of a prompt."""
SMALLEST = CacheGeometry(
    hash_block_size=16, groups=(CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=64),)
)
OTHERS = 1000
"""Number of identities that other users have brought, where a test wants some; one user may bring 1,024."""
CHAIN = np.random.default_rng(1).bytes(32 * MAX_BLOCKS)
MEMORY = CacheTerms(memory_bytes=64 * MIB, segment_bytes=64 * MIB, policy="lru")
NAME = "n" * NAME_BYTES
QUERIES = tuple(
    Query(
        asked=2**20,
        promised=2**19,
        missing=np.random.default_rng(number).bytes(32),
        tags=np.random.default_rng(number).bytes(8 * 16_384),
        session=f"{number:0{NAME_BYTES}}",
    )
    for number in range(MAX_QUERIES)
)
IDENTITY = tuple(IdentityField(name=f"{number:0{NAME_BYTES}}", value="v" * 512) for number in range(MAX_IDENTITY))


def largest_messages(name_space: int) -> list[ClientMessage]:
    """Each message of the control channel, at its largest, in an order in which all are served."""
    hints = [
        Hint(name_space=name_space, action=action, chain=CHAIN, session=NAME, priority=1)
        for action in (HintAction.PREFETCH, HintAction.RETAIN, HintAction.HAND_OVER, HintAction.RELEASE)
    ]
    return [
        Mark(),
        Hello(protocol_min=1, protocol_max=1, capabilities=tuple(sorted(CAPABILITIES)), software=NAME),
        register_of(WIDE, identity=IDENTITY, report=bytes(MAX_REPORT)),
        Stats(),
        Subscribe(),
        ListBlocks(name_space=name_space),
        Explain(queries=QUERIES),
        Inspect(),
        ListAgentSessions(),
        ListJoined(),
        ReadReport(engine="engine"),
        ReadIdentity(place=0, identity="z" * NAME_BYTES, model="m" * LINE_BYTES),
        FindBlocks(),
        FollowBlock(name_space=name_space, block_hash=CHAIN[:32]),
        FindPrefix(name_space=name_space, chain=CHAIN, wait_ms=1000),
        Promote(name_space=name_space, chain=CHAIN, wait_ms=1000),
        Prefetch(name_space=name_space, chain=CHAIN),
        *hints,
        ListRetained(),
        SetQuota(tenant=NAME, quota_bytes=1),
        Clear(),
        Adopt(former_boot_id=1, index_bytes=4096, segment_sizes=bytes(8 * 65_536)),
        Drain(),
        Bye(),
    ]


BY_A_PEER = {"OpenLink", "Introduce"}
"""Served by servers of a fleet only; what they may cost is that of register."""
ON_LIFELINES = {"Greeting", "Holding", "Offer", "Farewell"}


@dataclass
class Cost:
    """The longest time for which the loop was away for one message, and the most memory that it took."""

    away_s: float = 0.0
    memory_bytes: int = 0
    parts: int = 0


@dataclass
class Payer:
    """An engine of a server with a tier below its memory."""

    server: Server
    client: Client

    def meet_others(self) -> Client:
        """Brings what other users may have there: identities with blocks, engines, agents' sessions, and retained
        prefixes. Returns an engine of which there are many blocks."""
        others = [self.server.process(f"other {at}", uid=UID + 1 + at % 4) for at in range(OTHERS)]
        for at, other in enumerate(others):
            other.join(SMALLEST, name=f"other {at}", identity=IDENTITY)
        for other in others[: OTHERS // 4]:
            store(other, CHAIN[:64])
        self.server.exit_process(*others[OTHERS // 4 :])
        for number in range(0, MAX_AGENTS, MAX_QUERIES):
            names = (f"{one:0{NAME_BYTES}}" for one in range(number, number + MAX_QUERIES))
            self.client.ask(Explain(queries=tuple(Query(asked=1, promised=0, session=name) for name in names)))
        largest = self.server.process("largest", uid=UID + 5).join(SMALLEST, name="largest")
        for at in range(0, 32 * 16_384, 32 * 2048):
            granted = largest.ask(Credits(name_space=largest.name_space, group=0, count=2048))
            hashes = CHAIN[at : at + 32 * 2048]
            # The tier does not hear of these, because it would take long to store them.
            largest.express.tell(
                Publish(name_space=largest.name_space, group=0, shard=0, tickets=granted.tickets, hashes=hashes)
            )
            assert largest.express.confirm() is None
        retain = Hint(name_space=largest.name_space, action=HintAction.RETAIN, chain=CHAIN[: 32 * 8], priority=1)
        for number in range(512):
            largest.ask(replace(retain, session=f"{number:0{NAME_BYTES}}"))
        self.await_idle()
        return largest

    def send(self, message: ClientMessage, *, uses_memory: bool = False) -> Cost:
        """Sends a message, and serves it to its end as the loop does."""
        is_one_way = isinstance(message, OneWay)
        self.client.one_way += is_one_way
        self.client.number += not is_one_way
        number = self.client.one_way if is_one_way else self.client.number
        frame = CODEC.encode_call(message, number=number, session=self.client.session)
        cost = Cost()
        if uses_memory:
            tracemalloc.start()
        sent = self._stay_away(cost, lambda: self._serve(frame))
        for _ in range(8):
            for later in [one for one in sent if isinstance(one, Later)]:
                while isinstance(found := later.find(), Unfinished):
                    cost.parts += 1
                self._stay_away(cost, lambda later=later, found=found: self.server.core.finish(later, lambda: found))
            self.server.now_ns += 1_000_000
            sent = self._stay_away(cost, lambda: self.server.core.advance(self.server.now_ns))
        if uses_memory:
            cost.memory_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return cost

    def await_idle(self) -> None:
        """Serves until the tier has all that was stored."""
        chain = self.server.core.tiers.find_chain("main")
        assert chain is not None
        for _ in range(10_000):
            self.server.now_ns += 1_000_000
            self.server.core.advance(self.server.now_ns)
            if chain.tiers[0].is_idle:
                return
        raise AssertionError("the tier is never idle")

    def _serve(self, frame: bytes) -> list[Sendable]:
        call = CODEC.decode_call(frame)
        assert isinstance(call, Call), call
        return self.server.core.handle(self.client.key, call, self.server.now_ns, uid=self.client.uid)

    def _stay_away(self, cost: Cost, act: Any) -> Any:
        """Does something as the loop does, which also packs the answers."""
        begun_s = time.thread_time()
        done = act()
        for one in done:
            if isinstance(one, ToConnection):
                CODEC.encode_answer(one.message, number=1, boot_id=1)
        cost.away_s = max(cost.away_s, time.thread_time() - begun_s)
        return done


@contextmanager
def paying(geometry: CacheGeometry) -> Iterator[Payer]:
    tier = TierTraffic(MemoryTier(), TierTerms(), open_pidfd=lambda: PIDFD)  # type: ignore[arg-type]
    terms = core_terms(operator_uids=frozenset({UID}))
    with Server(terms=terms, memory=MEMORY, tiers={"main": TierChain([tier])}) as server:  # type: ignore[dict-item]
        yield Payer(server, server.process().join(geometry))
        server.core.tiers.close(lambda: server.now_ns)


@pytest.fixture
def payer() -> Iterator[Payer]:
    with paying(WIDE) as made:
        yield made


def measure_mark_s(payer: Payer) -> float:
    """Measures what a `mark` takes: of several measurements the shortest."""
    return min(sum(payer.send(Mark()).away_s for _ in range(MARKS)) / MARKS for _ in range(TRIES))


def find_marks(message: ClientMessage) -> int:
    marks = PRICES[type(message)].marks
    assert marks is not None
    return marks


def test_every_message_of_a_client_has_a_price() -> None:
    sent = {message for message in MESSAGES if issubclass(message, ClientMessage)}
    assert sent == PRICES.keys()
    beside = {message for message in sent if Channel.CONTROL not in message.channels}
    assert {message for message in sent if PRICES[message].place is Place.CHANNEL} == {
        message for message in beside if message.__name__ not in ON_LIFELINES
    }
    tried = {type(message) for message in largest_messages(0)}
    assert tried == {message for message in sent if PRICES[message].marks is not None}
    assert {message.__name__ for message in sent - beside - tried} == BY_A_PEER


def test_no_message_keeps_the_loop_away_for_longer_than_its_price(payer: Payer) -> None:
    mark_s = measure_mark_s(payer)
    for message in largest_messages(payer.client.name_space):
        once = isinstance(message, Bye | Drain)
        away_s = min(payer.send(message).away_s for _ in range(1 if once else TRIES))
        marks = find_marks(message)
        said = f"{type(message).__name__}: {away_s / mark_s:.0f} of {marks} marks"
        print(said, f"{away_s * 1e3:.2f} ms")
        assert away_s <= marks * mark_s, said


def test_what_other_users_have_there_makes_no_message_cost_more_than_its_price(payer: Payer) -> None:
    mark_s = measure_mark_s(payer)
    largest = payer.meet_others()
    for message in largest_messages(payer.client.name_space):
        sent = ListBlocks(name_space=largest.name_space) if isinstance(message, ListBlocks) else message
        once = isinstance(message, Bye | Drain | Clear)
        away_s = min(payer.send(sent).away_s for _ in range(1 if once else TRIES))
        marks = find_marks(message)
        said = f"{type(message).__name__}: {away_s / mark_s:.0f} of {marks} marks"
        print(said, f"{away_s * 1e3:.2f} ms")
        assert away_s <= marks * mark_s, said


def test_no_message_takes_more_memory_than_its_price(payer: Payer) -> None:
    for message in largest_messages(payer.client.name_space):
        payer.send(message)
        if isinstance(message, Bye | Drain):
            break
        cost, price = payer.send(message, uses_memory=True), PRICES[type(message)]
        print(f"{type(message).__name__}: {cost.memory_bytes / MIB:.1f} of {price.memory_mib} MiB")
        frame_bytes = len(CODEC.encode_call(message, number=1, session=1))
        assert cost.memory_bytes - frame_bytes <= price.memory_mib * MIB, type(message).__name__


@pytest.mark.parametrize(
    "message",
    [message for message in largest_messages(0) if isinstance(message, Promote | Prefetch | Hint | FindPrefix)],
)
def test_what_is_long_is_looked_for_beside_the_loop(payer: Payer, message: Any) -> None:
    """In parts, so that the other users of that thread have their turns."""
    if isinstance(message, Hint) and message.action is HintAction.RELEASE:
        assert payer.send(message).parts == 0
    else:
        assert payer.send(message).parts >= 4


@pytest.mark.parametrize("is_in_memory", [True, False], ids=["in memory", "in the tier"])
def test_blocks_that_are_there_keep_the_loop_away_for_no_longer(is_in_memory: bool) -> None:
    """A prompt of 131,072 names, all of which are there; they are those of 4,096 blocks, again and again."""
    with paying(PLAIN) as payer:
        chain = CHAIN[: 32 * STORED]
        store(payer.client, chain)
        payer.server.hear_stored()
        payer.await_idle()
        if not is_in_memory:
            payer.server.cache.clear(payer.client.name_space)
        mark_s = measure_mark_s(payer)
        for message in largest_messages(payer.client.name_space):
            if isinstance(message, Promote | Prefetch | Hint | FindPrefix):
                cost = payer.send(replace(message, chain=chain * (MAX_BLOCKS // STORED)))
                marks = find_marks(message)
                said = f"{type(message).__name__}: {cost.away_s / mark_s:.0f} of {marks} marks"
                print(said, f"{cost.away_s * 1e3:.2f} ms")
                assert cost.away_s <= marks * mark_s, said
