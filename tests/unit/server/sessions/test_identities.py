"""Identities that come and go: which ones are still known, and that places do not run out."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.cache import Ask, CacheGeometry
from kvoffload.client import Client as CacheClient
from kvoffload.protocol import (
    Acquire,
    Acquired,
    ErrorCode,
    IdentityField,
    Invalidate,
    NamespaceOpened,
    Register,
    Registered,
    Removed,
    Stored,
    Subscribe,
)
from kvoffload.server import ServerLimits
from kvoffload.server.sessions.registration import MAX_TOLD
from kvoffload.types import AcquireOutcome
from kvoffload.units import MIB
from tests.kit.cache.cache_model import PLAIN, SMALL, fingerprint, make_chain
from tests.kit.cache.offload_contract import CHAIN as SAVED
from tests.kit.cache.offload_contract import TOKENS, has_patterns, names_of, save
from tests.kit.server.chains import save_chain
from tests.kit.server.harness import UID, Client, Server, code_of, greeted, register_of
from tests.kit.server.held_writer import held_writer
from tests.kit.server.tiers import FAR, MEMORY, WAIT_S, await_that, disk_below, serving, traffic_of
from tests.kit.web.vllm_blocks import WIDE
from tests.unit.client.conftest import make_settings

FEW = ServerLimits(namespaces=16, user_namespaces=12)
CHAIN = make_chain(1, 4)


def plain(name: str) -> Register:
    return register_of(PLAIN, name)


def boundary(engine: Client, chain: bytes = CHAIN) -> int:
    found = engine.ask(Acquire(name_space=engine.name_space, chain=chain, shards=(0,)))
    assert isinstance(found, Acquired)
    return found.boundary if found.outcome is AcquireOutcome.HIT else 0


def come_and_go(server: Server, name: str) -> int:
    """An engine that saves something, which is evicted after it has gone; what its identity's number was."""
    engine = server.process(name).join(PLAIN, name)
    save_chain(server.cache, engine, CHAIN, PLAIN)
    server.exit_process(engine)
    assert server.cache.clear(engine.name_space) == 4
    return engine.name_space


def test_any_number_of_identities_is_served_one_after_another() -> None:
    with Server(limits=FEW) as server:
        idle = server.process("idle").join(PLAIN, "idle")
        saving = server.process("saving").join(PLAIN, "saving")
        save_chain(server.cache, saving, CHAIN, PLAIN)
        given = {come_and_go(server, f"model {at}") for at in range(5000)}
        assert len(given) == 5000
        # Engines that are there keep their identities and blocks.
        assert greeted(server, "idle again").ask(plain("idle")).name_space == idle.name_space
        save_chain(server.cache, idle, CHAIN, PLAIN)
        assert boundary(saving) == boundary(idle) == 64
        assert server.cache.stats.namespaces <= FEW.namespaces


def test_what_is_remembered_of_identities_goes_with_them() -> None:
    with Server(limits=FEW) as server:
        for at in range(100):
            come_and_go(server, f"model {at}")
        (domain,) = server.core.domains.values()
        for table in (domain.fingerprints, domain.geometries, domain.registers, domain.brought):
            assert len(table) <= FEW.namespaces


def test_an_identity_with_blocks_keeps_its_number_without_engines() -> None:
    with Server(limits=FEW) as server:
        engine = server.process("engine").join(PLAIN, "model")
        save_chain(server.cache, engine, CHAIN, PLAIN)
        server.exit_process(engine)
        for at in range(100):
            come_and_go(server, f"other {at}")
        again = server.process("again").join(PLAIN, "model")
        assert again.name_space == engine.name_space
        assert boundary(again) == 64


def test_a_session_in_quarantine_keeps_its_identity() -> None:
    with Server(limits=FEW) as server:
        engine = server.process("engine").join(PLAIN, "model")
        server.core.close_lifeline(engine.lifeline)
        for at in range(100):
            come_and_go(server, f"other {at}")
        engine.greet(former_session=engine.session, former_boot_id=server.settings.boot_id)
        engine.connect()
        assert engine.ask(plain("model")).name_space == engine.name_space


def test_whom_everybody_has_left_is_another_identity_the_next_time() -> None:
    """A call with the old number reads nothing of the former identity, nor of the one that has the place now."""
    with Server(limits=FEW) as server:
        former = server.process("former").join(PLAIN, "model")
        save_chain(server.cache, former, CHAIN, PLAIN)
        server.exit_process(former)
        server.cache.clear(former.name_space)
        for at in range(FEW.namespaces):
            come_and_go(server, f"other {at}")
        again = server.process("again").join(PLAIN, "model")
        assert again.name_space != former.name_space
        save_chain(server.cache, again, CHAIN, PLAIN)
        other = server.process("other").join(PLAIN, "yet another")
        for engine in (again, other):
            late_question = Acquire(name_space=former.name_space, chain=CHAIN, shards=(0,))
            assert code_of(engine.ask(late_question)) is ErrorCode.NOT_FOUND
            late = Invalidate(name_space=former.name_space, group=0, hashes=CHAIN)
            assert code_of(engine.tell(late)) is ErrorCode.NOT_FOUND
        assert not server.cache.lookup(former.name_space, 0, CHAIN).any()
        assert server.cache.invalidate(former.name_space, 0, CHAIN) == 0
        with pytest.raises(ValueError, match="no such group"):
            server.cache.reserve(server.cache.open_session(), former.name_space, 0, count=1)
        assert boundary(again) == 64
        assert boundary(other) == 0


def test_a_user_has_as_many_as_it_has_now() -> None:
    with Server(limits=ServerLimits(namespaces=16, user_namespaces=3)) as server:
        for at in range(20):
            come_and_go(server, f"model {at}")
        three = [server.process(name).join(PLAIN, name) for name in ("a", "b", "c")]
        answer = greeted(server, "d").ask(plain("d"))
        assert code_of(answer) is ErrorCode.BUSY
        assert isinstance(greeted(server, "e", uid=UID + 1).ask(plain("e")), Registered)
        server.exit_process(three[0])
        assert isinstance(greeted(server, "d").ask(plain("d")), Registered)
        # Blocks count for the user whose engine brought them, whether that engine lives or not; no other user gives way
        # for more.
        save_chain(server.cache, three[1], CHAIN, PLAIN)
        server.exit_process(three[1])
        others = server.process("g", uid=UID + 1).join(PLAIN, "g")
        save_chain(server.cache, others, CHAIN, PLAIN)
        server.exit_process(others)
        assert isinstance(greeted(server, "f").ask(plain("f")), Registered)
        assert not server.cache.lookup(three[1].name_space, 0, CHAIN).any()
        assert server.cache.lookup(others.name_space, 0, CHAIN).all()


def leave_behind(server: Server, name: str, *, uid: int = UID, geometry: CacheGeometry = PLAIN) -> int:
    """An engine that saves something and goes; its identity's number."""
    engine = server.process(name, uid=uid).join(geometry, name)
    save_chain(server.cache, engine, CHAIN[:32], geometry)
    server.exit_process(engine)
    return engine.name_space


def sized(record_bytes: int) -> CacheGeometry:
    """Returns a geometry of one group whose records have this size."""
    return replace(PLAIN, groups=(replace(PLAIN.groups[0], record_bytes=record_bytes),))


def test_with_4096_identities_that_have_blocks_the_next_ones_are_served() -> None:
    """The real limits hold here. The identities that no engine has registered for longest give way, with their
    blocks."""
    memory = replace(SMALL, memory_bytes=64 * MIB, entry_limit=16_384)
    with Server(memory=memory) as server:
        lives = server.process("lives", uid=UID + 9).join(PLAIN, "lives")
        save_chain(server.cache, lives, CHAIN[:32], PLAIN)
        numbers = [leave_behind(server, f"model {at}", uid=UID + at % 5) for at in range(4095)]
        assert server.cache.stats.namespaces == 4096
        assert len(server.cache.used_by_each()) == 4096
        again = server.process("again", uid=UID).join(PLAIN, "model 0")
        assert again.name_space == numbers[0]
        server.exit_process(again)
        newcomer = server.process("newcomer", uid=UID + 7).join(PLAIN, "new")
        save_chain(server.cache, newcomer, CHAIN[:32], PLAIN)
        is_there = [bool(server.cache.lookup(number, 0, CHAIN[:32]).any()) for number in numbers]
        # Sixteen at a time: the oldest, but for the one that was registered again.
        assert is_there == [True, *[False] * 16, *[True] * (4095 - 17)]
        assert boundary(lives, CHAIN[:32]) == boundary(newcomer, CHAIN[:32]) == 16
        for at in range(100):
            leave_behind(server, f"other {at}", uid=UID + 7)
        assert server.cache.stats.namespaces <= 4096
        assert boundary(lives, CHAIN[:32]) == 16


def test_who_is_registered_or_leased_does_not_give_way() -> None:
    with Server(limits=FEW) as server:
        living = [server.process(f"lives {at}").join(PLAIN, f"lives {at}") for at in range(10)]
        for one in living:
            save_chain(server.cache, one, CHAIN, PLAIN)
        reader = server.process("reads").join(PLAIN, "read")
        save_chain(server.cache, reader, CHAIN, PLAIN)
        held = server.cache.open_session()
        server.cache.add_process(held, pidfd=99)
        lease = server.cache.acquire(held, reader.name_space, Ask(CHAIN)).lease
        server.exit_process(reader)
        for at in range(50):
            leave_behind(server, f"model {at}")
        assert [boundary(one) for one in living] == [64] * 10
        assert reader.name_space in server.cache.used_by_each()
        server.cache.release(held, lease)


def test_a_full_table_of_living_engines_refuses_the_next() -> None:
    with Server(limits=ServerLimits(namespaces=4, user_namespaces=4)) as server:
        for at in range(4):
            save_chain(server.cache, server.process(f"{at}").join(PLAIN, f"{at}"), CHAIN, PLAIN)
        assert code_of(greeted(server, "another").ask(plain("another"))) is ErrorCode.BUSY


def test_record_sizes_are_bounded_by_user_and_in_all_and_make_place_likewise() -> None:
    limits = ServerLimits(record_sizes=12, user_record_sizes=8)
    with Server(limits=limits) as server:
        others = leave_behind(server, "others", uid=UID + 1, geometry=sized(512))
        own = [leave_behind(server, f"model {at}", geometry=sized(1024 + 512 * at)) for at in range(20)]
        there = server.cache.used_by_each()
        assert [number for number in own if number in there] == own[-8:]
        assert others in there
        for at in range(8):
            leave_behind(server, f"more {at}", uid=UID + 1, geometry=sized(32768 + 512 * at))
        assert len(server.core.domains["main"].sizes) <= 12
        living = [server.process(f"l{at}").join(sized(65536 + 512 * at), f"l{at}") for at in range(8)]
        answer = greeted(server, "another").ask(register_of(sized(131072), "another"))
        assert code_of(answer) is ErrorCode.BUSY
        # A size that is there already is no other one.
        assert isinstance(greeted(server, "same").ask(register_of(sized(65536), "same")), Registered)
        assert len(living) == 8


def test_who_writes_meanwhile_makes_the_next_one_ask_again() -> None:
    """The call does not wait: the identities that give way have gone when the engine asks again."""
    with Server(limits=ServerLimits(namespaces=4, user_namespaces=4)) as server:
        for at in range(4):
            leave_behind(server, f"model {at}")
        engine = greeted(server, "another")
        with held_writer(server.cache.core):
            assert code_of(engine.ask(plain("another"))) is ErrorCode.BUSY
        assert isinstance(engine.ask(plain("another")), Registered)


def test_those_of_adopted_memory_make_place_even_if_all_have_blocks() -> None:
    """Identities that no engine has named to this server count as unused for longest."""
    with Server(memory=replace(SMALL, memory_bytes=64 * MIB, entry_limit=16_384)) as server:
        session = server.cache.open_session()
        for at in range(4096):
            server.cache.open_namespace(fingerprint(f"model {at}"), PLAIN)
            slots = server.cache.reserve(session, at, 0, count=1)
            server.cache.commit(session, at, 0, slots.tickets, hashes=CHAIN[:32])
        known = server.process("known").join(PLAIN, "model 7")
        assert isinstance(greeted(server, "engine").ask(plain("another")), Registered)
        assert boundary(known) == 16
        assert server.cache.stats.namespaces < 4096


def test_those_of_adopted_memory_make_place_unless_they_have_blocks(server: Server) -> None:
    """They have numbers, though no engine has named them to this server yet."""
    for at in range(4096):
        server.cache.open_namespace(fingerprint(f"model {at}"), PLAIN)
    former = server.cache.open_session()
    slots = server.cache.reserve(former, 7, 0, count=1)
    server.cache.commit(former, 7, 0, slots.tickets, hashes=CHAIN[:32])
    assert isinstance(greeted(server, "engine").ask(register_of(name="another")), Registered)
    assert server.cache.stats.namespaces == 2
    known = server.process("known").join(PLAIN, "model 7")
    assert known.name_space == 7
    assert boundary(known) == 16


def cut(names: bytes) -> list[bytes]:
    return [names[at : at + 32] for at in range(0, len(names), 32)]


def test_subscribers_hear_that_it_is_another() -> None:
    with Server(limits=FEW) as server:
        watching = server.process("watching").watch()
        watching.ask(Subscribe())
        for at in range(3 * FEW.namespaces):
            come_and_go(server, f"model {at}")
        server.core.tick()
        stored: dict[int, set[bytes]] = {}
        removed: dict[int, set[bytes]] = {}
        names: dict[int, bytes] = {}
        for event, _ in server.core.feed.take(watching.key, 1 << 20):
            match event:
                case NamespaceOpened():
                    assert event.name_space not in names
                    names[event.name_space] = event.fingerprint
                case Stored():
                    stored[event.name_space] = set(cut(event.hashes))
                case Removed():
                    removed[event.name_space] = set(cut(event.hashes))
        assert stored == removed == {number: set(cut(CHAIN)) for number in names}
        assert sorted(names.values()) == sorted(fingerprint(f"model {at}") for at in range(3 * FEW.namespaces))
        assert not server.core.feed.is_behind


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_real_server_serves_more_than_it_has_places_for(tmp_path: Path, has_disk: bool) -> None:
    """Engines one after another, whose blocks have to go sooner or later, and one that keeps its identity and its
    leases all the time. Blocks in a slower tier are found again under any number."""
    (tmp_path / "disk").mkdir(mode=0o700)
    tiers = {"": [disk_below(tmp_path / "disk")]} if has_disk else {}
    limits = ServerLimits(namespaces=96, user_namespaces=96)
    with (
        serving(tmp_path / "s", replace(MEMORY, policy="lru"), limits=limits, tiers=tiers) as server,
        CacheClient(make_settings(tmp_path / "s", name="kept")) as kept,
    ):
        assert kept.wait_until_served(WAIT_S)
        save(kept)
        found = kept.acquire(Ask(SAVED))
        assert found.lease is not None
        for at in range(250):
            with CacheClient(make_settings(tmp_path / "s", name=f"model {at}")) as client:
                assert client.wait_until_served(WAIT_S), at
                assert client.acquire(Ask(SAVED)).boundary == 0
                save(client)
                assert client.acquire(Ask(SAVED)).boundary == TOKENS
        for group, leased in enumerate(found.groups):
            names = names_of(group, SAVED)[32 * leased.first :]
            assert has_patterns(kept, found.lease.memory_id, group, leased.addresses, names)
        kept.release(found.lease)
        assert kept.acquire(Ask(SAVED)).boundary == TOKENS
        assert kept.stats().namespaces <= 96
        if has_disk:
            await_that(lambda: traffic_of(server, 0).is_idle)
            with CacheClient(make_settings(tmp_path / "s", name="model 249")) as client:
                assert client.wait_until_served(WAIT_S)
                assert client.acquire(Ask(SAVED), far=FAR).boundary == TOKENS


def made_of(**parts: str) -> tuple[IdentityField, ...]:
    named = {"model": "Qwen3", "revision": "abc", **parts}
    return tuple(IdentityField(name=name, value=value) for name, value in named.items())


def differing_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_an_engine_with_another_block_size_is_told_of_once_with_both_values(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    before = server.process("before").join(WIDE, "before", identity=made_of())
    for at in range(3):
        server.process(f"engine {at}").join(PLAIN, "engine", identity=made_of())
    assert before.name_space == 0
    [line] = differing_lines(caplog)
    assert (
        f"hash_block_tokens {PLAIN.hash_block_size} here, {WIDE.hash_block_size} in the engine that joined before"
        in line
    )


def test_values_of_another_users_engine_are_not_told(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.process("before", uid=UID + 1).join(PLAIN, "before", identity=made_of(kv_dtype="fp8_e4m3"))
    server.process("engine").join(PLAIN, "engine", identity=made_of(kv_dtype="bfloat16"))
    [line] = differing_lines(caplog)
    assert "kv_dtype is another one" in line
    assert "fp8" not in line


def test_engines_that_differ_by_a_setting_fill_no_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    for at in range(2 * MAX_TOLD):
        server.process(f"engine {at}").join(PLAIN, f"engine {at}", identity=made_of(kv_dtype=f"dtype {at}"))
    assert len(differing_lines(caplog)) == MAX_TOLD
