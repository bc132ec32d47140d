"""A prefetch promotes blocks from the tiers, within a bound; blocks that are never loaded are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from kvoffload.cache import Ask, LocalCache
from kvoffload.protocol import HintAction, HintOutcome
from kvoffload.server import ServerLimits
from kvoffload.server.hints import prefetches
from kvoffload.server.hints.prefix_blocks import PrefixBlocks
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.settings import TierSettings, TierSpace
from kvoffload.server.tiering.traffic import TierTraffic
from tests.kit.cache.cache_model import KIB, PLAIN, make_chain
from tests.kit.server.explained import store
from tests.kit.server.harness import UID, Client, Server
from tests.kit.server.hinted import SETTINGS, counts, hint, list_retained, pass_time, watch
from tests.kit.tiers.memory_tier import MemoryTier

PREFETCH = HintAction.PREFETCH


@pytest.fixture
def server() -> Iterator[Server]:
    tier = TierTraffic(MemoryTier(), TierSettings(name="disk"), open_pidfd=lambda: 1_000_000)
    with Server(settings=SETTINGS, tiers={"main": TierChain([tier])}) as made:
        yield made


@pytest.fixture
def engine(server: Server) -> Client:
    return server.process("first").join(PLAIN)


def bring_down(engine: Client, chain: bytes, *, kept: int = 0) -> None:
    """Its blocks are in the tier, and but for the first few not in memory any more."""
    store(engine, chain)
    turn(engine)
    engine.server.cache.invalidate(engine.name_space, 0, chain[kept * 32 :])


def turn(engine: Client) -> None:
    for _ in range(8):
        pass_time(engine, 0.001)


def count_there(engine: Client, chain: bytes) -> int:
    return int(engine.server.cache.lookup(engine.name_space, 0, chain).sum())


def load(engine: Client, chain: bytes) -> None:
    session = engine.server.cache.open_session()
    found = engine.server.cache.acquire(session, engine.name_space, Ask(chain))
    assert found.is_hit
    engine.server.cache.release(session, found.lease)


def test_it_answers_what_memory_and_tiers_have_and_brings_the_rest(server: Server, engine: Client) -> None:
    chain = make_chain(1, 8)
    bring_down(engine, chain, kept=2)
    told = hint(engine, PREFETCH, chain + bytes(64))
    assert (told.outcome, told.tokens, told.ttl_ms) == (HintOutcome.PARTLY, 128, 0)
    turn(engine)
    assert count_there(engine, chain) == 8
    assert hint(engine, PREFETCH, chain).outcome is HintOutcome.DONE
    load(engine, chain)
    pass_time(engine, 1)
    assert counts(watch(server))[1] == {"hit_prefetched": 6 * 16}
    assert hint(engine, PREFETCH, make_chain(2, 4)).outcome is HintOutcome.NOTHING


def test_up_to_a_limit_of_tokens(engine: Client) -> None:
    chain = make_chain(1, 8)
    bring_down(engine, chain)
    told = hint(engine, PREFETCH, chain, limit=70)
    assert (told.outcome, told.tokens) == (HintOutcome.DONE, 64)
    turn(engine)
    assert count_there(engine, chain) == 4


def test_what_nobody_loads_is_counted_and_bounds_what_comes(server: Server, engine: Client) -> None:
    """However many are asked for, others' blocks make room for no more than that."""
    first, second = make_chain(1, 32), make_chain(2, 8)
    bring_down(engine, first)
    bring_down(engine, second)
    told = hint(engine, PREFETCH, first)
    assert (told.outcome, told.tokens) == (HintOutcome.PARTLY, 24 * 16)
    turn(engine)
    assert count_there(engine, first) == 24
    told = hint(engine, PREFETCH, second)
    assert (told.outcome, told.tokens) == (HintOutcome.OVER_LIMIT, 0)
    pass_time(engine, prefetches.UNUSED_S)
    assert counts(watch(server))[1] == {"unused_prefetched": 24 * 16}
    assert hint(engine, PREFETCH, second).outcome is HintOutcome.DONE


def test_what_was_loaded_makes_place_for_more(engine: Client) -> None:
    first, second = make_chain(1, 24), make_chain(2, 24)
    bring_down(engine, first)
    bring_down(engine, second)
    hint(engine, PREFETCH, first)
    turn(engine)
    load(engine, first)
    pass_time(engine, 1)
    assert hint(engine, PREFETCH, second).tokens == 24 * 16


def test_no_more_come_at_a_time_than_leave_the_tier_to_engines(engine: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetches, "MAX_COMING", 0)
    chain = make_chain(1, 8)
    bring_down(engine, chain)
    assert hint(engine, PREFETCH, chain).outcome is HintOutcome.OVER_LIMIT


@pytest.mark.parametrize("bound", ["MAX_PREFETCHED", "MAX_COMING"])
def test_nobody_has_all_places(server: Server, engine: Client, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(prefetches, bound, 4)
    other = server.process("other", uid=UID + 1).join(PLAIN)
    chains = [make_chain(number, 1) for number in range(6)]
    for chain in chains:
        bring_down(engine, chain)
    # No record arrives from now on, so promotions stay under way.
    monkeypatch.setattr(MemoryTier, "poll", lambda _: [])
    told = [hint(engine, PREFETCH, chain).outcome for chain in chains[:4]]
    assert told == [HintOutcome.DONE] * 3 + [HintOutcome.OVER_LIMIT]
    assert hint(other, PREFETCH, chains[4]).outcome is HintOutcome.DONE
    assert hint(other, PREFETCH, chains[5]).outcome is HintOutcome.OVER_LIMIT


def test_a_session_that_was_elsewhere_is_retained_when_it_has_come(server: Server, engine: Client) -> None:
    chain, operator = make_chain(1, 8), watch(server)
    bring_down(engine, chain, kept=2)
    told = hint(engine, HintAction.HAND_OVER, chain, session="s", ttl_ms=9000, priority=1)
    assert (told.outcome, told.tokens, told.ttl_ms) == (HintOutcome.DONE, 128, 9000)
    turn(engine)
    [row] = list_retained(operator)
    assert (row.session, row.engine, row.tokens, row.size_bytes) == ("s", "first", 128, 8 * 4 * KIB)


def test_one_that_is_released_while_it_comes_is_not_retained(server: Server, engine: Client) -> None:
    chain, operator = make_chain(1, 8), watch(server)
    bring_down(engine, chain)
    assert hint(engine, HintAction.HAND_OVER, chain, session="s").outcome is HintOutcome.DONE
    assert hint(engine, HintAction.RELEASE, session="s").outcome is HintOutcome.DONE
    turn(engine)
    assert list_retained(operator) == []


def test_an_operator_releases_what_comes_for_an_engine(server: Server, engine: Client) -> None:
    chain, operator = make_chain(1, 8), watch(server)
    bring_down(engine, chain)
    assert hint(engine, HintAction.HAND_OVER, chain, session="s").outcome is HintOutcome.DONE
    said = {"session": "s", "name_space": engine.name_space}
    assert hint(operator, HintAction.RELEASE, **said).outcome is HintOutcome.DONE
    turn(engine)
    assert list_retained(operator) == []


def test_what_has_come_and_may_not_be_retained_is_counted(
    server: Server, engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, operator = make_chain(1, 8), watch(server)
    bring_down(engine, chain)
    store(engine, make_chain(2, 90))
    with monkeypatch.context() as held:
        held.setattr(MemoryTier, "poll", lambda _: [])
        hint(engine, HintAction.HAND_OVER, chain, session="s")
        hint(engine, HintAction.RETAIN, make_chain(2, 90), session="t", priority=9)
    turn(engine)
    assert [row.session for row in list_retained(operator)] == ["t"]
    assert counts(operator)[0] == {"hand_over.done": 1, "retain.done": 1, "hand_over.over_limit": 1}


def test_what_came_for_an_identity_that_is_forgotten_is_forgotten_too() -> None:
    chain = make_chain(1, 8)
    tier = TierTraffic(MemoryTier(), TierSettings(name="disk"), open_pidfd=lambda: 1_000_000)
    limits = ServerLimits(namespaces=1)
    with Server(settings=SETTINGS, limits=limits, tiers={"main": TierChain([tier])}) as server:
        engine = server.process("first").join(PLAIN, name="one")
        bring_down(engine, chain)
        hint(engine, PREFETCH, chain)
        turn(engine)
        assert count_there(engine, chain) == 8
        pass_time(engine, 1)
        server.cache.clear(engine.name_space)
        server.exit_process(engine)
        other = server.process("second").join(PLAIN, name="two")
        pass_time(other, 1)
        assert server.core.faults.logged == set()
        assert counts(watch(server))[1] == {}


def test_of_many_some_are_looked_at_at_a_time_and_all_in_turn(
    server: Server, engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetches, "LOOKED_AT_ONCE", 2)
    looked: list[bytes] = []

    def note(blocks: PrefixBlocks, cache: LocalCache, *, since: int) -> bool:
        looked.append(blocks.parts[0][1])
        return False

    monkeypatch.setattr(PrefixBlocks, "was_used", note)
    space = TierSpace(number=engine.name_space, fingerprint=b"f" * 32, geometry=PLAIN)
    watched, names = prefetches.Prefetches(Counter()), [make_chain(number, 1) for number in range(5)]
    for name in names:
        blocks = PrefixBlocks(space=space, tokens=16, parts=((0, name),))
        watched.begin(prefetches.Prefetched(payer="", blocks=blocks, tokens=16, since=0, ends_s=9.0))
    for turn_s in range(5):
        watched.advance(server.cache, turn_s)
    assert looked == names * 2
    for _ in range(3):
        watched.advance(server.cache, 9.0)
    assert watched.tokens == {"unused_prefetched": 5 * 16}
