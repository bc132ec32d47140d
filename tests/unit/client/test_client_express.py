"""A client and a real server with the express channel between them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvoffload.cache import AcquireOutcome, Ask
from kvoffload.client import Client, LinkSettings, LinkState
from kvoffload.client.lanes import Lane
from kvoffload.protocol import Call, Mark, Role, Stats
from tests.kit.cache.cache_model import make_chain
from tests.kit.cache.offload_contract import CHAIN, TOKENS, save
from tests.kit.children import child
from tests.kit.client.served import WAIT_S, served, wait_for
from tests.kit.processors import measure_turn_ns, needs_turns
from tests.unit.client.conftest import SERVER, make_settings

SHORT_TURN_NS = 100_000


def test_hits_come_by_it(socket_path: Path) -> None:
    with served(socket_path) as client:
        save(client)
        client.stats()
        found = client.acquire(Ask(CHAIN))
        assert found.boundary == TOKENS
        assert found.lease is not None
        client.release(found.lease)
        assert client.stats().leases == 0


@needs_turns
def test_the_threads_that_answer_engines_run_soon_after_they_wake(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves") as process, served(path) as client:
        wait_for(lambda: client.wire.express_file >= 0)
        threads = {
            int(thread.name): (thread / "comm").read_text().strip()
            for thread in Path(f"/proc/{process.pid}/task").iterdir()
        }
        assert "kvo-express" in threads.values()
        answering = {thread for thread, name in threads.items() if thread == process.pid or name == "kvo-express"}
        # A thread has a name before it has its turns.
        wait_for(lambda: {thread for thread in threads if measure_turn_ns(thread) == SHORT_TURN_NS} == answering)


def test_an_observer_has_none(socket_path: Path) -> None:
    with served(socket_path, role=Role.OBSERVER) as observer:
        observer.stats()
        assert observer.wire.express_file == -1


def test_counts_are_those_of_all_that_was_told(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come by control, and what they count went by express."""
    with served(socket_path) as client:
        save(client)
        leases = [client.acquire(Ask(CHAIN)).lease for _ in range(3)]
        sent: list[tuple[Lane, type]] = []
        lanes = client.link.lanes

        def note(lane: Lane, send: Callable[[Call], bool], call: Call) -> bool:
            sent.append((lane, type(call.message)))
            return send(call)

        for lane in lanes:
            monkeypatch.setattr(lane, "send", partial(note, lane, lane.send))
        for lease in leases:
            assert lease is not None
            client.release(lease)
        assert client.stats().leases == 0
        assert sent[-2:] == [(lanes.express, Mark), (lanes.control, Stats)]


def test_a_call_that_is_larger_than_a_socket_is_answered(socket_path: Path) -> None:
    """32,000 blocks are a frame of a megabyte."""
    with served(socket_path) as client:
        save(client)
        assert client.link.memories.mapped is not None
        long = CHAIN + make_chain(9, 16) * 2000
        client.blocks.find_boundary = lambda *_, **__: len(long) // 32 * 16  # type: ignore[method-assign]
        for _ in range(3):
            found = client.acquire(Ask(long))
            assert (found.outcome, found.boundary) == (AcquireOutcome.HIT, TOKENS)
            assert found.lease is not None
            client.release(found.lease)
        assert client.stats().leases == 0


def test_what_a_full_socket_has_not_taken_is_the_keepers_to_send(socket_path: Path) -> None:
    """No caller waits for a hint or a release to be sent, and its sender may never call again."""
    with served(socket_path) as client:
        save(client)
        woken = threading.Event()
        wake = client.wire.on_unsent

        def note() -> None:
            wake()
            woken.set()

        client.wire.on_unsent = note
        names = make_chain(3, 16) * 60
        slots = client.reserve(0, count=1)
        while not woken.is_set():
            client.invalidate(0, names)
        client.abort(slots)
        wait_for(lambda: not client.wire.has_unsent)
        assert client.stats().reserved == 0


def test_the_keeper_is_woken_for_what_is_unsent(tmp_path: Path) -> None:
    client = Client(make_settings(tmp_path / "nobody"))
    client.wire.on_unsent()
    assert client.connection.is_woken
    client.close()


def test_whoever_finds_the_end_of_it_hangs_up_and_wakes_the_keeper(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        # Its keeper does not run.
        client = Client(make_settings(path, link=LinkSettings(acquire_deadline_s=WAIT_S, call_deadline_s=WAIT_S)))

        def is_served() -> bool:
            client.wire.receive_all(client.link, time.monotonic_ns())
            client.link.on_time(time.monotonic_ns())
            return client.is_served and client.wire.express_file >= 0

        wait_for(is_served)
        server.send_signal(signal.SIGKILL)
        server.wait()
        assert not client.connection.is_woken
        assert len(client.take(0, 1)) == 0
        assert client.link.state is LinkState.DOWN
        assert "express" in client.fault or "other end" in client.fault
        assert client.connection.is_woken
        client.close()


def test_a_server_that_comes_back_gives_another(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = served(path)
        save(client)
        server.kill()
        server.wait()
        wait_for(lambda: not client.is_served)
        assert client.wire.express_file == -1
    with child(["-c", SERVER, str(path), "60"], says="serves"):
        assert client.wait_until_served(WAIT_S), client.fault
        assert client.acquire(Ask(CHAIN)).is_hit
        client.close()
