"""Users of a domain, and the tenant that pays."""

from __future__ import annotations

import pytest

from kvoffload.cache import CacheGeometry
from kvoffload.protocol import Error, ErrorCode, Welcome
from kvoffload.server import DomainSettings, TenantSettings
from tests.kit.cache.cache_model import HYBRID, PLAIN
from tests.kit.server.harness import Server, register_of

DOMAINS = (
    DomainSettings(name="red", uids=frozenset({1, 3})),
    DomainSettings(name="blue", uids=frozenset({2, 3})),
)


@pytest.mark.parametrize(
    ("uid", "asked", "found"),
    [
        (1, "", "red"),
        (2, "", "blue"),
        (3, "", "red"),
        (3, "blue", "blue"),
        (1, "blue", ErrorCode.NOT_ALLOWED),
        (4, "", ErrorCode.NOT_ALLOWED),
        (4, "red", ErrorCode.NOT_ALLOWED),
        (1, "green", ErrorCode.MISMATCH),
    ],
)
def test_a_user_gets_its_own_domain_or_none(uid: int, asked: str, found: str | ErrorCode) -> None:
    with Server(domains=DOMAINS) as server:
        process = server.process(uid=uid, domain=asked)
        answer = process.greet()
        if isinstance(found, str):
            assert isinstance(answer, Welcome)
            assert answer.domain == found
            assert [sent.domain for sent in server.memory_sent] == [found]
        else:
            assert isinstance(answer, Error)
            assert answer.code is found
            assert process.pidfd.is_closed
            assert server.memory_sent == []


TENANTS = (
    TenantSettings(name="ours", uids=frozenset({1})),
    TenantSettings(name="theirs", quota_bytes=4096, uids=frozenset({2})),
    TenantSettings(name="anybodys"),
)


@pytest.mark.parametrize(
    ("uid", "asked", "paying"),
    [
        (1, "", "ours"),
        (2, "theirs", "theirs"),
        (2, "anybodys", "anybodys"),
        (9, "", "anybodys"),
        (1, "theirs", None),
        (1, "unknown", None),
    ],
)
def test_a_user_names_a_tenant_of_its_own(uid: int, asked: str, paying: str | None) -> None:
    with Server(domains=[DomainSettings(name="main", tenants=TENANTS)]) as server:
        process = server.process(uid=uid)
        process.greet()
        process.connect()
        answer = process.ask(register_of(PLAIN, tenant=asked))
        if paying is None:
            assert isinstance(answer, Error)
            assert answer.code is ErrorCode.NOT_ALLOWED
            return
        (session,) = server.core.sessions
        assert session.registration is not None
        assert session.registration.tenant == 1 + [tenant.name for tenant in TENANTS].index(paying)


def test_without_tenants_nobody_pays() -> None:
    with Server() as server:
        server.process().join()
        (session,) = server.core.sessions
        assert session.registration is not None
        assert session.registration.tenant == 0


@pytest.mark.parametrize("geometry", [HYBRID, PLAIN])
def test_a_geometry_comes_as_it_was_sent(geometry: CacheGeometry) -> None:
    assert CacheGeometry.read(register_of(geometry)) == geometry
