"""The records of the session table."""

from __future__ import annotations

from kvoffload.protocol import HandshakeSettings
from kvoffload.server.sessions.domain import Domain, DomainSettings
from kvoffload.server.sessions.session import EngineSession


def session(domain: str, uid: int, engine: str) -> EngineSession:
    made = Domain(DomainSettings(name=domain), HandshakeSettings(capabilities=frozenset(), domain=""))
    return EngineSession(number=1, domain=made, engine=engine, uid=uid)


def test_an_engine_is_named_within_its_user_and_domain() -> None:
    keys = {session(domain, uid, engine).key for domain in "ab" for uid in (1, 2) for engine in "xy"}
    assert len(keys) == 8


def test_sessions_are_the_same_by_identity_only() -> None:
    assert session("a", 1, "x") != session("a", 1, "x")
