"""Servers find each other at a real board, and forget who has gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvoffload.peers import notice_board
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


KEY = BoardTerms(valkey=ValkeyTerms(address=ValkeyAddress(host="")), fleet="blue", secret=SECRET).key.decode()


def now_ms(store: Server) -> int:
    """By the board's clock."""
    return int(ask(store, "time").split()[0]) * 1000


class Seen:
    """What one server has been told."""

    def __init__(self) -> None:
        self.members: list[FleetMember] = []
        self.looks = 0

    def __call__(self, members: Sequence[FleetMember]) -> None:
        self.members = list(members)
        self.looks += 1

    def await_look(self) -> None:
        """One that has begun after now."""
        after = self.looks + 2
        await_that(lambda: self.looks >= after)


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
    notice = Notice(member=MEMBERS[1], at_ms=now_ms(store)).sign("blue", SECRET)
    ask(store, "hset", KEY, MEMBERS[1].name, notice.decode())
    with pinning(terms_of(store, good_for_s=3600.0), 0) as patient:
        await_that(sees(patient, 1))
        with pinning(terms, 2) as strict:
            await_that(sees(strict, 0))
            await_that(sees(patient, 1, 2))


def test_old_and_strange_notices_are_taken_down_and_nobody_is_there_for_them(store: Server) -> None:
    old = Notice(member=MEMBERS[1], at_ms=1000).sign("blue", SECRET).decode()
    forged = Notice(member=MEMBERS[2], at_ms=int(time.time() * 1000)).sign("blue", b"guessed").decode()
    renamed = Notice(member=MEMBERS[2], at_ms=int(time.time() * 1000)).sign("blue", SECRET).decode()
    ask(store, "hset", KEY, MEMBERS[1].name, old, MEMBERS[2].name, forged, "somebody else", renamed, "x", "y")
    with pinning(terms_of(store), 0) as seen:
        await_that(lambda: ask(store, "hlen", KEY) == "1")
        seen.await_look()
        assert seen.members == []


def test_rubbish_keeps_nobody_from_being_seen(store: Server) -> None:
    rubbish = [word for at in range(3000) for word in (f"field {at}", "x" * 100)]
    ask(store, "hset", KEY, *rubbish)
    with pinning(terms_of(store, good_for_s=600.0), 0) as one, pinning(terms_of(store, good_for_s=600.0), 1) as two:
        await_that(sees(one, 1))
        await_that(sees(two, 0))
        await_that(lambda: ask(store, "hlen", KEY) == "2")


def test_a_notice_that_somebody_pins_again_is_nobody(store: Server) -> None:
    terms = terms_of(store, good_for_s=600.0)
    with pinning(terms, 0) as seen:
        with pinning(terms, 1):
            await_that(sees(seen, 1))
            copied = ask(store, "hget", KEY, MEMBERS[1].name)
        await_that(sees(seen))
        ask(store, "hset", KEY, MEMBERS[1].name, copied)
        seen.await_look()
        assert seen.members == []


def test_a_fleet_of_one_name_and_another_secret_is_another_one(store: Server) -> None:
    with pinning(terms_of(store), 0) as ours, pinning(terms_of(store, secret=b"another one"), 1) as theirs:
        ours.await_look()
        theirs.await_look()
        assert (ours.members, theirs.members) == ([], [])
        assert ask(store, "hlen", KEY) == "1"


def test_a_board_that_hangs_keeps_no_server_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice_board, "_FAREWELL_S", 0.05)
    with serve(tmp_path / "own") as server:
        valkey = ValkeyTerms(address=ValkeyAddress(host="127.0.0.1", port=server.port), call_timeout_s=3600.0)
        with pinning(terms_of(server, valkey=valkey), 0) as seen:
            seen.await_look()
            server.pause()


def test_whoever_hears_of_members_cannot_end_the_board(store: Server, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def hear(members: Sequence[FleetMember]) -> None:
        heard.append(len(members))
        if len(heard) < 3:
            raise RuntimeError("not now")

    board = NoticeBoard(terms_of(store), MEMBERS[0], hear)
    board.start()
    await_that(lambda: len(heard) > 4)
    board.close()
    assert caplog.text.count("could not be read") == 2


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
            await_that(lambda: ask(server, "hlen", KEY) == "2")
            assert sees(one, 1)()
            assert sees(two, 0)()
        assert len(lost(caplog)) == 2


def test_a_board_that_was_away_for_long_takes_nobody_with_it(tmp_path: Path) -> None:
    with serve(tmp_path / "own") as server:
        terms = terms_of(server)
        heard: list[int] = []
        with pinning(terms, 0) as one, pinning(terms, 1):
            await_that(sees(one, 1))
            server.kill()
            time.sleep(1.5 * terms.good_for_s)
            looks = one.looks
            server.start()
            for _ in range(5):
                one.await_look()
                heard.append(len(one.members))
            assert one.looks > looks
        assert heard == [1] * 5


def lost(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "cannot be read" in record.message]


def test_a_secret_is_not_shown() -> None:
    valkey = ValkeyTerms(address=ValkeyAddress(host="127.0.0.1"))
    assert "only the fleet" not in repr(BoardTerms(valkey=valkey, fleet="blue", secret=SECRET))
