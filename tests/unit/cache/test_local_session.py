"""A cache in the engine's own process keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvoffload.cache import Ask, LocalCache, LocalSession
from tests.kit.cache.cache_model import HYBRID, SMALL, fingerprint
from tests.kit.cache.offload_contract import CHAIN, OffloadCacheContract, save


@pytest.fixture
def session() -> Iterator[LocalSession]:
    with LocalCache.create(SMALL) as cache:
        yield LocalSession(cache, fingerprint("model"), HYBRID, tenant="own", others=("other",))


class TestLocalSession(OffloadCacheContract):
    @pytest.fixture
    def cache(self, session: LocalSession) -> Any:
        return session


def test_the_end_releases_what_is_leased(session: LocalSession) -> None:
    save(session)
    assert session.acquire(Ask(CHAIN)).is_hit
    session.close()
    assert session.stats().leases == 0
