"""How much sooner do records come from the other end of a wire if they are coded, and is it ever later?

There a Valkey has them, or a peer, over trusted links and over sealed ones.

The wire has a rate of its own: two network namespaces with a pair of devices between them, which need root, `ip` and
`tc`. Tiers that code never, always and as they see fit send the same records and read them again, in turn; medians.
What a tier takes is compared with what the one that never codes takes in the same turn, because the machine is not the
same in all of them: `gain` is the median of these ratios, 1.5 is one and a half times as fast. The limit is the wire's
rate. One JSON line for each kind of store and rate.

Run: python -m benchmarks.coded_wire FOLDER [MODEL_FOLDER], with a folder as for `benchmarks/codec.py`
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import TypeVar

import numpy as np

from benchmarks.codec import read_records
from benchmarks.kv_records import make_missing, parse_folders
from kvoffload import native
from kvoffload.bench.served_peer import PeerPlace, serve_peer, teach
from kvoffload.bench.valkey import find_command
from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.tiers.base import FinishedBatch, RecordBatch, RecordNames, RecordOutcome, Ticket, Tier
from kvoffload.tiers.coding_choice import KNOWN_BYTES
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.valkey import ValkeySettings
from kvoffload.types import HASH_BYTES
from kvoffload.units import MIB

RATES = ("1gbit", "2500mbit", "10gbit")
ROUNDS = 15
PORT = 6390
ADDRESSES = ("10.78.0.1", "10.78.0.2")
TIMEOUT_S = 60.0
PEER_BYTES = 256 * MIB
FINGERPRINT = b"w" * HASH_BYTES
AnyTier = TypeVar("AnyTier", bound=Tier)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def wire(rate: str) -> Iterator[tuple[str, ...]]:
    """Yields the words that make a command run at the other end, which has the second of the addresses."""
    mark = f"kvw{os.getpid()}"
    other, devices = ("ip", "netns", "exec", mark), (f"{mark}a", f"{mark}b")
    run("ip", "netns", "add", mark)
    try:
        run("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1], "netns", mark)
        for enter, device, address in zip(((), other), devices, ADDRESSES, strict=True):
            run(*enter, "ip", "addr", "add", f"{address}/24", "dev", device)
            run(*enter, "ip", "link", "set", device, "up")
            shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "20ms")
            run(*enter, "tc", "qdisc", "add", "dev", device, *shape)
        yield other
    finally:
        # The pair first: it would go some time after the namespace.
        subprocess.run(("ip", "link", "del", devices[0]), check=False, capture_output=True)
        run("ip", "netns", "del", mark)


@contextmanager
def valkey(enter: Sequence[str], record_bytes: int) -> Iterator[Mapping[Coding, Tier]]:
    address = ValkeyAddress(host=ADDRESSES[1], port=PORT)
    with serve_valkey(enter):
        tiers = {
            coding: ValkeySettings(address=address, compress=coding, call_timeout_s=20.0).open_tier()
            for coding in Coding
        }
        yield tiers
        for tier in tiers.values():
            tier.close()


@contextmanager
def peer(enter: Sequence[str], record_bytes: int, *, is_sealed: bool) -> Iterator[Mapping[Coding, Tier]]:
    """A peer for each coding."""
    with ExitStack() as stack:
        tiers: dict[Coding, Tier] = {}
        for coding in Coding:
            there = PeerPlace(is_sealed=is_sealed, compress=coding, host=ADDRESSES[1], enter=enter)
            tiers[coding], spaces, _ = stack.enter_context(serve_peer(PEER_BYTES, there))
            teach(spaces, FINGERPRINT, record_bytes)
        yield tiers


Store = Callable[[Sequence[str], int], AbstractContextManager[Mapping[Coding, Tier]]]
STORES: Mapping[str, Store] = {
    "valkey": valkey,
    "trusted peer": partial(peer, is_sealed=False),
    "sealed peer": partial(peer, is_sealed=True),
}


@contextmanager
def serve_valkey(enter: Sequence[str]) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *enter,
            *find_command("redis-server"),
            "--bind",
            ADDRESSES[1],
            "--port",
            str(PORT),
            "--protected-mode",
            "no",
        ]
        process = subprocess.Popen([*command, "--save", "", "--dir", folder], stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.kill()
            process.wait()


class Wanted:
    """Records in memory under names of their own, and memory for what comes back."""

    def __init__(self, records: Sequence[memoryview]) -> None:
        self.record_bytes = len(records[0])
        self.sent = np.frombuffer(b"".join(records), np.uint8)
        self.read = np.zeros_like(self.sent)
        self._count = len(records)
        self._round = 0

    def names(self) -> RecordNames:
        """Others in each round, so that nothing is there already."""
        self._round += 1
        hashes = b"".join(self._round.to_bytes(16, "big") + at.to_bytes(16, "big") for at in range(self._count))
        return RecordNames(fingerprint=FINGERPRINT, hashes=hashes)

    def batch(self, names: RecordNames) -> RecordBatch:
        digests = native.digest_records(
            self.sent.data, self.record_bytes, fingerprint=FINGERPRINT, block_hashes=names.hashes, group=0, shard=0
        )
        return RecordBatch(
            names,
            self.slots(self.sent),
            record_bytes=self.record_bytes,
            digests=np.frombuffer(digests, np.uint64),
            parents=bytes(HASH_BYTES * self._count),
        )

    def slots(self, memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        at = np.arange(self._count, dtype=np.uint64) * np.uint64(self.record_bytes)
        return np.uint64(memory.ctypes.data) + at


def send_and_read(tier: Tier, moved: Wanted) -> dict[str, tuple[float, int]]:
    """Returns of both ways the seconds, and how many records were coded then; afterwards nothing is there."""
    names, slots = moved.names(), moved.slots(moved.read)
    batch = moved.batch(names)
    moved.read[:] = 0
    before = count_coded(tier)
    sent_s = finish(tier, partial(tier.put, batch), RecordOutcome.WRITTEN)
    between = count_coded(tier)
    get = partial(tier.get, names, slots, record_bytes=moved.record_bytes)
    read_s = finish(tier, get, RecordOutcome.FOUND)
    after = count_coded(tier)
    assert np.array_equal(moved.read, moved.sent)
    finish(tier, partial(tier.remove, names), RecordOutcome.REMOVED)
    return {"send": (sent_s, between - before), "read": (read_s, after - between)}


def count_coded(tier: Tier) -> int:
    return tier.health()[0].counts.get("coded_records", 0)


def finish(tier: Tier, submit: Callable[..., Ticket | None], wanted: RecordOutcome) -> float:
    """Seconds until all of it has ended as it should."""
    begun_s = time.perf_counter()
    assert submit(timeout_s=TIMEOUT_S) is not None
    ended: list[FinishedBatch] = []
    while not (ended := tier.poll()):
        select.select([tier], [], [], TIMEOUT_S)
    taken_s = time.perf_counter() - begun_s
    assert set(ended[0].outcomes.tolist()) == {wanted}, ended[0].outcomes
    return taken_s


def measure(
    records: Sequence[memoryview], rate: str, store: Store, *, rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """Returns for each coding and way the median milliseconds for all records, how many times as fast as uncoded that
    was in the same turn, and the share that was coded then: a store keeps what was sent, a peer codes what is read."""
    moved = Wanted(records)
    taken: Mapping[Coding, dict[str, list[tuple[float, int]]]] = {coding: {"send": [], "read": []} for coding in Coding}
    with wire(rate) as enter, store(enter, moved.record_bytes) as tiers:
        for tier in tiers.values():
            while not any(one.state.value == "ready" for one in tier.health()):
                time.sleep(0.05)
        warm = 2 * KNOWN_BYTES // moved.sent.nbytes + 2
        for at in range(warm + rounds):
            for coding, tier in take_turns(tiers, at):
                for way, one in send_and_read(tier, moved).items():
                    taken[coding][way].append(one)
    found: dict[str, dict[str, float]] = {}
    for coding, ways in taken.items():
        figures = found[coding.value] = {}
        for way, turns in ways.items():
            seconds, coded = zip(*turns[warm:], strict=True)
            uncoded = [one_s for one_s, _ in taken[Coding.OFF][way][warm:]]
            figures[f"{way}_ms"] = round(1e3 * statistics.median(seconds), 2)
            figures[f"{way}_gain"] = compare(uncoded, seconds)
            figures[f"{way}_coded"] = round(sum(coded) / (rounds * len(records)), 3)
    return found


def take_turns(tiers: Mapping[Coding, AnyTier], at: int) -> list[tuple[Coding, AnyTier]]:
    """Returns them in another order each time, as the first one finds another machine than the last one."""
    ordered = list(tiers.items())
    return ordered[at % len(ordered) :] + ordered[: at % len(ordered)]


def compare(uncoded: Sequence[float], taken: Sequence[float]) -> float:
    """How many times as fast it was, turn by turn: the median."""
    return round(statistics.median(before / now for before, now in zip(uncoded, taken, strict=True)), 3)


def main() -> None:
    given = parse_folders(__doc__)
    make_missing(given.records, given.model)
    records = read_records(given.records, "text_bf16", sample_bytes=16 << 20)
    for name, rate in product(STORES, RATES):
        found = measure(records, rate, STORES[name])
        line = {"store": name, "rate": rate, "records": len(records), "record_bytes": len(records[0]), **found}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
