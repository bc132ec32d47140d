"""The time that a client lets an engine's step wait, when its server does not answer."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffload.cache import Ask
from kvoffload.client import Client, LinkSettings
from tests.kit.cache.offload_contract import CHAIN, save
from tests.kit.children import child, stop
from tests.kit.client.served import WAIT_S, served, wait_for
from tests.unit.client.conftest import SERVER

PATIENT = LinkSettings(acquire_deadline_s=WAIT_S, call_deadline_s=WAIT_S)
HASTY = LinkSettings(acquire_deadline_s=0.02, call_deadline_s=WAIT_S, last_backoff_s=0.05)


@contextmanager
def stopped_server(path: Path, link: LinkSettings) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """It has CHAIN, and does nothing until it is told SIGCONT."""
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = served(path, link=link)
        save(client)
        stop(server)
        yield server, client


def test_a_steps_wait_that_ends_leaves_the_question_open(tmp_path: Path) -> None:
    with stopped_server(tmp_path / "s", PATIENT) as (server, client):
        client.begin_step()
        pending = client.start_acquire(Ask(CHAIN))
        assert client.wait_for(pending) is None
        assert not pending.is_over
        server.send_signal(signal.SIGCONT)
        wait_for(lambda: client.poll(pending) is not None)
        assert client.wait_for(pending) is pending.found
        assert pending.found is not None
        assert pending.found.is_hit
        client.close()


def test_all_calls_of_a_step_share_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopped_server(tmp_path / "s", PATIENT) as (server, client):
        waits: list[float] = []
        monkeypatch.setattr(
            client.wire, "await_answers", lambda wait_s, **_: waits.append(wait_s) or time.sleep(wait_s)
        )
        client.begin_step()
        assert not client.acquire(Ask(CHAIN)).is_hit
        spent = len(waits)
        assert spent
        assert client.wait_for(client.start_acquire(Ask(CHAIN))) is None
        assert len(client.reserve(0, count=1)) == 0
        assert len(waits) == spent  # nothing was left of it
        client.begin_step()
        assert not client.acquire(Ask(CHAIN)).is_hit
        assert len(waits) > spent
        server.send_signal(signal.SIGCONT)
        client.close()


def test_a_call_that_is_given_up_keeps_nothing(tmp_path: Path) -> None:
    with stopped_server(tmp_path / "s", PATIENT) as (server, client):
        client.begin_step()
        assert not client.acquire(Ask(CHAIN)).is_hit
        assert len(client.reserve(0, count=3)) == 0
        client.budget_ns = -1
        server.send_signal(signal.SIGCONT)
        # The answers come before those of the first counts, and what they brought goes back before the second ones.
        client.stats()
        stats = client.stats()
        assert (stats.hits, stats.leases, stats.reserved) == (1, 0, 0)
        client.close()


def test_a_server_that_hangs_is_not_waited_for_twice(tmp_path: Path) -> None:
    with stopped_server(tmp_path / "s", HASTY) as (server, client):
        client.begin_step()
        assert not client.acquire(Ask(CHAIN)).is_hit
        wait_for(lambda: not client.is_served)
        pending = client.start_acquire(Ask(CHAIN))
        assert pending.is_over  # the server is not asked any more
        assert client.lookup(0, CHAIN).all()
        server.send_signal(signal.SIGCONT)
        assert client.wait_until_served(WAIT_S)
        client.close()
        with served(tmp_path / "s") as later:
            # A lease that the first acquire may have got was given back.
            assert later.stats().leases == 0


def test_a_request_may_wait_longer_than_the_acquire_deadline(tmp_path: Path) -> None:
    with stopped_server(tmp_path / "s", HASTY) as (server, client):
        patient = client.start_acquire(Ask(CHAIN), wait_s=WAIT_S)
        hasty = client.start_acquire(Ask(CHAIN))
        wait_for(lambda: client.poll(hasty) is not None)
        assert not patient.is_over
        server.send_signal(signal.SIGCONT)
        wait_for(lambda: client.poll(patient) is not None)
        assert patient.found is not None
        assert patient.found.is_hit
        client.close()
