"""Old memory that a new server takes over, and whose offer it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvoffload.protocol import Adopt, AdoptVerdict, Error, ErrorCode
from kvoffload.server import DomainSettings
from tests.kit.cache.cache_model import SMALL
from tests.kit.server.harness import UID, CacheWithoutProcesses, Client, Server

OLD_BOOT = 77


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(memory=None) as made:
        yield made


def offer(boot_id: int = OLD_BOOT, index_bytes: int = 4096, sizes: tuple[int, ...] = (1 << 20, 1 << 20)) -> Adopt:
    return Adopt(former_boot_id=boot_id, index_bytes=index_bytes, segment_sizes=np.array(sizes, np.uint64).tobytes())


def holder(server: Server, name: str, **options: Any) -> Client:
    process = server.process(name, **options)
    process.greet()
    process.connect()
    return process


def verdict(client: Client, message: Adopt) -> AdoptVerdict:
    answer = client.ask(message)
    assert not isinstance(answer, Error), answer
    found: AdoptVerdict = answer.verdict
    return found


def test_the_first_offer_is_wanted_and_no_other(server: Server) -> None:
    first, second = holder(server, "a"), holder(server, "b")
    assert verdict(first, offer()) is AdoptVerdict.WANTED
    assert verdict(second, offer()) is AdoptVerdict.HAS_MEMORY
    assert server.core.is_offer_wanted(first.lifeline, OLD_BOOT)
    assert not server.core.is_offer_wanted(first.lifeline, OLD_BOOT + 1)
    assert not server.core.is_offer_wanted(second.lifeline, OLD_BOOT)
    assert not server.core.is_offer_wanted(12345, OLD_BOOT)


def test_the_next_one_is_asked_when_the_first_is_gone(server: Server) -> None:
    first, second = holder(server, "a"), holder(server, "b")
    verdict(first, offer())
    server.core.close_lifeline(first.lifeline)
    assert verdict(second, offer()) is AdoptVerdict.WANTED


@pytest.mark.parametrize("why", [AdoptVerdict.OWNER_LIVES, AdoptVerdict.NOT_USABLE])
def test_what_was_no_use_is_not_asked_for_again(server: Server, why: AdoptVerdict) -> None:
    first, second, others = holder(server, "a"), holder(server, "b"), holder(server, "c", uid=UID + 1)
    verdict(first, offer())
    assert server.core.count_offered(first.lifeline) == 2
    refuse(server, second, why)  # it was not asked
    assert server.core.is_offer_wanted(first.lifeline, OLD_BOOT)
    refuse(server, first, why)
    assert verdict(second, offer()) is why
    assert server.core.count_offered(first.lifeline) == 0
    assert verdict(second, offer(boot_id=78)) is AdoptVerdict.WANTED
    # One user's bad offer does not spoil another user's.
    assert verdict(others, offer()) is AdoptVerdict.WANTED
    server.attach("main", CacheWithoutProcesses.create(SMALL))
    assert not server.core.is_offer_wanted(second.lifeline, 78)
    assert not server.core.is_offer_wanted(others.lifeline, OLD_BOOT)


def refuse(server: Server, client: Client, why: AdoptVerdict) -> None:
    session = server.core.sessions.find_lifeline(client.lifeline)
    assert session is not None
    server.core.refuse_offer(session, why)


def test_a_server_with_memory_wants_none(server: Server) -> None:
    process = holder(server, "a")
    server.attach("main", CacheWithoutProcesses.create(SMALL))
    assert verdict(process, offer()) is AdoptVerdict.HAS_MEMORY


@pytest.mark.parametrize(
    "message", [offer(boot_id=0), offer(index_bytes=0), offer(sizes=()), offer(sizes=(0, 0)), offer(sizes=(1, 2))]
)
def test_what_cannot_be_memory_is_not_usable(server: Server, message: Adopt) -> None:
    assert verdict(holder(server, "a"), message) is AdoptVerdict.NOT_USABLE


def test_memory_of_another_size_is_not_usable() -> None:
    with Server(memory=None, domains=[DomainSettings(name="main", memory_bytes=2 << 20)]) as server:
        process = holder(server, "a")
        assert verdict(process, offer(sizes=(1 << 20,))) is AdoptVerdict.NOT_USABLE
        assert verdict(process, offer()) is AdoptVerdict.WANTED


def test_an_observer_offers_nothing(server: Server) -> None:
    answer = server.process("top").watch().ask(offer())
    assert isinstance(answer, Error)
    assert answer.code is ErrorCode.NOT_ALLOWED


def test_a_draining_server_wants_none(server: Server) -> None:
    process = holder(server, "a")
    server.core.start_drain(0)
    answer = process.ask(offer())
    assert isinstance(answer, Error)
    assert answer.code is ErrorCode.DRAINING
