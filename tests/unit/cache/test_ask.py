"""An ask for blocks means the same to a look-up and to the acquire that follows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffload.cache import Ask, LocalCache, LocalSession
from tests.kit.cache.cache_model import HYBRID, SMALL, fingerprint
from tests.kit.cache.offload_contract import CHAIN, TOKENS, save


@pytest.fixture
def session() -> Iterator[LocalSession]:
    with LocalCache.create(SMALL) as cache:
        yield LocalSession(cache, fingerprint("model"), HYBRID)


def test_without_bounds_it_is_for_all_that_there_is(session: LocalSession) -> None:
    save(session)
    found = session.acquire(Ask(CHAIN))
    assert found.boundary == TOKENS
    assert found.groups[0].digests.shape == (0, len(found.groups[0].addresses))


@pytest.mark.parametrize("local", [0, 32, 64, TOKENS])
@pytest.mark.parametrize("limit", [16, 100, 200, TOKENS])
@pytest.mark.parametrize("alignment", [1, 64, 96])
def test_a_look_up_finds_the_boundary_that_is_acquired(
    session: LocalSession, local: int, limit: int, alignment: int
) -> None:
    save(session)
    ask = Ask(CHAIN, local, limit, alignment)
    assert session.find_boundary(ask) == session.acquire(ask).boundary
