"""Servers find each other at a real board, and forget who has gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvoffload.peers.fleet_member import FleetMember
from kvoffload.peers.notice import Notice
from kvoffload.peers.notice_board import BoardTerms, NoticeBoard
from kvoffload.tcp_address import TcpAddress
from kvoffload.tiers.valkey import ValkeyTerms
from kvoffload.valkey_address import ValkeyAddress
from tests.unit.daemon.remote_client import make_keys
from tests.unit.daemon.test_server_tiers import await_that
from tests.unit.tiers.valkey_server import Server, ask, serve

SECRET = b"what only the fleet knows"
MEMBERS = [FleetMember(address=TcpAddress("127.0.0.1", 5000 + at), key=make_keys().public.decode()) for at in range(3)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_pinned_at_first(store: Server) -> None:
    ask(store, "flushall")


def terms_of(store: Server, **changed: Any) -> BoardTerms:
    valkey = ValkeyTerms(address=ValkeyAddress(host="127.0.0.1", port=store.port), call_timeout_s=5.0)
    given: dict[str, Any] = {"valkey": valkey, "fleet": "blue", "secret": SECRET, "every_s": 0.02, "good_for_s": 1.0}
    return BoardTerms(**given | changed)


class Seen:
    """What one server has been told."""

    def __init__(self) -> None:
        self.members: list[FleetMember] = []

    def __call__(self, members: Sequence[FleetMember]) -> None:
        self.members = list(members)


@contextmanager
def pinning(terms: BoardTerms, at: int) -> Iterator[Seen]:
    seen = Seen()
    board = NoticeBoard(terms, MEMBERS[at], seen)
    board.start()
    try:
        yield seen
    finally:
        board.close()


def others(*numbers: int) -> list[FleetMember]:
    return sorted((MEMBERS[at] for at in numbers), key=lambda member: member.name)


def sees(seen: Seen, *numbers: int) -> Callable[[], bool]:
    return lambda: seen.members == others(*numbers)


def test_who_comes_is_seen_by_all_and_who_goes_is_forgotten(store: Server) -> None:
    terms = terms_of(store)
    with pinning(terms, 0) as one, pinning(terms, 1) as two:
        with pinning(terms, 2) as three:
            for seen, whom in ((one, (1, 2)), (two, (0, 2)), (three, (0, 1))):
                await_that(sees(seen, *whom))
        await_that(sees(one, 1))
        await_that(sees(two, 0))


def test_who_was_killed_is_forgotten_after_a_while(store: Server) -> None:
    terms = terms_of(store)
    now_ms = int(ask(store, "time").split()[0]) * 1000
    notice = Notice(member=MEMBERS[1], at_ms=now_ms).sign("blue", SECRET)
    ask(store, "hset", "kvoffload:fleet:blue", MEMBERS[1].name, notice.decode())
    with pinning(terms_of(store, good_for_s=3600.0), 0) as patient:
        await_that(sees(patient, 1))
        with pinning(terms, 2) as strict:
            await_that(sees(strict, 0))
            await_that(sees(patient, 1, 2))


def test_old_notices_are_taken_down_and_strange_ones_are_not_read(store: Server) -> None:
    key = "kvoffload:fleet:blue"
    old = Notice(member=MEMBERS[1], at_ms=1000).sign("blue", SECRET).decode()
    forged = Notice(member=MEMBERS[2], at_ms=int(time.time() * 1000)).sign("blue", b"guessed").decode()
    renamed = Notice(member=MEMBERS[2], at_ms=int(time.time() * 1000)).sign("blue", SECRET).decode()
    ask(store, "hset", key, MEMBERS[1].name, old, MEMBERS[2].name, forged, "somebody else", renamed, "x", "y")
    with pinning(terms_of(store), 0) as seen:
        await_that(lambda: ask(store, "hexists", key, MEMBERS[1].name) == "0")
        assert seen.members == []
        assert ask(store, "hexists", key, MEMBERS[2].name) == "1"


def test_fleets_do_not_mix(store: Server) -> None:
    with (
        pinning(terms_of(store), 0) as blue,
        pinning(terms_of(store, fleet="red"), 1) as red,
        pinning(terms_of(store), 2),
    ):
        await_that(sees(blue, 2))
        assert red.members == []


def test_while_the_board_is_away_members_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serve(tmp_path / "own") as server:
        with (
            pinning(terms_of(server, good_for_s=600.0), 0) as one,
            pinning(terms_of(server, good_for_s=600.0), 1) as two,
        ):
            await_that(sees(one, 1))
            await_that(sees(two, 0))
            server.kill()
            await_that(lambda: len(lost(caplog)) == 2)
            assert sees(one, 1)()
            server.start()
            await_that(lambda: ask(server, "hlen", "kvoffload:fleet:blue") == "2")
            assert sees(one, 1)()
            assert sees(two, 0)()
        assert len(lost(caplog)) == 2


def lost(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "cannot be read" in record.message]


def test_a_secret_is_not_shown() -> None:
    valkey = ValkeyTerms(address=ValkeyAddress(host="127.0.0.1"))
    assert "only the fleet" not in repr(BoardTerms(valkey=valkey, fleet="blue", secret=SECRET))
