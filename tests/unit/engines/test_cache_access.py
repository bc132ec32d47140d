"""An engine's processes on their way to a real server: served, refused, or without one for now."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.cache import CacheGeometry, CacheGroup, GroupRule
from kvoffload.client import Client, LinkState, describe_blocks
from kvoffload.config.sources import Settings
from kvoffload.engines import cache_access
from kvoffload.engines.cache_access import CacheAccess
from kvoffload.errors import PrivateServerError, ServerError
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import Register, Role
from tests.kit.cache.cache_model import fingerprint
from tests.kit.children import child
from tests.kit.connector.tiers import wait_for
from tests.kit.processors import ALL_CPUS, bound_to, needs_two_cpus
from tests.unit.client.conftest import SERVER

ROOT = Path(__file__).parents[3]
WAIT_S = 30.0
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("server") / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves"):
        yield path


def make_access(server: Path | str = "", *, engine: str = "", machine_key: str = "m", **settings: Any) -> CacheAccess:
    return CacheAccess(
        settings=Settings(server=str(server), **{"memory": "64MiB", **settings}),
        engine=engine or f"engine {next(NUMBERS)}",
        machine_key=machine_key,
    )


def make_register(name: str, *, record_bytes: int = 1000) -> Register:
    rule = GroupRule(block_size=4, reuse=ReuseRule.PREFIX)
    geometry = CacheGeometry(hash_block_size=4, groups=(CacheGroup(rule=rule, record_bytes=record_bytes),))
    return describe_blocks(fingerprint(name), geometry, hash_algorithm="sha256", ranks=2)


def test_memory_that_is_set_beside_a_shared_server_is_said_to_be_unused(
    server: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, cache_access.__name__)
    for memory, role in (("64MiB", Role.WORKER), ("auto", Role.SCHEDULER)):
        make_access(server, memory=memory).open(make_register("unused"), role=role).close()
    assert "is not used" not in caplog.text
    make_access(server, memory="64MiB").open(make_register("unused"), role=Role.SCHEDULER).close()
    assert f"`memory` of this engine is not used: the server at {server} has a pool of its own" in caplog.text


def test_all_processes_of_an_engine_have_one_session_in_one_memory(server: Path) -> None:
    access, register = make_access(server), make_register("one session")
    with (
        access.open(register, role=Role.WORKER) as worker,
        access.open(replace(register, rank=1), role=Role.WORKER, rank=1) as other,
        access.open(register, role=Role.SCHEDULER) as scheduler,
    ):
        place = (scheduler.memory_id, scheduler.session)
        assert place in worker.places()
        assert place in other.places()
        with make_access(server).open(register, role=Role.SCHEDULER) as stranger:
            assert stranger.memory_id == scheduler.memory_id
            assert stranger.session != scheduler.session


def test_who_does_not_wait_is_served_later(server: Path, tmp_path: Path) -> None:
    access, register = make_access(server), make_register("later")
    with access.open(register, role=Role.WORKER, waits=False) as client:
        assert client.wait_until_served(WAIT_S)
    with make_access(tmp_path / "absent").open(register, role=Role.WORKER, waits=False) as client:
        assert not client.is_served


def test_only_the_scheduler_holds_slots_ready(server: Path) -> None:
    access, register = make_access(server), make_register("slots")
    with (
        access.open(register, role=Role.WORKER) as worker,
        access.open(register, role=Role.SCHEDULER, stock_slots=(8, 8, 8)) as scheduler,
    ):
        slots = wait_for(lambda: scheduler.take(0, 1))
        assert worker.may_copy(slots)
        assert len(worker.take(0, 1)) == 0
        assert worker.most_slots(0) == 0


def test_deadlines_are_those_of_the_settings(server: Path) -> None:
    access = make_access(server, step_budget="3ms", acquire_deadline="7ms")
    with access.open(make_register("deadlines"), role=Role.SCHEDULER) as client:
        assert client.settings.step_budget_s == 0.003
        assert client.settings.link.acquire_deadline_s == 0.007


def test_an_engine_that_the_server_refuses_does_not_start_and_hears_what_differs(server: Path) -> None:
    with (
        make_access(server).open(make_register("same"), role=Role.SCHEDULER),
        pytest.raises(ServerError, match=rf"{server}.*groups"),
    ):
        make_access(server).open(make_register("same", record_bytes=2000), role=Role.SCHEDULER)


def test_a_refused_client_is_closed(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Client] = []

    class SeenClient(Client):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    with make_access(server).open(make_register("again"), role=Role.SCHEDULER):
        monkeypatch.setattr(cache_access, "Client", SeenClient)
        threads = set(threading.enumerate())
        with pytest.raises(ServerError):
            make_access(server).open(make_register("again", record_bytes=2000), role=Role.SCHEDULER)
    assert [client.link.state.name for client in made] == ["CLOSED"]
    assert set(threading.enumerate()) <= threads


def test_an_engine_starts_without_a_server_and_is_served_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_access, "ABSENT_WAIT_S", 0.05)
    path = tmp_path / "s"
    with make_access(path).open(make_register("absent"), role=Role.SCHEDULER) as client:
        assert not client.is_served
        assert f"starts without a cache server until there is one: {path} is not there" in caplog.text
        with child(["-c", SERVER, str(path), "0"], says="serves"):
            assert client.wait_until_served(WAIT_S), client.fault


def test_a_server_that_says_nothing_is_waited_for_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_access, "START_WAIT_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(8)
        with make_access(tmp_path / "s").open(make_register("silent"), role=Role.SCHEDULER) as client:
            assert not client.is_served
    assert "starts without a cache server" in caplog.text


# ---- a private server ----


ENGINE = f"""
import sys, tempfile
sys.path.insert(0, {str(ROOT)!r})
from {__name__} import make_access, make_register
from kvoffload.protocol import Role
tempfile.tempdir = sys.argv[1]
access, register = make_access(), make_register("private")
worker = access.open(register, role=Role.WORKER)
scheduler = access.open(register, role=Role.SCHEDULER)
assert (scheduler.memory_id, scheduler.session) in worker.places()
print("served", flush=True)
sys.stdin.read()
"""


def test_a_private_server_comes_with_the_first_rank_and_goes_with_the_engines_last_process(tmp_path: Path) -> None:
    with child(["-c", ENGINE, str(tmp_path)], says="served"):
        assert list(tmp_path.iterdir()) != []
    wait_for(lambda: list(tmp_path.iterdir()) == [])


class LateClient:
    """Its server has not answered in time, and does at the sixth look."""

    fault = "the server does not answer"

    def __init__(self) -> None:
        self.link = SimpleNamespace(state=LinkState.DOWN, refusal=None)
        self.looks = 0

    def start(self) -> LateClient:
        return self

    def wait_until_served(self, timeout_s: float) -> bool:
        self.looks += 1
        return self.looks > 5


@pytest.mark.parametrize(("is_private", "looks"), [(True, 6), (False, 1)], ids=["private", "shared"])
def test_a_private_server_that_answers_late_is_waited_for(
    is_private: bool, looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside an engine that starts, it may have to wait for a processor for seconds."""
    monkeypatch.setattr(cache_access, "ABSENT_WAIT_S", 0.0)
    client = LateClient()
    monkeypatch.setattr(cache_access, "Client", lambda settings, on_event: client)
    monkeypatch.setattr(cache_access, "find_or_start", lambda *given, **named: tmp_path / "s")
    make_access("" if is_private else tmp_path / "s").open(make_register("m"), role=Role.SCHEDULER)
    assert client.looks == looks
    assert ("starts without a cache server" in caplog.text) == (looks == 1)


def test_of_an_engines_processes_its_scheduler_alone_says_that_there_is_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_access, "ABSENT_WAIT_S", 0.0)
    monkeypatch.setattr(cache_access, "Client", lambda settings, on_event: LateClient())
    for role in (Role.WORKER, Role.WORKER, Role.SCHEDULER):
        make_access(tmp_path / "s").open(make_register("m"), role=role)
    assert len(caplog.messages) == 1


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Every look for a private server, of which there is none."""
    found: list[dict[str, Any]] = []

    def look(settings: Settings, room: Path, **how: Any) -> Path:
        found.append(how)
        return tmp_path / "nobody"

    monkeypatch.setattr(cache_access, "find_or_start", look)
    monkeypatch.setattr(cache_access, "START_WAIT_S", 0.0)
    return found


@pytest.mark.parametrize(("linger", "key"), [("0s", "deployment"), ("1h", "")])
def test_engines_of_a_deployment_share_a_private_server_and_with_linger_whoever_comes_next(
    linger: str, key: str, looked: list[dict[str, Any]]
) -> None:
    access = make_access(machine_key="deployment", linger=linger)
    access.open(make_register("m"), role=Role.WORKER).close()
    assert looked
    assert {look["key"] for look in looked} == {key}
    assert looked[0]["holds_memory"] is False


def test_what_keeps_a_private_server_from_starting_keeps_the_engine_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*given: Any, **named: Any) -> Path:
        raise PrivateServerError("there is no memory", remedy="take less")

    monkeypatch.setattr(cache_access, "find_or_start", refuse)
    with pytest.raises(PrivateServerError, match="no memory"):
        make_access().open(make_register("m"), role=Role.WORKER)


@needs_two_cpus
def test_the_clients_thread_runs_on_all_processors_of_the_engine(server: Path) -> None:
    with bound_to({min(ALL_CPUS)}), make_access(server).open(make_register("bound"), role=Role.WORKER):
        threads = [one.native_id for one in threading.enumerate() if one.name == "kvoffload-client"]
        assert [os.sched_getaffinity(one) for one in threads if one is not None] == [ALL_CPUS]
