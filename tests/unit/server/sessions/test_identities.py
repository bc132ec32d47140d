"""Identities that come and go: who is known still, and that nobody runs out of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.client import AsyncClient
from kvoffload.protocol import (
    Acquire,
    Acquired,
    ErrorCode,
    Invalidate,
    NamespaceOpened,
    Outcome,
    Register,
    Registered,
    Removed,
    Stored,
    Subscribe,
)
from kvoffload.server import ServerLimits
from tests.kit.cache.cache_model import PLAIN, fingerprint, make_chain
from tests.kit.cache.offload_contract import CHAIN as SAVED
from tests.kit.cache.offload_contract import TOKENS, has_patterns, names_of, save
from tests.kit.server.chains import save_chain
from tests.kit.server.harness import UID, Client, Server, code_of, greeted, register_of
from tests.kit.server.tiers import FAR, MEMORY, WAIT_S, await_that, disk_below, serving
from tests.unit.client.conftest import make_terms

FEW = ServerLimits(namespaces=16, user_namespaces=12)
CHAIN = make_chain(1, 4)


def plain(name: str) -> Register:
    return register_of(PLAIN, name)


def boundary(engine: Client, chain: bytes = CHAIN) -> int:
    found = engine.ask(Acquire(name_space=engine.name_space, chain=chain, shards=(0,)))
    assert isinstance(found, Acquired)
    return found.boundary if found.outcome is Outcome.HIT else 0


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
        # Whoever is there has its identity, and its blocks.
        assert greeted(server, "idle again").ask(plain("idle")).name_space == idle.name_space
        save_chain(server.cache, idle, CHAIN, PLAIN)
        assert boundary(saving) == boundary(idle) == 64
        assert server.cache.stats.namespaces <= FEW.namespaces


def test_what_is_remembered_of_identities_goes_with_them() -> None:
    with Server(limits=FEW) as server:
        for at in range(100):
            come_and_go(server, f"model {at}")
        (domain,) = server.core._domains.values()
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
        engine.greet(former_session=engine.session, former_boot_id=server.terms.boot_id)
        engine.connect()
        assert engine.ask(plain("model")).name_space == engine.name_space


def test_whom_everybody_has_left_is_another_identity_the_next_time() -> None:
    """And whoever still says the old number reads nothing of it, nor of the one that has the place."""
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
        # Blocks count for whoever brought them, whether its engine lives or not.
        save_chain(server.cache, three[1], CHAIN, PLAIN)
        server.exit_process(three[1])
        assert code_of(greeted(server, "f").ask(plain("f"))) is ErrorCode.BUSY
        server.cache.clear(three[1].name_space)
        assert isinstance(greeted(server, "f").ask(plain("f")), Registered)


def test_those_of_adopted_memory_make_place_unless_they_have_blocks(server: Server) -> None:
    """They have numbers, though nobody has named them to this server yet."""
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


def test_subscribers_hear_that_it_is_another() -> None:
    with Server(limits=FEW) as server:
        watching = server.process("watching").watch()
        watching.ask(Subscribe())
        for at in range(3 * FEW.namespaces):
            come_and_go(server, f"model {at}")
        server.core.tick()
        stored: dict[int, bytes] = {}
        removed: dict[int, bytes] = {}
        names: dict[int, bytes] = {}
        for event, _ in server.core.feed.take(watching.key, 1 << 20):
            match event:
                case NamespaceOpened():
                    assert event.name_space not in names
                    names[event.name_space] = event.fingerprint
                case Stored():
                    stored[event.name_space] = event.hashes
                case Removed():
                    removed[event.name_space] = event.hashes
        assert stored == removed == dict.fromkeys(names, CHAIN)
        assert sorted(names.values()) == sorted(fingerprint(f"model {at}") for at in range(3 * FEW.namespaces))
        (watch,) = server.core.feed._watches.values()
        assert not watch.hashes
        assert not watch.fingerprints


@pytest.mark.parametrize("has_disk", [False, True])
async def test_a_real_server_serves_more_than_it_has_places_for(tmp_path: Path, has_disk: bool) -> None:
    """Engines one after another, whose blocks have to go sooner or later, beside one that keeps its identity and what
    it has leased. What is below memory is found again under whatever number."""
    (tmp_path / "disk").mkdir(mode=0o700)
    tiers = {"": [disk_below(tmp_path / "disk")]} if has_disk else {}
    limits = ServerLimits(namespaces=96, user_namespaces=96)
    with serving(tmp_path / "s", replace(MEMORY, policy="lru"), limits=limits, tiers=tiers) as server:
        async with AsyncClient(make_terms(tmp_path / "s", name="kept")) as kept:
            assert await kept.wait_until_served(WAIT_S)
            await save(kept)
            found = await kept.acquire(SAVED)
            assert found.lease is not None
            for at in range(250):
                async with AsyncClient(make_terms(tmp_path / "s", name=f"model {at}")) as client:
                    assert await client.wait_until_served(WAIT_S), at
                    assert (await client.acquire(SAVED)).boundary == 0
                    await save(client)
                    assert (await client.acquire(SAVED)).boundary == TOKENS
            for group, leased in enumerate(found.groups):
                names = names_of(group, SAVED)[32 * leased.first :]
                assert has_patterns(kept, found.lease.memory_id, group, leased.addresses, names)
            kept.release(found.lease)
            assert (await kept.acquire(SAVED)).boundary == TOKENS
            assert (await kept.stats()).namespaces <= 96
            if has_disk:
                await_that(lambda: server._core.tiers._traffic[""].tiers[0].is_idle)
                async with AsyncClient(make_terms(tmp_path / "s", name="model 249")) as client:
                    assert await client.wait_until_served(WAIT_S)
                    assert (await client.acquire(SAVED, far=FAR)).boundary == TOKENS
