"""Clients that benchmarks count."""

from __future__ import annotations

import time
from pathlib import Path

from kvoffload.bench.calls import count_calls, time_acquires, time_calls
from kvoffload.bench.child import Child
from kvoffload.bench.served import join, make_chain, save_chain

WAIT_S = 30.0


def test_calls_are_timed_and_counted() -> None:
    done: list[int] = []
    assert len(time_calls(lambda: done.append(1), 3)) == len(done) == 3
    assert count_calls(lambda: done.append(1), 0.01) == len(done) - 3 > 0


def test_acquires_are_released(tmp_path: Path) -> None:
    server, echo = tmp_path / "s", tmp_path / "e"
    with (
        Child("kvoffload.bench.served", server, 64, 0),
        Child("kvoffload.bench.echo", echo),
        join(server, "test") as client,
    ):
        save_chain(client, make_chain(4))
        seconds = time_acquires(client, make_chain(4), 6)
        assert len(seconds) == 6
        assert min(seconds) > 0
        with Child("kvoffload.bench.calls", server, echo, "other", 4) as other:
            acquired = other.ask("acquires", 0.05)
            assert other.ask("echoes", 0.05) > 0
        assert client.stats().hits == 6 + acquired
        # The other one's last release may have ended with it; then its exit is what frees the lease.
        end = time.monotonic() + WAIT_S
        while client.stats().leases:
            assert time.monotonic() < end
