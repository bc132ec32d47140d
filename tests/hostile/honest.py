"""The honest user's processes: `python -m tests.hostile.honest ROLE SOCKET UID TENANT`.

Each prints `ready`, does one thing until a line comes on its input, looks whether it is served in the end, and prints
what it found as a line of JSON. Times are of the clock that all processes of the machine share (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import zmq

from kvoffload.errors import KVOffloadError
from kvoffload.protocol import Acquire, Acquired, Credits, CreditsGranted, Mark, Promote, Publish, Register, Release
from kvoffload.types import AcquireOutcome
from tests.kit.server.blocks import chain_parents, hashes_of, register_of
from tests.kit.server.raw_client import RawClient

BLOCKS = 64
"""Blocks of each chain."""
CHAINS, STREAM_BYTES = 20, 64 << 10
"""Chains that are saved and come back from a slower tier, and bytes of each of their blocks: more than the memory of
the domain, all together."""
PROMOTE_MS = 300
PAUSE_S = 0.001
MESSAGES = 50
"""Messages by which a process finds the thread that reads its channel."""
LAST_S = 60.0
"""For so long it tries to be served in the end."""
REFUSED = (KVOffloadError, OSError, AssertionError, zmq.ZMQError)


@dataclass
class Found:
    """Findings of one process. Each item of a list is the time of an event, and its value."""

    acquires: list[tuple[float, float]] = field(default_factory=list)
    """Milliseconds of each acquire, as `Honest.timing` counts them."""
    marks: list[tuple[float, float]] = field(default_factory=list)
    """Milliseconds until a mark was answered, likewise."""
    loops: list[tuple[float, float]] = field(default_factory=list)
    """Milliseconds that the server's loop ran on a processor until then: the rest it waited for other threads, for the
    kernel or for a processor."""
    greetings: list[tuple[float, float]] = field(default_factory=list)
    """Milliseconds until a new process had joined."""
    wrong: list[tuple[float, str]] = field(default_factory=list)
    lost: list[tuple[float, str]] = field(default_factory=list)
    refused: list[tuple[float, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    is_served: bool = False


def bytes_of(seed: int, at: int, size: int) -> Any:
    """The bytes of a block's record. All words of all records differ."""
    return (np.arange(size // 8, dtype=np.uint64) + np.uint64(seed << 40 | at << 24)).view(np.uint8)


def read_schedule_ms(thread: int) -> tuple[float, float, int]:
    """Returns for how long a thread has run, for how long it was ready and had no processor, and how often it ran. The
    first thread of a process has the process's number."""
    with contextlib.suppress(OSError, ValueError):
        ran, waited, turns = Path(f"/proc/{thread}/schedstat").read_text().split()
        return int(ran) / 1e6, int(waited) / 1e6, int(turns)
    return 0.0, 0.0, 0


def read_run_delay_ms(thread: int) -> float:
    """Returns for how long a thread of the server, or any thread of this process, had no processor: this process's
    messages go through a thread of ZeroMQ."""
    threads = os.listdir("/proc/self/task") if thread == os.getpid() else [f"{thread}"]
    return sum(read_schedule_ms(int(each))[1] for each in threads)


def find_express_thread(client: RawClient) -> int:
    """Returns the thread of the server that reads the express channel: it runs once for each of some messages."""
    folder, found = Path(f"/proc/{client.lifeline.credentials().pid}/task"), Counter[int]()
    for sign in (-1, 1):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                if (entry / "comm").read_text() == "kvo-express\n":
                    found[int(entry.name)] += sign * read_schedule_ms(int(entry.name))[2]
        for _ in range(MESSAGES if sign < 0 else 0):
            client.express.confirm()
    return min(found, key=lambda thread: abs(found[thread] - MESSAGES))


class Honest:
    """A process's connection, which is made again if it ends."""

    def __init__(self, path: Path, register: Register) -> None:
        self.path, self.register, self.found = path, register, Found()
        self.record_bytes = register.groups[0].record_bytes
        self.client: RawClient | None = None
        self._express_thread = 0
        self._boot_id = 0
        self.saved: set[int] = set()
        """Chains that were saved to this server."""

    def join(self) -> RawClient:
        """Joins if it is not joined. What it saved before is only there if the server is the same."""
        if self.client is None:
            self.client = RawClient(self.path, self.register, engine=f"honest {os.getpid()}")
            self._express_thread = find_express_thread(self.client)
            self.found.counts["joined"] += 1
            if self.client.index.boot_id != self._boot_id:
                self._boot_id, self.saved = self.client.index.boot_id, set()
        return self.client

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Notes a refusal, or that no answer came in time. Then the process has to join again."""
        begun = time.monotonic()
        try:
            yield
        except REFUSED as fault:
            # A test's client says by an assertion that no answer came, or that its channel was closed.
            text = (str(fault) or type(fault).__name__).splitlines()[0][:200]
            self.found.refused.append((begun, f"{text} ({time.monotonic() - begun:.1f} s)"))
            if self.client is not None:
                with contextlib.suppress(*REFUSED):
                    self.client.close()
                self.client = None
            time.sleep(0.2)

    def try_until_served(self, act: Callable[[Honest, int], None]) -> None:
        """Tries for a minute. Refusals on the way are not noted."""
        self.found.is_served, begun, refused = False, time.monotonic(), len(self.found.refused)
        while not self.found.is_served and time.monotonic() < begun + LAST_S:
            with self.trying():
                act(self, 0)
                self.found.is_served = True
        del self.found.refused[refused:]

    def save(self, seed: int, first: int, blocks: int) -> None:
        """Saves those blocks of a chain from `first` on, as far as there is room."""
        client = self.join()
        chain = hashes_of(blocks, seed)
        hashes, parents = (np.frombuffer(each, "V32")[first:] for each in (chain, chain_parents(chain)))
        of_group: dict[str, int] = {"name_space": client.name_space, "group": 0}
        granted = client.express.ask(Credits(**of_group, hashes=hashes.tobytes()))
        assert isinstance(granted, CreditsGranted), granted
        tickets, addresses = (np.frombuffer(each, "<u8") for each in (granted.tickets, granted.addresses))
        places = np.flatnonzero(tickets)
        for at in places.tolist():
            view = client.segments.view(int(addresses[at]), self.record_bytes)
            view[:] = bytes_of(seed, first + at, self.record_bytes)
        written = [each[places].tobytes() for each in (tickets, hashes, parents)]
        client.express.tell(Publish(**of_group, shard=0, tickets=written[0], hashes=written[1], parents=written[2]))
        assert client.express.confirm() is None
        self.saved.add(seed)

    def load(self, seed: int, blocks: int, *, looks: int) -> int:
        """Acquires a chain, compares the bytes of so many of its blocks, and releases it. How many blocks came."""
        client = self.join()
        acquire = Acquire(name_space=client.name_space, chain=hashes_of(blocks, seed))
        with self.timing(self.found.acquires, os.getpid(), self._express_thread):
            acquired = client.express.ask(acquire)
        assert isinstance(acquired, Acquired), acquired
        self.found.counts[acquired.outcome.name] += 1
        if acquired.outcome is not AcquireOutcome.HIT:
            # A tenant beyond its quota may not use more than its quota at once, what the server writes included.
            is_beyond = self.register.tenant == "stream" and acquired.outcome is AcquireOutcome.OVER_LIMIT
            assert is_beyond or acquired.outcome is AcquireOutcome.MISS, acquired.outcome.name
            return 0
        addresses = np.frombuffer(acquired.groups[0].addresses, "<u8").tolist()
        for at in range(0, len(addresses), max(1, len(addresses) // looks)) if looks else ():
            right = bytes_of(seed, at, self.record_bytes)
            if not np.array_equal(client.segments.view(addresses[at], self.record_bytes), right):
                self.found.wrong.append((time.monotonic(), f"block {at} of chain {seed}"))
            self.found.counts["compared"] += 1
        client.express.tell(Release(leases=acquired.lease.to_bytes(8, "little")))
        return len(addresses)

    def mark(self) -> None:
        client = self.join()
        server = client.lifeline.credentials().pid
        begun, ran_ms = time.monotonic(), read_schedule_ms(server)[0]
        with self.timing(self.found.marks, os.getpid(), server):
            client.ask(Mark())
        self.found.loops.append((begun, read_schedule_ms(server)[0] - ran_ms))

    @contextlib.contextmanager
    def timing(self, times: list[tuple[float, float]], *threads: int) -> Iterator[None]:
        """Notes the milliseconds of a call, without those in which these threads waited for a processor."""
        begun, waited_ms = time.monotonic(), sum(map(read_run_delay_ms, threads))
        yield
        took_ms = (time.monotonic() - begun) * 1000 - sum(map(read_run_delay_ms, threads)) + waited_ms
        times.append((begun, max(0.0, took_ms)))


def loads(honest: Honest, number: int) -> None:
    """Acquires a chain that it has saved. None of its blocks may be lost: its tenant is within its quota."""
    honest.join()
    if 1 not in honest.saved:
        honest.save(1, 0, BLOCKS)
    came = honest.load(1, BLOCKS, looks=BLOCKS if number % 16 == 0 else 0)
    if came < BLOCKS:
        honest.found.lost.append((time.monotonic(), f"{BLOCKS - came} of {BLOCKS} blocks"))
        honest.save(1, came, BLOCKS)
    if number % 4 == 0:
        honest.mark()
    time.sleep(PAUSE_S)


def streams(honest: Honest, number: int) -> None:
    """Saves more than its tenant may have, so that chains come back from slower tiers or not at all."""
    seed = 100 + Random(number).randrange(CHAINS)
    client = honest.join()
    if seed in honest.saved:
        client.ask(Promote(name_space=client.name_space, chain=hashes_of(BLOCKS, seed), wait_ms=PROMOTE_MS))
    came = honest.load(seed, BLOCKS, looks=BLOCKS)
    honest.found.counts["came back"] += came
    if came < BLOCKS:
        honest.save(seed, came, BLOCKS)
    time.sleep(10 * PAUSE_S)


def newcomers(honest: Honest, number: int) -> None:
    """New processes that join, one after the other."""
    begun = time.monotonic()
    client = RawClient(honest.path, replace(honest.register, fingerprint=b"n" * 32), engine=f"new {number}")
    honest.found.greetings.append((begun, (time.monotonic() - begun) * 1000))
    client.close()
    time.sleep(0.2)


ROLES = {"loads": loads, "streams": streams, "newcomers": newcomers}


def main() -> None:
    role, path, uid, tenant = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    register = register_of(2, STREAM_BYTES) if role == "streams" else register_of(1)
    honest = Honest(Path(path), replace(register, tenant=tenant))
    honest.try_until_served(ROLES[role])
    print("ready", flush=True)
    for number in count(1):
        if select.select([sys.stdin], [], [], 0)[0]:
            break
        with honest.trying():
            ROLES[role](honest, number)
    honest.try_until_served(ROLES[role])
    print(json.dumps(honest.found.__dict__), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
