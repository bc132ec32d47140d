"""Comparisons that the server makes when an engine registers its blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.protocol import Error, ErrorCode, Register, Registered
from kvoffload.server import DomainSettings, ServerLimits, TenantSettings
from kvoffload.server.sessions.event_feed import Space
from kvoffload.server.sessions.outbox import OpenExpress
from tests.kit.cache.cache_model import HYBRID, KIB, MIB, PLAIN, fingerprint
from tests.kit.server.harness import UID, Server, greeted, register_of


def larger(message: Register) -> Register:
    groups = (replace(message.groups[0], record_bytes=1004), *message.groups[1:])
    return replace(message, groups=groups)


@pytest.mark.parametrize("name", ["engine", "another"])
def test_who_says_the_same_gets_the_same_namespace(server: Server, name: str) -> None:
    first, second = greeted(server, "engine").ask(register_of()), greeted(server, name).ask(register_of(rank=1))
    assert first.name_space == second.name_space


@pytest.mark.parametrize("name", ["engine", "another"])
def test_another_geometry_of_one_identity_is_refused_by_its_field(server: Server, name: str) -> None:
    """The other geometry comes from another process of the session, or from another engine with the same
    fingerprint."""
    greeted(server, "engine").ask(register_of())
    process = greeted(server, name)
    answer = process.ask(larger(register_of()))
    assert isinstance(answer, Error)
    assert (answer.code, answer.field) == (ErrorCode.MISMATCH, "groups[0].record_bytes")
    assert (answer.server_value, answer.client_value) == ("1000", "1004")
    assert isinstance(process.ask(register_of()), Registered)


def test_all_processes_of_a_session_have_one_identity(server: Server) -> None:
    first, second = greeted(server, "engine"), greeted(server, "engine")
    first.ask(register_of())
    answer = second.ask(register_of(name="another"))
    assert isinstance(answer, Error)
    assert (answer.code, answer.field) == (ErrorCode.MISMATCH, "fingerprint")


def test_a_session_keeps_its_identity_when_it_comes_back(server: Server) -> None:
    engine = server.process().join()
    server.core.close_lifeline(engine.lifeline)
    engine.greet(former_session=engine.session, former_boot_id=server.settings.boot_id)
    engine.connect()
    answer = engine.ask(register_of(name="another"))
    assert isinstance(answer, Error)
    assert answer.field == "fingerprint"


def test_a_geometry_that_fits_no_segment_is_refused(server: Server) -> None:
    message = register_of(PLAIN)
    message = replace(message, groups=(replace(message.groups[0], record_bytes=MIB),))
    answer = greeted(server, "engine").ask(message)
    assert isinstance(answer, Error)
    assert answer.code is ErrorCode.MISMATCH
    assert f"do not fit a segment of {512 * KIB}" in answer.message


def test_adopted_memory_knows_its_geometry(server: Server) -> None:
    """No engine has registered with this server; the memory has the identity."""
    server.cache.open_namespace(fingerprint("model"), PLAIN)
    answer = greeted(server, "engine").ask(register_of(HYBRID))
    assert isinstance(answer, Error)
    assert answer.code is ErrorCode.MISMATCH
    assert "another geometry" in answer.message


def test_identities_are_bounded() -> None:
    with Server(limits=ServerLimits(namespaces=1)) as server:
        server.process("a").join()
        answer = greeted(server, "b").ask(register_of(name="another"))
        assert isinstance(answer, Error)
        assert answer.code is ErrorCode.BUSY
        server.process("c").join()


def test_one_user_does_not_take_the_identities_of_others() -> None:
    with Server(limits=ServerLimits(namespaces=4, user_namespaces=2)) as server:
        for name in ("a", "b"):
            assert isinstance(greeted(server, name).ask(register_of(name=name)), Registered)
        answer = greeted(server, "c").ask(register_of(name="c"))
        assert isinstance(answer, Error)
        assert answer.code is ErrorCode.BUSY
        assert "engines of user" in answer.message
        # Known ones are served, and so are those of others.
        assert isinstance(greeted(server, "d").ask(register_of(name="b")), Registered)
        for name in ("e", "f"):
            other = server.process(name, uid=UID + 1)
            other.greet()
            other.connect()
            assert isinstance(other.ask(register_of(name=name)), Registered)


def test_an_express_channel_is_opened_once_all_of_a_session_is_known(server: Server) -> None:
    process = greeted(server, "engine", wants_express=True)
    assert server.opened == []
    assert isinstance(process.ask(larger(register_of())), Registered)
    (session,) = server.core.sessions
    assert session.cache_session is not None
    space = Space(domain="main", name_space=0, fingerprint=fingerprint("model"))
    assert server.opened == [
        OpenExpress(process.lifeline, process.session, session.cache_session, 0, (), space, session.owner)
    ]
    # One is enough.
    process.ask(larger(register_of()))
    process.connect()
    process.ask(larger(register_of()))
    assert len(server.opened) == 1


def test_an_express_channel_is_a_wish(server: Server) -> None:
    greeted(server, "engine", wants_express=False).ask(register_of())
    server.process("watcher", wants_express=True).watch()
    assert server.opened == []


def test_a_refused_register_opens_none(server: Server) -> None:
    greeted(server, "engine", wants_express=False).ask(register_of())
    process = greeted(server, "another", wants_express=True)
    assert isinstance(process.ask(larger(register_of())), Error)
    assert server.opened == []
    assert isinstance(process.ask(register_of()), Registered)
    assert [wanted.lifeline for wanted in server.opened] == [process.lifeline]


def test_each_process_of_a_session_that_wants_one_gets_its_own(server: Server) -> None:
    first, second, without = (greeted(server, "engine", wants_express=wants) for wants in (True, True, False))
    assert server.opened == []
    without.ask(register_of())
    assert [wanted.lifeline for wanted in server.opened] == [first.lifeline, second.lifeline]
    # The session is known by now, so a later one need not wait for its own register.
    third = server.process("engine", wants_express=True)
    third.greet()
    assert [wanted.lifeline for wanted in server.opened[2:]] == [third.lifeline]
    assert {wanted.session for wanted in server.opened} == {third.session}
    third.connect()
    third.ask(register_of())
    assert len(server.opened) == 3


def test_whoever_comes_back_gets_another(server: Server) -> None:
    engine = server.process(wants_express=True).join()
    server.core.close_lifeline(engine.lifeline)
    engine.greet(former_session=engine.session, former_boot_id=server.settings.boot_id)
    assert [wanted.lifeline for wanted in server.opened][1:] == [engine.lifeline]


def test_it_speaks_for_its_tenant() -> None:
    tenants = (TenantSettings(name="one"), TenantSettings(name="two"))
    with Server(domains=(DomainSettings(name="main", tenants=tenants),)) as server:
        process = greeted(server, "engine", wants_express=True)
        assert isinstance(process.ask(register_of(tenant="two")), Registered)
        (session,) = server.core.sessions
        assert session.registration is not None
        assert [wanted.tenant for wanted in server.opened] == [session.registration.tenant] != [0]
