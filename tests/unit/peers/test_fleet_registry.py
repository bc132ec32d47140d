"""Servers find each other at a real registry, and forget who has gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.peers import fleet_registry
from kvoffload.peers.announcement import Announcement
from kvoffload.peers.fleet_member import FleetMember
from kvoffload.peers.fleet_registry import FleetRegistry, RegistryClock, RegistrySettings
from kvoffload.tiers.resp_connection import Answer, RespConnection
from kvoffload.tiers.valkey import ValkeySettings
from kvoffload.tiers.valkey_nodes import ValkeyNodes, as_bytes
from tests.kit.server.remote_client import make_keys
from tests.kit.server.tiers import await_that
from tests.kit.tiers.valkey_server import Server, ask, serve

SECRET = b"what only the fleet knows"
MEMBERS = [FleetMember(address=TcpAddress("127.0.0.1", 5000 + at), key=make_keys().public.decode()) for at in range(3)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_announced_at_first(store: Server) -> None:
    ask(store, "flushall")


def settings_of(store: Server, **changed: Any) -> RegistrySettings:
    valkey = ValkeySettings(address=ValkeyAddress(host="127.0.0.1", port=store.port), call_timeout_s=5.0)
    given: dict[str, Any] = {"valkey": valkey, "fleet": "blue", "secret": SECRET, "every_s": 0.02, "good_for_s": 1.0}
    return RegistrySettings(**given | changed)


KEY = RegistrySettings(valkey=ValkeySettings(address=ValkeyAddress(host="")), fleet="blue", secret=SECRET).key.decode()


def now_ms(store: Server) -> int:
    """Returns the time by the registry's clock."""
    return int(ask(store, "time").split()[0]) * 1000


class Seen:
    """The members that one server has been told."""

    registry: FleetRegistry

    def __init__(self) -> None:
        self.members: list[FleetMember] = []
        self.told: list[list[FleetMember]] = []
        self.looks = 0

    def __call__(self, members: Sequence[FleetMember]) -> None:
        self.members = list(members)
        self.told.append(self.members)
        self.looks += 1

    def await_look(self) -> None:
        """One that has begun after now."""
        after = self.looks + 2
        await_that(lambda: self.looks >= after)


@contextmanager
def announcing(settings: RegistrySettings, at: int, own: FleetMember | None = None) -> Iterator[Seen]:
    seen = Seen()
    registry = seen.registry = FleetRegistry(settings, own or MEMBERS[at], seen)
    registry.start()
    try:
        yield seen
    finally:
        registry.close()


def others(*numbers: int) -> list[FleetMember]:
    return sorted((MEMBERS[at] for at in numbers), key=lambda member: member.name)


def sees(seen: Seen, *numbers: int) -> Callable[[], bool]:
    return lambda: seen.members == others(*numbers)


def test_who_comes_is_seen_by_all_and_who_goes_is_forgotten(store: Server) -> None:
    settings = settings_of(store)
    with announcing(settings, 0) as one, announcing(settings, 1) as two:
        with announcing(settings, 2) as three:
            for seen, whom in ((one, (1, 2)), (two, (0, 2)), (three, (0, 1))):
                await_that(sees(seen, *whom))
        await_that(sees(one, 1))
        await_that(sees(two, 0))


def test_who_was_killed_is_forgotten_after_a_while(store: Server) -> None:
    settings = settings_of(store)
    announcement = Announcement(member=MEMBERS[1], at_ms=now_ms(store), order=1).sign("blue", SECRET)
    ask(store, "hset", KEY, MEMBERS[1].name, announcement.decode())
    with announcing(settings_of(store, good_for_s=3600.0), 0) as patient:
        await_that(sees(patient, 1))
        with announcing(settings, 2) as strict:
            await_that(sees(strict, 0))
            await_that(sees(patient, 1, 2))


def test_old_and_strange_notices_are_taken_down_and_nobody_is_there_for_them(store: Server) -> None:
    old = Announcement(member=MEMBERS[1], at_ms=1000, order=1).sign("blue", SECRET).decode()
    forged = Announcement(member=MEMBERS[2], at_ms=int(time.time() * 1000), order=1).sign("blue", b"guessed").decode()
    renamed = Announcement(member=MEMBERS[2], at_ms=int(time.time() * 1000), order=1).sign("blue", SECRET).decode()
    ask(store, "hset", KEY, MEMBERS[1].name, old, MEMBERS[2].name, forged, "somebody else", renamed, "x", "y")
    with announcing(settings_of(store), 0) as seen:
        await_that(lambda: ask(store, "hlen", KEY) == "1")
        seen.await_look()
        assert seen.members == []


def test_rubbish_keeps_nobody_from_being_seen(store: Server) -> None:
    rubbish = [word for at in range(3000) for word in (f"field {at}", "x" * 100)]
    ask(store, "hset", KEY, *rubbish)
    with (
        announcing(settings_of(store, good_for_s=600.0), 0) as one,
        announcing(settings_of(store, good_for_s=600.0), 1) as two,
    ):
        await_that(sees(one, 1))
        await_that(sees(two, 0))
        await_that(lambda: ask(store, "hlen", KEY) == "2")


def test_an_announcement_that_somebody_repeats_is_nobody(store: Server) -> None:
    settings = settings_of(store, good_for_s=600.0)
    with announcing(settings, 0) as seen:
        with announcing(settings, 1):
            await_that(sees(seen, 1))
            copied = ask(store, "hget", KEY, MEMBERS[1].name)
        await_that(sees(seen))
        ask(store, "hset", KEY, MEMBERS[1].name, copied)
        seen.await_look()
        assert seen.members == []


def test_a_fleet_of_one_name_and_another_secret_is_another_one(store: Server) -> None:
    with announcing(settings_of(store), 0) as ours, announcing(settings_of(store, secret=b"another one"), 1) as theirs:
        ours.await_look()
        theirs.await_look()
        assert (ours.members, theirs.members) == ([], [])
        assert ask(store, "hlen", KEY) == "1"


def test_a_registry_that_hangs_keeps_no_server_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_registry, "FAREWELL_S", 0.05)
    with serve(tmp_path / "own") as server:
        valkey = ValkeySettings(address=ValkeyAddress(host="127.0.0.1", port=server.port), call_timeout_s=3600.0)
        with announcing(settings_of(server, valkey=valkey), 0) as seen:
            seen.await_look()
            server.pause()


def test_whoever_hears_of_members_cannot_end_the_registry(store: Server, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def hear(members: Sequence[FleetMember]) -> None:
        heard.append(len(members))
        if len(heard) < 3:
            raise RuntimeError("not now")

    registry = FleetRegistry(settings_of(store), MEMBERS[0], hear)
    registry.start()
    await_that(lambda: len(heard) > 4)
    registry.close()
    assert caplog.text.count("could not be read") == 2


def test_fleets_do_not_mix(store: Server) -> None:
    with (
        announcing(settings_of(store), 0) as blue,
        announcing(settings_of(store, fleet="red"), 1) as red,
        announcing(settings_of(store), 2),
    ):
        await_that(sees(blue, 2))
        assert red.members == []


def test_while_the_registry_is_away_members_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serve(tmp_path / "own") as server:
        with (
            announcing(settings_of(server, good_for_s=600.0), 0) as one,
            announcing(settings_of(server, good_for_s=600.0), 1) as two,
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


def test_how_many_others_there_are_is_said_when_the_registry_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvoffload.peers")
    said = "the registry of fleet blue answers; other servers announced there with this secret"
    with (
        serve(tmp_path / "own") as server,
        announcing(settings_of(server, good_for_s=600.0), 0),
        announcing(settings_of(server, good_for_s=600.0, secret=b"s" * 16), 1),
    ):
        await_that(lambda: lines(caplog, said) == [f"{said}: 0"] * 2)
        with announcing(settings_of(server, good_for_s=600.0), 2):
            await_that(lambda: lines(caplog, said)[2:] == [f"{said}: 1"])
        server.kill()
        await_that(lambda: len(lost(caplog)) == 2)
        server.start()
        await_that(lambda: len(lines(caplog, said)) == 5)


class SetClock:
    """The registry's clock as if an operator had set it, for every registry that is opened meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0
        clock = self

        class Nodes(ValkeyNodes):
            def of(self, key: bytes) -> RespConnection:
                return cast(RespConnection, Registry(super().of(key)))

        class Registry:
            def __init__(self, connection: RespConnection) -> None:
                self._connection = connection

            def ask(self, *words: bytes) -> Answer:
                told = self._connection.ask(*words)
                if words != (b"TIME",):
                    return told
                assert isinstance(told, list)
                return [b"%d" % (int(as_bytes(told[0])) + clock.ahead_s), told[1]]

        monkeypatch.setattr(fleet_registry, "ValkeyNodes", Nodes)


HOURS = 3600


def test_a_registry_that_was_away_for_long_takes_nobody_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The members have not announced themselves yet when the registry is back."""
    clock, away_s = SetClock(monkeypatch), 0
    monkeypatch.setattr(
        fleet_registry, "time", SimpleNamespace(time_ns=time.time_ns, monotonic=lambda: time.monotonic() + away_s)
    )
    with serve(tmp_path / "own") as server:
        announcement = Announcement(member=MEMBERS[1], at_ms=now_ms(server), order=1).sign("blue", SECRET)
        ask(server, "hset", KEY, MEMBERS[1].name, announcement.decode())
        with announcing(settings_of(server, good_for_s=600.0), 0) as one:
            await_that(sees(one, 1))
            server.kill()
            await_that(lambda: len(lost(caplog)) == 1)
            one.told.clear()
            clock.ahead_s = away_s = 900
            server.start()
            one.await_look()
            assert ask(server, "hlen", KEY) == "1", "nobody but this one has written"
        assert all(members == others(1) for members in one.told)


@pytest.mark.parametrize("ahead_s", [2 * HOURS, -2 * HOURS, HOURS // 2, 30])
def test_a_clock_that_is_set_and_comes_back_takes_nobody_away(
    store: Server, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    clock = SetClock(monkeypatch)
    settings = settings_of(store, good_for_s=600.0)
    with announcing(settings, 0) as one, announcing(settings, 1) as two:
        await_that(sees(one, 1))
        await_that(sees(two, 0))
        one.told.clear()
        two.told.clear()
        for clock.ahead_s in (ahead_s, 0):
            for _ in range(3):
                one.await_look()
                two.await_look()
            with announcing(settings, 2) as three:
                await_that(sees(three, 0, 1))
                await_that(sees(one, 1, 2))
                await_that(sees(two, 0, 2))
            await_that(sees(one, 1))
            await_that(sees(two, 0))
        assert all(MEMBERS[1] in members for members in one.told)
        assert all(MEMBERS[0] in members for members in two.told)


def test_who_has_gone_is_gone_whatever_the_clock_is_set_to(store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied announcement does not become newer because the clock was set."""
    clock = SetClock(monkeypatch)
    settings = settings_of(store, good_for_s=600.0)
    with announcing(settings, 0) as seen:
        with announcing(settings, 1):
            await_that(sees(seen, 1))
            copied = ask(store, "hget", KEY, MEMBERS[1].name)
        await_that(sees(seen))
        for clock.ahead_s in (2 * HOURS, 0):
            seen.await_look()
            ask(store, "hset", KEY, MEMBERS[1].name, copied)
            seen.await_look()
            assert seen.members == []


def test_a_clock_that_is_set_back_brings_back_nobody_who_has_gone(
    store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry repeats an announcement from before a farewell, and then says that it is earlier."""
    clock = SetClock(monkeypatch)
    at_ms = now_ms(store)
    here, gone, again = (
        Announcement(member=MEMBERS[1], at_ms=at_ms + order, order=order, is_gone=order == 2).sign("blue", SECRET)
        for order in (1, 2, 3)
    )
    with announcing(settings_of(store, good_for_s=600.0), 0) as seen:
        ask(store, "hset", KEY, MEMBERS[1].name, here.decode())
        await_that(sees(seen, 1))
        ask(store, "hset", KEY, MEMBERS[1].name, gone.decode())
        await_that(sees(seen))
        ask(store, "hset", KEY, MEMBERS[1].name, here.decode())
        clock.ahead_s = -4
        seen.await_look()
        assert seen.members == []
        ask(store, "hset", KEY, MEMBERS[1].name, again.decode())
        await_that(sees(seen, 1))


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_two_servers_with_one_key_are_both_told_and_all_others_keep_to_one_of_them(
    store: Server, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(store, good_for_s=600.0)
    twin = FleetMember(address=TcpAddress("127.0.0.1", 6000), key=MEMBERS[1].key)
    with announcing(settings, 0) as seen, announcing(settings, 1) as first:
        await_that(sees(seen, 1))
        seen.told.clear()
        with announcing(settings, 1, own=twin) as second:
            await_that(lambda: first.registry.twin_at == str(twin.address))
            await_that(lambda: second.registry.twin_at == str(MEMBERS[1].address))
            await_that(lambda: bool(lines(caplog, "two servers of fleet blue have one key")))
            for _ in range(20):
                seen.await_look()
                second.await_look()
            assert (first.members, second.members) == (others(0), others(0))
        assert all(members == others(1) for members in seen.told)
        # The second server's farewell does not count for the first one.
        seen.await_look()
        assert seen.members == others(1)
    assert seen.registry.twin_at == ""
    assert len(lines(caplog, "two servers of fleet blue have one key")) == 1


def test_a_twin_that_has_gone_is_forgotten(store: Server) -> None:
    settings = settings_of(store)
    with announcing(settings, 1) as seen:
        with announcing(settings, 1, own=FleetMember(address=TcpAddress("127.0.0.1", 6000), key=MEMBERS[1].key)):
            await_that(lambda: seen.registry.twin_at != "")
        await_that(lambda: seen.registry.twin_at == "")


def test_a_server_that_begins_again_is_no_twin_of_its_own(store: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Killed and started elsewhere: its last announcement is there still, and so is a copy of it later."""
    settings = settings_of(store, good_for_s=600.0)
    former = FleetMember(address=TcpAddress("127.0.0.1", 6000), key=MEMBERS[1].key)
    left = Announcement(member=former, at_ms=now_ms(store), order=1).sign("blue", SECRET)
    ask(store, "hset", KEY, former.name, left.decode())
    with announcing(settings, 1) as again:
        again.await_look()
        ask(store, "hset", KEY, former.name, left.decode())
        again.await_look()
        assert again.registry.twin_at == ""
    assert not lines(caplog, "key")


def test_who_was_killed_and_is_elsewhere_now_is_found_there(store: Server) -> None:
    former = FleetMember(address=TcpAddress("127.0.0.1", 6000), key=MEMBERS[1].key)
    settings = settings_of(store)
    ask(
        store,
        "hset",
        KEY,
        former.name,
        Announcement(member=former, at_ms=now_ms(store), order=1).sign("blue", SECRET).decode(),
    )
    with announcing(settings, 0) as seen, announcing(settings, 1):
        await_that(sees(seen, 1))


def lost(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "cannot be read" in record.message]


def test_a_secret_is_not_shown() -> None:
    valkey = ValkeySettings(address=ValkeyAddress(host="127.0.0.1"))
    assert "only the fleet" not in repr(RegistrySettings(valkey=valkey, fleet="blue", secret=SECRET))


# ---- the registry's clock ----


HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("went_ms", "took_s", "set_by_ms"),
    [
        (5_000, 0.0, 0),
        (5_900, 0.0, 0),
        (4_100, 0.0, 0),
        (5_000 + 2 * HOUR_MS, 0.0, 2 * HOUR_MS),
        (5_000 - 2 * HOUR_MS, 0.0, -2 * HOUR_MS),
        (7_500, 0.0, 2_500),
        # An answer that was on its way for three seconds says that much less.
        (7_500, 3.0, 0),
        (2_500, 3.0, -2_500),
        (12_500, 3.0, 4_500),
    ],
)
def test_a_clock_that_was_set_is_told_from_one_that_goes_on(went_ms: int, took_s: float, set_by_ms: int) -> None:
    clock = RegistryClock()
    assert clock.read(1_000_000, asked_s=50.0, answered_s=50.0) == 0
    assert clock.read(1_000_000 + went_ms, asked_s=55.0, answered_s=55.0 + took_s) == set_by_ms


def test_each_setting_is_told_once() -> None:
    clock = RegistryClock()
    now_s, told = 0.0, []
    for offset_ms in (0, 0, 2 * HOUR_MS, 2 * HOUR_MS, 0, 0):
        now_s += 5
        told.append(clock.read(int(now_s * 1000) + offset_ms, asked_s=now_s, answered_s=now_s))
    assert told == [0, 0, 2 * HOUR_MS, 0, -2 * HOUR_MS, 0]


def test_a_clock_that_runs_a_little_fast_for_long_was_not_set() -> None:
    """While a registry cannot be read, hours may pass between two readings."""
    clock = RegistryClock()
    clock.read(0, asked_s=0.0, answered_s=0.0)
    assert clock.read(12 * HOUR_MS + 20_000, asked_s=12 * 3600.0, answered_s=12 * 3600.0) == 0
