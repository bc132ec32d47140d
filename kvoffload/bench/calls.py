"""Timed calls of a client and of an echo server. As a process of its own, it takes commands from a benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffload.bench.child import answer_commands, say_ready
from kvoffload.bench.echo import EchoClient
from kvoffload.bench.served import acquire, join, make_chain
from kvoffload.client import Client


def time_acquires(client: Client, chain: bytes, calls: int) -> list[float]:
    """Returns the seconds of each acquire. All leases are released afterwards; that time does not count."""
    seconds, leases = [], []
    for _ in range(calls):
        start = time.perf_counter()
        found = acquire(client, chain)
        seconds.append(time.perf_counter() - start)
        leases.append(found.lease)
    for lease in leases:
        assert lease is not None
        client.release(lease)
    return seconds


def time_calls(call: Callable[[], object], calls: int) -> list[float]:
    """Returns how many seconds each call took."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def count_acquires(client: Client, chain: bytes, seconds: float) -> int:
    """How many are done in this time, each released again."""
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        lease = acquire(client, chain).lease
        assert lease is not None
        client.release(lease)
        count += 1
    return count


def count_calls(call: Callable[[], object], seconds: float) -> int:
    """Returns how many calls are done in this time."""
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        call()
        count += 1
    return count


def main(server: str, echo: str, engine: str, blocks: str) -> None:
    """Runs a client of both servers, which asks for a chain of so many saved blocks."""
    chain = make_chain(int(blocks))
    with join(server, engine) as client, EchoClient(echo, int(blocks)) as limit:
        say_ready()
        answer_commands(
            {
                "acquires": lambda seconds: count_acquires(client, chain, seconds),
                "echoes": lambda seconds: count_calls(limit.call, seconds),
            }
        )
