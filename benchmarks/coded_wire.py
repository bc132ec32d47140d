"""How much sooner do records come from a Valkey at the other end of a wire if they are coded, and is it ever later?

The wire has a rate of its own: two network namespaces with a pair of devices between them, which need root, `ip` and
`tc`. Tiers that code never, always and as they see fit send the same records and read them again, in turn; medians.
What a tier takes is compared with what the one that never codes takes in the same turn, because the machine is not the
same in all of them: `gain` is the median of these ratios, 1.5 is one and a half times as fast. The limit is the wire's
rate. One JSON line for each rate.

Run: python -m benchmarks.coded_wire FOLDER [MODEL_FOLDER], with a folder as for `benchmarks/codec.py`
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.codec import read_records
from benchmarks.kv_records import write_all
from kvoffload import native
from kvoffload.bench.valkey import find_command
from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.tiers.base import FinishedBatch, RecordBatch, RecordNames, RecordOutcome, Ticket, Tier
from kvoffload.tiers.coding_choice import KNOWN_BYTES
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.remote import RemoteTier
from kvoffload.tiers.valkey import ValkeyTerms
from kvoffload.types import HASH_BYTES

RATES = ("1gbit", "2500mbit", "10gbit")
ROUNDS = 15
PORT = 6390
ADDRESSES = ("10.78.0.1", "10.78.0.2")
TIMEOUT_S = 60.0
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
def store(enter: Sequence[str]) -> Iterator[None]:
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


def send_and_read(tier: RemoteTier, moved: Wanted) -> tuple[float, float]:
    """Seconds of both; afterwards nothing is there."""
    names, slots = moved.names(), moved.slots(moved.read)
    batch = moved.batch(names)
    moved.read[:] = 0
    sent_s = finish(tier, partial(tier.put, batch), RecordOutcome.WRITTEN)
    get = partial(tier.get, names, slots, record_bytes=moved.record_bytes)
    read_s = finish(tier, get, RecordOutcome.FOUND)
    assert np.array_equal(moved.read, moved.sent)
    finish(tier, partial(tier.remove, names), RecordOutcome.REMOVED)
    return sent_s, read_s


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


def measure(records: Sequence[memoryview], rate: str, *, rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Returns for each coding the median milliseconds to send and to read all records, how many times as fast as
    uncoded that was in the same turn, and the share coded."""
    moved = Wanted(records)
    times: Mapping[Coding, dict[str, list[float]]] = {coding: {"send": [], "read": []} for coding in Coding}
    address = ValkeyAddress(host=ADDRESSES[1], port=PORT)
    with wire(rate) as enter, store(enter):
        tiers = {
            coding: ValkeyTerms(address=address, compress=coding, call_timeout_s=20.0).open_tier() for coding in Coding
        }
        for tier in tiers.values():
            while not any(one.state.value == "ready" for one in tier.health()):
                time.sleep(0.05)
        warm = 2 * KNOWN_BYTES // moved.sent.nbytes + 2
        coded = dict.fromkeys(Coding, 0)
        for at in range(warm + rounds):
            for coding, tier in take_turns(tiers, at):
                before = tier.health()[0].counts.get("coded_records", 0)
                taken = send_and_read(tier, moved)
                if at >= warm:
                    for way, taken_s in zip(("send", "read"), taken, strict=True):
                        times[coding][way].append(taken_s)
                    coded[coding] += tier.health()[0].counts.get("coded_records", 0) - before
        for tier in tiers.values():
            tier.close()
    return {
        coding.value: {
            **{f"{way}_ms": round(1e3 * statistics.median(taken), 2) for way, taken in times[coding].items()},
            **{f"{way}_gain": compare(times[Coding.OFF][way], taken) for way, taken in times[coding].items()},
            "coded": round(coded[coding] / (rounds * len(records)), 3),
        }
        for coding in Coding
    }


def take_turns(tiers: Mapping[Coding, AnyTier], at: int) -> list[tuple[Coding, AnyTier]]:
    """Returns them in another order each time, as the first one finds another machine than the last one."""
    ordered = list(tiers.items())
    return ordered[at % len(ordered) :] + ordered[: at % len(ordered)]


def compare(uncoded: Sequence[float], taken: Sequence[float]) -> float:
    """How many times as fast it was, turn by turn: the median."""
    return round(statistics.median(before / now for before, now in zip(uncoded, taken, strict=True)), 3)


def main() -> None:
    folder = Path(sys.argv[1])
    if not (folder / "records.json").is_file():
        write_all(folder, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    records = read_records(folder, "text_bf16", sample_bytes=16 << 20)
    for rate in RATES:
        found = measure(records, rate)
        line = {"rate": rate, "records": len(records), "record_bytes": len(records[0]), **found}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
