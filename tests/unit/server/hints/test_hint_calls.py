"""Retained prefixes stay, within bounds and until they give way in the stated order; no engine can touch another's."""

from __future__ import annotations

import pytest

from kvoffload import server as server_package
from kvoffload.cache import Ask, CacheGeometry
from kvoffload.protocol import Clear, Drain, ErrorCode, HintAction, Hinted, HintOutcome, Registered, Stats
from kvoffload.protocol.hints import ListRetained
from kvoffload.server import ServerLimits
from kvoffload.server.hints.hint_calls import DEFAULT_TTL_MS
from tests.kit.cache.cache_model import HYBRID, KIB, PLAIN, block_hashes, make_chain
from tests.kit.instructions import Instructions
from tests.kit.server.chains import save_chain
from tests.kit.server.explained import store
from tests.kit.server.harness import UID, Client, Server, code_of, greeted, register_of
from tests.kit.server.held_writer import held_writer
from tests.kit.server.hinted import SETTINGS, counts, hint, list_retained, pass_time, try_hint, watch

RETAIN, RELEASE, PRIORITISE = HintAction.RETAIN, HintAction.RELEASE, HintAction.PRIORITISE
BLOCKS = 256
"""That the memory has room for, of PLAIN."""


def fill(engine: Client, blocks: int = BLOCKS, conversation: int = 1000) -> None:
    """Others' blocks, as many as the memory has room for."""
    for number in range(blocks // 8):
        store(engine, make_chain(conversation + number, 8))


def has(engine: Client, chain: bytes, geometry: CacheGeometry = PLAIN) -> bool:
    """Whether memory has all blocks of all groups that a load of the chain needs."""
    tokens = len(chain) // 32 * geometry.hash_block_size
    session = engine.server.cache.open_session()
    found = engine.server.cache.acquire(session, engine.name_space, Ask(chain))
    engine.server.cache.release(session, found.lease)
    return found.boundary == tokens


def test_what_is_retained_is_not_evicted_until_it_ends() -> None:
    with Server(settings=SETTINGS) as server:
        engine, chain = server.process("first").join(PLAIN), make_chain(1, 4)
        store(engine, chain)
        told = hint(engine, RETAIN, chain + bytes(32), session="s", ttl_ms=5000)
        assert (told.outcome, told.tokens, told.ttl_ms) == (HintOutcome.PARTLY, 64, 5000)
        fill(engine)
        pass_time(engine, 4.9)
        fill(engine, conversation=2000)
        assert has(engine, chain)
        pass_time(engine, 0.2)
        fill(engine, conversation=3000)
        assert not has(engine, chain)
        assert counts(watch(server)) == (
            {"retain.partly": 1},
            {"hit_retained": 64, "unused_retained": 0, "gave_way": 0},
        )


def test_of_a_hybrid_model_all_groups_are_retained() -> None:
    chain = make_chain(1, 8)
    with Server(settings=SETTINGS) as server:
        engine = server.process("first").join(HYBRID)
        save_chain(server.cache, engine, chain)
        assert hint(engine, RETAIN, chain).tokens == 128
        for number in range(40):
            save_chain(server.cache, engine, make_chain(100 + number, 8))
        assert has(engine, chain, HYBRID)
        # Only what a load needs: of the window the last blocks, of the state the last one.
        held = [
            server.cache.survey(name, limit=1).leases.tolist()
            for group in range(3)
            for name in block_hashes(chain, HYBRID, group)
        ]
        assert sum(leases == [1] for leases in held) >= 8
        assert not server.cache.lookup(engine.name_space, 2, block_hashes(chain, HYBRID, 2)[0]).any()


def test_a_turn_replaces_the_one_before() -> None:
    chain = make_chain(1, 8)
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        store(engine, chain)
        hint(engine, RETAIN, chain[: 4 * 32], session="s")
        assert hint(engine, RETAIN, chain, session="s", priority=3).ttl_ms == DEFAULT_TTL_MS
        [row] = list_retained(operator)
        assert (row.session, row.tokens, row.size_bytes, row.priority) == ("s", 128, 8 * 4 * KIB, 3)
        assert (row.engine, row.owner, row.was_used) == ("first", f"user {UID}", False)
        assert engine.ask(Stats()).leases == 1
        # A shorter one keeps only what it covers.
        hint(engine, RETAIN, chain, limit=40, session="s")
        assert [row.tokens for row in list_retained(operator)] == [32]
        fill(engine)
        assert has(engine, chain[: 2 * 32])
        assert not has(engine, chain)
        # A prefix that is gone replaces nothing.
        assert hint(engine, RETAIN, make_chain(9, 2), session="s").outcome is HintOutcome.NOTHING
        assert hint(engine, RETAIN, session="s", ttl_ms=7000, priority=9).ttl_ms == 7000
        [row] = list_retained(operator)
        assert (row.tokens, row.ttl_ms, row.priority) == (32, 7000, 9)


def test_a_turn_that_is_replaced_is_not_unused_and_what_is_used_is_counted_once() -> None:
    chain = make_chain(1, 8)
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        store(engine, chain)
        for _ in range(3):
            hint(engine, RETAIN, chain, session="s")
        assert counts(operator)[1] == {"hit_retained": 0, "unused_retained": 0, "gave_way": 0}
        assert has(engine, chain)
        assert list_retained(operator)[0].was_used
        for _ in range(2):
            hint(engine, RETAIN, chain, session="s")
        hint(engine, RELEASE, session="s")
        assert counts(operator)[1] == {"hit_retained": 128, "unused_retained": 128, "gave_way": 0}


@pytest.mark.parametrize("action", [PRIORITISE, RELEASE])
def test_a_chain_of_any_length_is_compared_without_a_loop_over_its_names(action: HintAction) -> None:
    with Server(settings=SETTINGS) as server:
        engine = server.process("first").join(PLAIN)
        store(engine, make_chain(1, 4))
        assert hint(engine, RETAIN, make_chain(1, 4)).outcome is HintOutcome.DONE
        counts_of = {blocks: Instructions(server_package) for blocks in (4, 4096)}
        for blocks, spent in counts_of.items():
            with spent.counted():
                assert hint(engine, action, make_chain(2, blocks), priority=1).outcome is HintOutcome.NOTHING
        assert counts_of[4096].count < 2 * counts_of[4].count


def test_without_a_session_a_prefix_is_its_own_name() -> None:
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        first, second = make_chain(1, 4), make_chain(2, 4)
        store(engine, first)
        store(engine, second)
        for chain in (first, first[:64], second, first):
            assert hint(engine, RETAIN, chain).outcome is HintOutcome.DONE
        assert len(list_retained(operator)) == 3
        # Those that end within the chain.
        assert hint(engine, RELEASE, first[:96]) == hint_done(32)
        assert hint(engine, RELEASE, first[:96]).outcome is HintOutcome.NOTHING
        assert hint(engine, RELEASE, first + bytes(32)) == hint_done(64)
        assert [row.tokens for row in list_retained(operator)] == [64]


def test_names_alone_let_go_of_prefixes_of_sessions_too() -> None:
    """An engine that remembers only the last names of each prefix sends such a hint."""
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        first, second = make_chain(1, 4), make_chain(2, 4)
        for chain in (first, second):
            store(engine, chain)
        hint(engine, RETAIN, first, session="s")
        hint(engine, RETAIN, second)
        hint(engine, RETAIN, second, session="another turn, of this prefix and more")
        store(engine, longer := second + make_chain(3, 1))
        hint(engine, RETAIN, longer, session="another turn, of this prefix and more")
        assert hint(engine, RELEASE, first[-32:] + second[-64:]) == hint_done(64)
        assert [row.tokens for row in list_retained(operator)] == [80]


def hint_done(tokens: int) -> Hinted:
    return Hinted(outcome=HintOutcome.DONE, tokens=tokens)


def test_a_session_is_released_and_its_priority_changed() -> None:
    chain = make_chain(1, 4)
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        store(engine, chain)
        assert hint(engine, PRIORITISE, session="s", priority=1).outcome is HintOutcome.NOTHING
        hint(engine, RETAIN, chain, session="s", ttl_ms=9000)
        told = hint(engine, PRIORITISE, session="s", priority=4)
        assert (told.outcome, told.tokens, told.ttl_ms) == (HintOutcome.DONE, 64, 9000)
        assert [row.priority for row in list_retained(operator)] == [4]
        assert hint(engine, RELEASE, session="s") == hint_done(64)
        assert list_retained(operator) == []
        assert engine.ask(Stats()).leases == 0
        assert hint(engine, RELEASE, session="s").outcome is HintOutcome.NOTHING


def test_another_user_cannot_touch_a_session() -> None:
    chain = make_chain(1, 4)
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("first").join(PLAIN), watch(server)
        stranger = server.process("first", uid=UID + 1).join(PLAIN)
        store(engine, chain)
        hint(engine, RETAIN, chain, session="s", priority=1)
        for said in ({"session": "s"}, {"chain": chain}):
            assert hint(stranger, RELEASE, **said).outcome is HintOutcome.NOTHING
            assert hint(stranger, PRIORITISE, **said).outcome is HintOutcome.NOTHING
        assert hint(stranger, HintAction.HAND_OVER, session="s").outcome is HintOutcome.NOTHING
        hint(stranger, RETAIN, chain[:32], session="s")
        assert [(row.tokens, row.priority) for row in list_retained(operator)] == [(16, 0), (64, 1)]


def test_another_engine_of_the_user_takes_a_session_over() -> None:
    chain = make_chain(1, 4)
    with Server(settings=SETTINGS) as server:
        first, second, operator = server.process("a").join(PLAIN), server.process("b").join(PLAIN), watch(server)
        store(first, chain)
        hint(first, RETAIN, chain, session="s", priority=2, ttl_ms=8000)
        told = hint(second, HintAction.HAND_OVER, session="s")
        assert (told.outcome, told.tokens, told.ttl_ms) == (HintOutcome.DONE, 64, 8000)
        [row] = list_retained(operator)
        assert (row.engine, row.priority, row.tokens) == ("b", 2, 64)
        # With its prompt, what came since is retained too.
        store(first, make_chain(1, 6)[4 * 32 :])
        assert hint(second, HintAction.HAND_OVER, make_chain(1, 6), session="s").tokens == 96
        [row] = list_retained(operator)
        assert (row.engine, row.priority, row.tokens, row.ttl_ms) == ("b", 2, 96, 7998)
        assert hint(second, HintAction.HAND_OVER, session="t").outcome is HintOutcome.NOTHING


def test_engines_speak_of_their_own_blocks_and_operators_of_all() -> None:
    chain = make_chain(1, 4)
    with Server(settings=SETTINGS) as server:
        engine, other = server.process("a").join(PLAIN, name="one"), server.process("b").join(PLAIN, name="two")
        store(engine, chain)
        observer, operator = server.process("top", uid=77).watch(), watch(server)
        assert code_of(try_hint(other, RETAIN, chain, name_space=engine.name_space)) is ErrorCode.NOT_FOUND
        assert code_of(try_hint(observer, RETAIN, chain, name_space=engine.name_space)) is ErrorCode.NOT_ALLOWED
        assert code_of(try_hint(operator, RETAIN, chain, name_space=99)) is ErrorCode.NOT_FOUND
        assert code_of(observer.ask(ListRetained())) is ErrorCode.NOT_ALLOWED
        said = {"name_space": engine.name_space, "token": "secret"}
        assert hint(observer, RETAIN, chain, session="s", **said).outcome is HintOutcome.DONE
        hint(engine, RETAIN, chain, session="s")
        assert sorted((row.engine, row.owner) for row in list_retained(operator)) == [
            ("", "user 77"),
            ("a", f"user {UID}"),
        ]
        assert hint(engine, RELEASE, session="s").outcome is HintOutcome.DONE
        assert [row.owner for row in list_retained(operator)] == ["user 77"]
        hint(engine, RETAIN, chain, session="s")
        assert hint(operator, RELEASE, session="s", name_space=engine.name_space).outcome is HintOutcome.DONE
        assert list_retained(operator) == []


@pytest.mark.parametrize("action", list(HintAction))
def test_a_hint_of_nothing_is_refused_in_one_line(action: HintAction) -> None:
    with Server(settings=SETTINGS) as server:
        engine = server.process("a").join(PLAIN)
        answer = try_hint(engine, action)
        assert code_of(answer) is ErrorCode.MALFORMED
        assert "names a session" in answer.message  # type: ignore[attr-defined]


def test_what_is_to_go_is_not_retained() -> None:
    """Cleared memory, and a server that ends."""
    chain = make_chain(1, 4)
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("a").join(PLAIN), watch(server)
        store(engine, chain)
        hint(engine, RETAIN, chain)
        operator.ask(Clear())
        assert engine.ask(Stats()).quarantined == 0
        assert list_retained(operator) == []
        store(engine, chain)
        hint(engine, RETAIN, chain)
        assert operator.ask(Drain()).leases == 0
        assert code_of(try_hint(engine, RETAIN, chain)) is ErrorCode.DRAINING
        assert server.core.is_drained(server.now_ns)


def test_what_is_retained_while_memory_is_cleared_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(1, 4)
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("a").join(PLAIN), watch(server)
        store(engine, chain)
        clear = server.cache.clear

        def retain_first(name_space: int) -> int:
            assert hint(engine, RETAIN, chain, session="s").outcome is HintOutcome.DONE
            return clear(name_space)

        monkeypatch.setattr(server.cache, "clear", retain_first)
        operator.ask(Clear())
        assert list_retained(operator) == []
        assert engine.ask(Stats()).quarantined == 0


def test_of_several_sessions_of_a_name_an_operator_can_release_all_and_change_none() -> None:
    chain = make_chain(1, 4)
    with Server(settings=SETTINGS) as server:
        engine, operator = server.process("a").join(PLAIN), watch(server)
        other = server.process("b", uid=UID + 1).join(PLAIN)
        store(engine, chain)
        for one in (engine, other):
            hint(one, RETAIN, chain, session="s", priority=2)
        said = {"session": "s", "name_space": engine.name_space, "priority": 7}
        for action in (PRIORITISE, RETAIN, HintAction.HAND_OVER):
            assert hint(operator, action, **said).outcome is HintOutcome.NOTHING
        assert hint(operator, HintAction.HAND_OVER, chain, **said).outcome is HintOutcome.NOTHING
        assert [row.priority for row in list_retained(operator)] == [2, 2]
        assert hint(operator, RELEASE, **said) == hint_done(64)
        assert list_retained(operator) == []


def test_what_is_refused_is_not_handed_over() -> None:
    with Server(settings=SETTINGS) as server:
        first, second, operator = server.process("a").join(PLAIN), server.process("b").join(PLAIN), watch(server)
        chain = make_chain(1, 120)
        store(first, chain)
        hint(first, RETAIN, chain[: 4 * 32], session="s", priority=2, ttl_ms=8000)
        told = hint(second, HintAction.HAND_OVER, chain, session="s", priority=5, ttl_ms=9000)
        assert told.outcome is HintOutcome.OVER_LIMIT
        [row] = list_retained(operator)
        assert (row.engine, row.priority, row.tokens, row.ttl_ms) == ("a", 2, 64, 7999)


def test_before_there_is_memory_and_without_tiers() -> None:
    with Server(settings=SETTINGS, memory=None) as server:
        operator = watch(server)
        assert code_of(try_hint(operator, RETAIN, bytes(32), name_space=0)) is ErrorCode.NOT_FOUND
        assert list_retained(operator) == []
    with Server(settings=SETTINGS) as server:
        engine, chain = server.process("a").join(PLAIN), make_chain(1, 4)
        store(engine, chain[:64])
        told = hint(engine, HintAction.PREFETCH, chain)
        assert (told.outcome, told.tokens) == (HintOutcome.PARTLY, 32)
        assert hint(engine, HintAction.PREFETCH, chain[:64]) == hint_done(32)
        assert hint(engine, HintAction.PREFETCH, chain[64:]).outcome is HintOutcome.NOTHING


def test_an_identity_gives_its_place_to_others_with_what_is_retained_of_it() -> None:
    chain = make_chain(1, 4)
    with Server(settings=SETTINGS, limits=ServerLimits(namespaces=1)) as server:
        engine = server.process("a").join(PLAIN, name="one")
        store(engine, chain)
        hint(engine, RETAIN, chain, session="s")
        server.exit_process(engine)
        assert [row.session for row in list_retained(watch(server))] == ["s"]
        server.process("b").join(PLAIN, name="two")
        assert list_retained(watch(server)) == []


def test_where_no_identity_can_give_way_yet_nothing_is_let_go() -> None:
    chain = make_chain(1, 4)
    with Server(settings=SETTINGS, limits=ServerLimits(namespaces=1)) as server:
        engine = server.process("a").join(PLAIN, name="one")
        store(engine, chain)
        hint(engine, RETAIN, chain, session="s")
        server.exit_process(engine)
        other = greeted(server, "b")
        with held_writer(server.cache.core):
            assert not server.cache.leave_evict([])
            assert code_of(other.ask(register_of(PLAIN, "two"))) is ErrorCode.BUSY
            assert [row.session for row in list_retained(watch(server))] == ["s"]
        assert isinstance(other.ask(register_of(PLAIN, "two")), Registered)
        assert list_retained(watch(server)) == []
