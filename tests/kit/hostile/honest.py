"""An honest client, in a process of its own. `python -m tests.kit.hostile.honest SOCKET UID BLOCKS`.

It saves blocks of which each has bytes of its own, prints a line, and then reads commands, one a line: `check`, `spoil`
(which damages one of its own blocks) and `measure COUNT`. Each is answered by a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.protocol import Acquire, Acquired, Counts, Credits, CreditsGranted, Publish, Release, Stats
from kvoffload.types import AcquireOutcome
from tests.kit.server.blocks import RECORD_BYTES, chain_parents, hashes_of, register_of
from tests.kit.server.raw_client import RawClient


class HonestClient:
    """A client whose saved blocks must all stay."""

    def __init__(self, path: Path, blocks: int) -> None:
        self._chain = hashes_of(blocks, seed=os.getuid())
        self._blocks = blocks
        self.client = RawClient(path, register_of(), engine="honest")
        self._express = self.client.express
        self._save()

    def check(self) -> dict[str, int]:
        """How many of its blocks are there, and how many of these have their bytes."""
        acquired = self._acquire()
        if acquired.outcome is not AcquireOutcome.HIT:
            return {"blocks": 0, "right": 0}
        addresses = np.frombuffer(acquired.groups[0].addresses, "<u8").tolist()
        right = sum(
            np.array_equal(self.client.segments.view(address, RECORD_BYTES), self._bytes_of(at))
            for at, address in enumerate(addresses)
        )
        self._express.tell(Release(leases=acquired.lease.to_bytes(8, "little")))
        counts = self.client.ask(Stats())
        assert isinstance(counts, Counts), counts
        return {"blocks": min(len(addresses), counts.readable), "right": right}

    def spoil(self) -> dict[str, int]:
        acquired = self._acquire()
        (first, *_) = np.frombuffer(acquired.groups[0].addresses, "<u8").tolist()
        self.client.segments.view(first, RECORD_BYTES)[0] ^= 1
        self._express.tell(Release(leases=acquired.lease.to_bytes(8, "little")))
        return {}

    def measure(self, count: int) -> list[float]:
        """Seconds of each of so many acquires of all blocks; each is released."""
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            acquired = self._acquire()
            taken.append(time.perf_counter() - begun)
            assert acquired.outcome is AcquireOutcome.HIT, acquired
            self._express.tell(Release(leases=acquired.lease.to_bytes(8, "little")))
        return taken

    def describe(self) -> dict[str, Any]:
        """Returns what another process might get to know."""
        welcome = self.client.joining.welcome
        assert welcome is not None
        acquired = self._acquire()
        addresses = np.frombuffer(acquired.groups[0].addresses, "<u8").tolist()
        self._express.tell(Release(leases=acquired.lease.to_bytes(8, "little")))
        numbers = [self.client.session, acquired.lease, *addresses[:3]]
        return {"domain": welcome.domain, "numbers": numbers, "hashes": self._chain[: 4 * 32].hex()}

    def _acquire(self) -> Acquired:
        answer = self._express.ask(Acquire(name_space=self.client.name_space, chain=self._chain))
        assert isinstance(answer, Acquired), answer
        return answer

    def _save(self) -> None:
        granted = self._express.ask(Credits(name_space=self.client.name_space, group=0, count=self._blocks))
        assert isinstance(granted, CreditsGranted), granted
        for at, address in enumerate(np.frombuffer(granted.addresses, "<u8").tolist()):
            self.client.segments.view(address, RECORD_BYTES)[:] = self._bytes_of(at)
        self._express.tell(
            Publish(
                name_space=self.client.name_space,
                group=0,
                shard=0,
                tickets=granted.tickets,
                hashes=self._chain,
                parents=chain_parents(self._chain),
            )
        )
        assert self.check() == {"blocks": self._blocks, "right": self._blocks}

    def _bytes_of(self, at: int) -> Any:
        return np.frombuffer(np.random.default_rng(at).bytes(RECORD_BYTES), np.uint8)


def main() -> None:
    path, uid, blocks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    client = HonestClient(path, blocks)
    print(json.dumps(client.describe()), flush=True)
    for line in sys.stdin:
        verb, *given = line.split()
        print(json.dumps(getattr(client, verb)(*map(int, given))), flush=True)


if __name__ == "__main__":
    main()
