"""Records between a buffer and slots of shared memory, as a connector moves them: a client's calls, and copies."""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.bench.served import acquire, make_chain
from kvoffload.cache import Publication, ReservedSlots
from kvoffload.client import Client
from kvoffload.errors import BenchmarkError
from kvoffload.types import HASH_BYTES

TAKE_TRIES = 100_000


class RecordMover:
    """All calls return their seconds. What is saved is other blocks every time."""

    def __init__(
        self, client: Client, pool: ThreadPoolExecutor, *, records: int, record_bytes: int, threads: int
    ) -> None:
        """`threads` of the pool copy, where there is more than one record at once."""
        self._client = client
        self._records = records
        self._record_bytes = record_bytes
        self._threads = threads
        self._pool = pool
        self._buffer = np.full((self._records, self._record_bytes), 7, np.uint8)
        self._chains = 0
        self._chain = b""
        self.slots: list[npt.NDArray[np.uint8]] = []
        memory = client.memory(client.memory_id)
        self._memory = memory.view(0, memory.size_bytes)
        """One segment, so that a slot is a slice."""
        # Each page's first use in a process costs more than its copy; an engine that pins the memory has had that.
        np.add.reduce(self._memory[:: mmap.PAGESIZE])

    def save(self, batch: int) -> float:
        client = self._client
        self._chains += 1
        chain = self._chain = make_chain(self._records, seed=100 + self._chains)
        parents = bytes(HASH_BYTES) + chain
        self.slots = []
        start = time.perf_counter()
        for first in range(0, self._records, batch):
            taken = self._take(batch)
            slots = self._find_slots(taken.addresses)
            self._copy_all(list(zip(slots, self._buffer[first : first + batch], strict=True)))
            hashes = slice(first * HASH_BYTES, (first + batch) * HASH_BYTES)
            client.publish(Publication(taken, hashes=chain[hashes], parents=parents[hashes]))
            self.slots += slots
        seconds = time.perf_counter() - start
        client.stats()
        if not client.lookup(0, chain).all():
            raise BenchmarkError(f"of {self._records} records not all were saved")
        return seconds

    def load(self, batch: int) -> float:
        client = self._client
        start = time.perf_counter()
        for first in range(0, self._records, batch):
            hashes = self._chain[first * HASH_BYTES : (first + batch) * HASH_BYTES]
            found = client.acquire_entries(0, hashes) if batch < self._records else acquire(client, hashes)
            if found.lease is None:
                raise BenchmarkError(f"a load of what was saved is a {found.outcome.name}")
            slots = self._find_slots(found.groups[0].addresses)
            self._copy_all(list(zip(self._buffer[first : first + batch], slots, strict=True)))
            client.release(found.lease)
        seconds = time.perf_counter() - start
        client.stats()
        if not (self._buffer == 7).all():
            raise BenchmarkError("what was loaded is not what was saved")
        return seconds

    def copy(self, what: str, batch: int) -> float:
        """Copies between the slots of the last save and the buffer. Nothing else uses either at that time."""
        pairs = list(zip(self.slots, self._buffer, strict=True))
        if what == "load":
            pairs = [(row, slot) for slot, row in pairs]
        start = time.perf_counter()
        for first in range(0, self._records, batch):
            self._copy_all(pairs[first : first + batch])
        return time.perf_counter() - start

    def _find_slots(self, addresses: npt.NDArray[np.uint64]) -> list[npt.NDArray[np.uint8]]:
        return [self._memory[address : address + self._record_bytes] for address in addresses.tolist()]

    def _copy_all(self, pairs: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]) -> None:
        if len(pairs) == 1:
            _copy(pairs)
            return
        share = -(-len(pairs) // self._threads)
        for copying in [self._pool.submit(_copy, pairs[at : at + share]) for at in range(0, len(pairs), share)]:
            copying.result()

    def _take(self, count: int) -> ReservedSlots:
        """Takes slots that are held ready. BenchmarkError: they do not come."""
        taken = self._client.take(0, count)
        for _ in range(TAKE_TRIES):
            if len(taken) == count:
                return taken
            more = self._client.take(0, count - len(taken))
            taken = ReservedSlots(
                more.memory_id,
                more.session,
                0,
                np.concatenate([taken.tickets, more.tickets]),
                np.concatenate([taken.addresses, more.addresses]),
            )
        raise BenchmarkError(f"{count} slots were not granted")


def _copy(pairs: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]) -> None:
    for target, source in pairs:
        native.copy_bytes(target, source, True)
