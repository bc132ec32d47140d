"""Each message costs what its row in the table of prices says, and no more, also where it is as long as it may be.

How long the loop is away is measured by its thread's own clock, in times of what a `mark` takes at that moment: on any
machine, and however busy it is, that is about the same.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from docs.prices import PRICES, Place
from kvoffload.cache import CacheGeometry, CacheGroup, CacheSettings, GroupRule
from kvoffload.kvspec import ReuseRule
from kvoffload.packets import MAX_DESCRIPTORS, Credentials
from kvoffload.peers.peer_server import LinkSession
from kvoffload.protocol import (
    CODEC,
    MESSAGES,
    Bye,
    Call,
    Channel,
    Clear,
    ClientMessage,
    Credits,
    CreditsGranted,
    Drain,
    Explain,
    FormerMemory,
    Greeting,
    Hint,
    HintAction,
    Holding,
    IdentityField,
    Invalidate,
    ListBlocks,
    Mark,
    Offer,
    Prefetch,
    Promote,
    Publish,
    Query,
    Role,
    ServerMessage,
    Subscribe,
)
from kvoffload.protocol.limits import (
    MAX_BLOCKS,
    MAX_FORMER,
    MAX_QUERIES,
    NAME_BYTES,
)
from kvoffload.protocol.message import OneWay
from kvoffload.protocol.survey import FindPrefix
from kvoffload.server.common.steps import Unfinished
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.server.operators.ledger import SESSION_ACCOUNTS
from kvoffload.server.sessions.outbox import Later, Sendable, ToConnection
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.settings import TierSettings
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.units import KIB, MIB
from tests.kit.cache.cache_model import PLAIN
from tests.kit.server.explained import store
from tests.kit.server.guests import HELLO, Visitor
from tests.kit.server.harness import UID, Client, Server, core_settings
from tests.kit.server.largest_messages import (
    CHAIN,
    IDENTITY,
    SHARDS,
    WIDE,
    largest_messages,
    messages_of_channels,
    messages_of_lifelines,
    messages_of_peers,
)
from tests.kit.tiers.memory_tier import MemoryTier

PIDFD = 1_000_000
STORED = 4096
"""Number of blocks that are stored where a test wants some."""
TRIES = 3
MARKS = 100
SMALLEST = CacheGeometry(
    hash_block_size=16, groups=(CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=64),)
)
SUBSCRIBERS = 60
OTHERS = 1000
"""Number of identities that other users have brought, where a test wants some; one user may bring 1,024."""
MEMORY = CacheSettings(memory_bytes=64 * MIB, segment_bytes=64 * MIB, policy="lru")
BY_A_PEER = {"OpenLink", "Introduce"}
"""Served by servers of a fleet only; what they may cost is that of register."""
ON_LIFELINES = {"Greeting", "Holding", "Offer", "Farewell"}


class Links:
    """The links of a server to its peers, each with the same secret."""

    port = 7600
    is_sealed = True

    def open_session(self, peer: str, domain: str) -> LinkSession:
        return LinkSession(b"t" * 16, b"s" * 32)


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
            model = IdentityField(name="model", value=f"{at:0{NAME_BYTES}}")
            other.join(SMALLEST, name=f"other {at}", identity=(*IDENTITY[1:], model))
        for other in others[: OTHERS // 4]:
            store(other, CHAIN[:64])
        self.server.exit_process(*others[OTHERS // 4 :])
        for number in range(0, SESSION_ACCOUNTS, MAX_QUERIES):
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
        done: list[Sendable] = []

        def act_and_pack() -> None:
            done.extend(act())
            for one in done:
                if isinstance(one, ToConnection):
                    CODEC.encode_answer(one.message, number=1, boot_id=1)

        cost.away_s = max(cost.away_s, time_call(act_and_pack))
        return done


@contextmanager
def paying(geometry: CacheGeometry) -> Iterator[Payer]:
    tier = TierTraffic(MemoryTier(), TierSettings(), open_pidfd=lambda: PIDFD)  # type: ignore[arg-type]
    settings = core_settings(operator_uids=frozenset({UID}))
    with Server(settings=settings, memory=MEMORY, tiers={"main": TierChain([tier])}) as server:  # type: ignore[dict-item]
        yield Payer(server, server.process().join(geometry))
        server.core.tiers.close(lambda: server.now_ns)


@pytest.fixture
def payer() -> Iterator[Payer]:
    with paying(WIDE) as made:
        yield made


def measure_mark_s(payer: Payer) -> float:
    """Measures what a `mark` takes: of several measurements the shortest."""
    return min(sum(payer.send(Mark()).away_s for _ in range(MARKS)) / MARKS for _ in range(TRIES))


def check(message: ClientMessage, away_s: float, mark_s: float) -> None:
    """Asserts that the loop was away for no longer than the message's price."""
    marks = PRICES[type(message)].marks
    said = f"{type(message).__name__}: {away_s / mark_s:.0f} of {marks} marks"
    print(said, f"{away_s * 1e3:.2f} ms")
    assert away_s <= marks * mark_s, said


def check_memory(message: ClientMessage, act: Callable[[], object]) -> None:
    """Asserts that a call takes no more memory than the message's price."""
    tracemalloc.start()
    act()
    taken_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_memory(message, taken_bytes)


def assert_memory(message: ClientMessage, taken_bytes: int) -> None:
    most = PRICES[type(message)].memory_mib
    said = f"{type(message).__name__}: {taken_bytes / MIB:.2f} of {most} MiB"
    print(said)
    assert taken_bytes <= most * MIB, said


def measure_peak_bytes(act: Callable[[], object]) -> int:
    """Measures how much more memory this process has during a call than before it, that of native threads too."""
    ctypes.CDLL(None).malloc_trim(0)
    # The kernel forgets the former peak.
    Path("/proc/self/clear_refs").write_text("5")
    before = read_kib("VmRSS")
    act()
    return (read_kib("VmHWM") - before) * KIB


def read_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def time_call(act: Callable[[], object]) -> float:
    """Measures what a call takes without the garbage collector, whose time depends on what other tests have left."""
    gc.disable()
    try:
        begun_s = time.thread_time()
        act()
        return time.thread_time() - begun_s
    finally:
        gc.enable()


def test_every_message_of_a_client_has_a_price() -> None:
    sent = {message for message in MESSAGES if issubclass(message, ClientMessage)}
    assert sent == PRICES.keys()
    beside = {message for message in sent if Channel.CONTROL not in message.channels}
    assert {message for message in sent if PRICES[message].place is Place.CHANNEL} == {
        message for message in beside if message.__name__ not in ON_LIFELINES
    }
    tried = {type(message) for message in largest_messages(0)}
    assert {message.__name__ for message in sent - beside - tried} == BY_A_PEER
    others = [*messages_of_lifelines(0), *messages_of_peers(), *messages_of_channels(0)]
    tried |= {type(message) for message in others}
    assert tried == {message for message in sent if PRICES[message].marks is not None}


def test_no_message_keeps_the_loop_away_for_longer_than_its_price(payer: Payer) -> None:
    for message in largest_messages(payer.client.name_space):
        once = isinstance(message, Bye | Drain)
        away_s = min(payer.send(message).away_s for _ in range(1 if once else TRIES))
        check(message, away_s, measure_mark_s(payer))


def test_what_other_users_have_there_makes_no_message_cost_more_than_its_price(payer: Payer) -> None:
    largest = payer.meet_others()
    for message in largest_messages(payer.client.name_space):
        sent = ListBlocks(name_space=largest.name_space) if isinstance(message, ListBlocks) else message
        once = isinstance(message, Bye | Drain | Clear)
        away_s = min(payer.send(sent).away_s for _ in range(1 if once else TRIES))
        check(message, away_s, measure_mark_s(payer))


def test_the_loop_imports_nothing_for_a_message() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        assert process.submit(send_all_and_find_imports).result() == set()


def send_all_and_find_imports() -> set[str]:
    """Sends each message, about blocks that are in the tier. Returns the modules that were imported meanwhile."""
    with paying(WIDE) as payer:
        store(payer.client, CHAIN[: 32 * STORED])
        payer.server.hear_stored()
        payer.await_idle()
        payer.server.cache.clear(payer.client.name_space)
        there = set(sys.modules)
        for message in largest_messages(payer.client.name_space):
            payer.send(message)
            if isinstance(message, Bye | Drain):
                break
        return set(sys.modules) - there


def test_no_message_leaves_objects_that_hold_each_other() -> None:
    """The loop looks for such only among objects that were made a moment ago."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        assert process.submit(send_all_and_find_garbage).result() == set()


def send_all_and_find_garbage() -> set[str]:
    """Sends each message, and ends the connection. Returns the kinds of the server's objects that hold each other."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    with paying(WIDE) as payer:
        for message in largest_messages(payer.client.name_space):
            payer.send(message)
            if isinstance(message, Bye | Drain):
                break
        gc.collect()
        kinds = {type(one).__module__ + "." + type(one).__qualname__ for one in gc.garbage}
    return {kind for kind in kinds if kind.startswith("kvoffload.server")}


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
    if isinstance(message, Hint) and message.action in (HintAction.PRIORITISE, HintAction.RELEASE):
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
                marks = PRICES[type(message)].marks
                said = f"{type(message).__name__}: {cost.away_s / mark_s:.0f} of {marks} marks"
                print(said, f"{cost.away_s * 1e3:.2f} ms")
                assert cost.away_s <= marks * mark_s, said


def greet(server: CacheServer, greeting: Greeting, *, lifeline: int, uid: int) -> None:
    call = CODEC.decode_call(CODEC.encode_call(greeting, number=1, channel=Channel.LIFELINE), channel=Channel.LIFELINE)
    assert isinstance(call, Call), call
    server.on_greeting(lifeline, call, Credentials(lifeline, uid, uid), os.pidfd_open(os.getpid()))
    assert server.core.sessions.find_lifeline(lifeline) is not None


def test_no_message_of_a_lifeline_costs_more_than_its_price(payer: Payer, tmp_path: Path) -> None:
    """Other users have 1,500 processes there, each of which has memories of 64 former servers."""
    mark_s = measure_mark_s(payer)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}, adopt_wait_s=1e6))
    with closing(server):
        greeting, holding, retiring, offer, farewell = messages_of_lifelines(server.boot_id)
        assert isinstance(greeting, Greeting)
        assert isinstance(offer, Offer)
        for at in range(1, 1501):
            other = replace(greeting, engine=f"{at:0{NAME_BYTES}}", role=Role.OBSERVER, former_boot_id=0)
            greet(server, other, lifeline=at, uid=UID + 1 + at % 4)
            memories = tuple(FormerMemory(memory=at * MAX_FORMER + one, size_bytes=at) for one in range(MAX_FORMER))
            server.core.hear_holding(at, Holding(memories=memories))
        own = range(2001, 2061)
        for lifeline in own:
            worker = replace(greeting, role=Role.WORKER if lifeline > own[0] else Role.SCHEDULER)
            check(
                worker,
                time_call(lambda worker=worker, at=lifeline: greet(server, worker, lifeline=at, uid=UID)),
                mark_s,
            )
            check_memory(worker, lambda worker=worker, at=lifeline: greet(server, worker, lifeline=at, uid=UID))
            if lifeline > own[0]:
                server.core.hear_holding(lifeline, holding)
        while not server.has_memory:
            server.pools.begin()
            server.turn(0.01)
        check(holding, min(time_call(lambda: server.on_holding(own[0], holding)) for _ in range(TRIES)), mark_s)
        check_memory(holding, lambda: server.on_holding(own[0], holding))
        check_memory(retiring, lambda: server.on_holding(own[0], retiring))
        server.on_holding(own[0], holding)
        check(retiring, time_call(lambda: server.on_holding(own[0], retiring)), mark_s)
        server.core.is_offer_wanted = lambda *_: True  # type: ignore[method-assign]
        server.core.count_offered = lambda *_: MAX_DESCRIPTORS  # type: ignore[method-assign]
        for measure in (check_memory, lambda _, act: check(offer, time_call(act), mark_s)):
            files = [os.memfd_create("offered") for _ in range(MAX_DESCRIPTORS)]
            measure(offer, lambda files=files: server.on_offer(own[0], offer, files))  # type: ignore[misc]
        for lifeline in own:
            server.on_farewell(lifeline, farewell)
            if lifeline == own[0]:
                check_memory(farewell, lambda: server.on_end(own[0]))
            else:
                check(farewell, time_call(lambda at=lifeline: server.on_end(at)), mark_s)


def test_no_message_of_a_peer_costs_more_than_its_price() -> None:
    """Engines of other users have brought 1,000 identities."""
    links = Links()
    with Server(memory=MEMORY, links=links) as server:  # type: ignore[arg-type]
        payer = Payer(server, server.process().join(SMALLEST))
        mark_s = measure_mark_s(payer)
        others = [server.process(f"other {at}", uid=UID + 1 + at % 4) for at in range(OTHERS)]
        for at, other in enumerate(others):
            other.join(SMALLEST, name=f"other {at}")
        peer = Visitor(server)
        peer.guest = replace(peer.guest, name="peer", is_peer=True)
        peer.ask(HELLO)
        for message in messages_of_peers():
            check(message, min(time_call(lambda sent=message: peer.ask(sent)) for _ in range(TRIES)), mark_s)
            check_memory(message, lambda sent=message: peer.ask(sent))


def test_no_message_of_an_express_channel_costs_more_than_its_price() -> None:
    """The test uses another process, because an allocator keeps memory that depends on what a process did before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(check_express_channel).result()


def check_express_channel() -> None:
    """The channel's own thread does the work, and the loop tells subscribers and tiers what came of it."""
    wide = CacheGeometry(
        hash_block_size=16,
        groups=(CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=8, shards=SHARDS),),
    )
    tier = TierTraffic(MemoryTier(), TierSettings(), open_pidfd=lambda: PIDFD)  # type: ignore[arg-type]
    with Server(memory=MEMORY, tiers={"main": TierChain([tier])}) as server:  # type: ignore[dict-item]
        payer = Payer(server, server.process().join(wide))
        mark_s = measure_mark_s(payer)
        for number in range(SUBSCRIBERS):
            server.process(f"subscriber {number}", uid=UID + 1 + number % 4).watch().ask(Subscribe())
        express, name_space = payer.client.express, payer.client.name_space
        granted: ServerMessage | None = None
        turns: list[float] = []

        def serve(message: ClientMessage) -> None:
            nonlocal granted, turns
            if isinstance(message, Publish):
                assert isinstance(granted, CreditsGranted)
                assert len(granted.tickets) == len(message.tickets)
                for shard in range(SHARDS):
                    express.tell(replace(message, shard=shard, tickets=granted.tickets))
                    express.confirm()
            elif isinstance(message, OneWay):
                express.tell(message)
            else:
                answer = express.ask(message)
                granted = answer if isinstance(message, Credits) else granted
            express.confirm()
            turns = [time_call(server.hear_some)]
            while server.express.has_untold:
                turns.append(time_call(server.hear_some))

        for message in messages_of_channels(name_space):
            assert_memory(message, measure_peak_bytes(lambda message=message: serve(message)))  # type: ignore[misc]
            if isinstance(message, Publish | Invalidate):
                assert len(turns) > 4
            check(message, max(turns), mark_s)
