"""A server's warnings, the processes that get them, and how often."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.client import Client
from kvoffload.protocol import Warned
from kvoffload.protocol.limits import LINE_BYTES
from kvoffload.server.operators.warning_feed import KEPT, WarningFeed
from tests.kit.server.tiers import await_that, disk_below, serving
from tests.unit.client.conftest import make_settings

SERVER = logging.getLogger("kvoffload.server.anything")
WAIT_S = 30.0


@pytest.fixture
def feed() -> Iterator[WarningFeed]:
    feed = WarningFeed(lambda: 0.0)
    feed.start()
    yield feed
    feed.stop()


def make_session(lifeline: int, *, uid: int = 1, wants_warnings: bool = True) -> Any:
    process = SimpleNamespace(lifeline=lifeline, wants_warnings=wants_warnings, warned=0)
    return SimpleNamespace(uid=uid, processes={lifeline: process})


def tell(feed: WarningFeed, *sessions: Any, only_users: frozenset[int] | None = None) -> list[tuple[int, int, str]]:
    told = []
    for one in feed.tell(sessions, only_users=only_users):
        assert isinstance(one.message, Warned)
        told.append((one.lifeline, one.message.number, one.message.message))
    return told


def test_each_warning_is_told_once_to_who_wants_to_hear(feed: WarningFeed) -> None:
    hears, does_not = make_session(5), make_session(6, wants_warnings=False)
    SERVER.warning("a disk is %s", "lost")
    SERVER.info("all is well")
    logging.getLogger("kvoffload.connector").warning("not the server's")
    assert tell(feed, hears, does_not) == [(5, 1, "a disk is lost")]
    assert tell(feed, hears) == []
    SERVER.error("and another")
    late = make_session(7)
    assert tell(feed, hears, late) == [(5, 2, "and another"), (7, 1, "a disk is lost"), (7, 2, "and another")]


def test_a_warning_of_long_ago_is_told_with_its_age() -> None:
    now = [0.0]
    feed = WarningFeed(lambda: now[0])
    feed.start()
    try:
        SERVER.warning("a peer is absent")
        now[0] += 8 * 60 + 13
        SERVER.warning("x" * 10 * LINE_BYTES)
        (_, _, first), (_, _, second) = tell(feed, make_session(5))
        assert first == "0:08:13 ago: a peer is absent"
        assert len(second) <= LINE_BYTES
        now[0] += 60
        assert len(tell(feed, make_session(6))[1][2]) <= LINE_BYTES
    finally:
        feed.stop()


def test_users_of_several_domains_hear_nothing_of_each_other(feed: WarningFeed) -> None:
    SERVER.warning("user 7 does not read")
    owner, other = make_session(5, uid=1), make_session(6, uid=2)
    assert [row[0] for row in tell(feed, owner, other, only_users=frozenset({1}))] == [5]


def test_many_warnings_are_bounded_and_keep_their_numbers(feed: WarningFeed) -> None:
    for number in range(KEPT + 8):
        SERVER.warning("%d", number)
    told = tell(feed, make_session(5))
    assert [row[1] for row in told] == list(range(9, KEPT + 9))
    assert told[-1][2] == str(KEPT + 7)


def test_a_warning_is_one_line_that_fits_whatever_it_says(feed: WarningFeed) -> None:
    try:
        raise OSError(5, "a\x1b[2J\nfault")
    except OSError:
        SERVER.exception("broken")
    SERVER.warning("x" * 10 * LINE_BYTES)
    first, second = tell(feed, make_session(5))
    assert first[2] == "broken: OSError: [Errno 5] a [2J fault"
    assert len(second[2]) <= LINE_BYTES


def test_a_bad_disk_is_told_to_an_engine_that_comes_after_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = "the cache server warns: disk tier"

    def told() -> list[str]:
        return [line for line in caplog.messages if line.startswith(said)]

    with serving(tmp_path / "s", tiers={"": [disk_below(tmp_path / "no-folder")]}):
        await_that(lambda: any(line.startswith("disk tier") for line in caplog.messages))
        with Client(make_settings(tmp_path / "s")) as client:
            await_that(lambda: bool(told()))
            assert client.warnings == 1
        with Client(make_settings(tmp_path / "s", name="another")) as client:
            await_that(lambda: len(told()) == 2)
    assert str(tmp_path / "no-folder") in told()[0]
