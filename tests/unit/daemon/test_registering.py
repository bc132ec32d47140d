"""What is compared when an engine says what its blocks are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.daemon import ServerLimits
from kvoffload.protocol import Error, ErrorCode, Register, Registered
from tests.unit.cache.cache_model import HYBRID, KIB, MIB, PLAIN, fingerprint
from tests.unit.daemon.harness import Client, Server, register_of


def greeted(server: Server, name: str) -> Client:
    process = server.process(name)
    process.greet()
    process.connect()
    return process


def larger(message: Register) -> Register:
    groups = (replace(message.groups[0], record_bytes=1004), *message.groups[1:])
    return replace(message, groups=groups)


@pytest.mark.parametrize("name", ["engine", "another"])
def test_who_says_the_same_gets_the_same_namespace(server: Server, name: str) -> None:
    first, second = greeted(server, "engine").ask(register_of()), greeted(server, name).ask(register_of(rank=1))
    assert first.name_space == second.name_space


@pytest.mark.parametrize("name", ["engine", "another"])
def test_another_geometry_of_one_identity_is_refused_by_its_field(server: Server, name: str) -> None:
    """Of another process of the session, or of anybody with the same fingerprint."""
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
    engine.greet(former_session=engine.session, former_boot_id=server.terms.boot_id)
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
    """Nobody has registered with this server; the memory says what the identity is."""
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
