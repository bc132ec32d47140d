"""A real engine in a process of its own: saves and loads through mapped memory, and verifies every byte that it reads.

    python -m tests.simulation.real_engine SOCKET NAME SEED

Works until it is told `settle`; answers every line with one of its own. A wrong byte ends it with status 1.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from kvoffload.cache import AcquiredBlocks, Ask, Publication, SegmentMap
from kvoffload.client import Client, ClientSettings, LinkSettings, Member
from kvoffload.protocol import Role
from kvoffload.types import HASH_BYTES
from tests.kit.cache.cache_model import PLAIN, make_chain
from tests.kit.server.harness import register_of
from tests.simulation.model_entries import split

CONVERSATIONS, BLOCKS = 200, 8
RECORD_BYTES = PLAIN.groups[0].record_bytes
STOCK_SLOTS = 16
LINK = LinkSettings(
    acquire_deadline_s=0.5,
    call_deadline_s=2.0,
    rejoin_after_s=1.0,
    last_backoff_s=0.1,
    stock_slots=(STOCK_SLOTS,),
)


class RealEngine:
    """An engine of one thread, which holds some of its hits for a while, whatever happens to the server."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._random = Random(seed)
        self._held: list[tuple[AcquiredBlocks, list[bytes], SegmentMap]] = []
        self.loads = self.saves = 0

    def step(self) -> None:
        self._client.begin_step()
        self._random.choice((self._save, self._load, self._load, self._finish, self._finish))()

    def settle(self) -> None:
        """Holds nothing from here on but what lies ready."""
        while self._held:
            self._finish()

    def _save(self) -> None:
        chain = self._choose_chain()
        slots = self._client.take(0, len(chain) // HASH_BYTES)
        if not len(slots):
            return
        if self._random.random() < 0.1:
            self._client.abort(slots)
            return
        segments = self._client.memory(slots.memory_id)
        names = split(chain)[: len(slots)]
        for name, address in zip(names, slots.addresses.tolist(), strict=True):
            segments.view(address, RECORD_BYTES)[:] = make_record(name)
        self._client.publish(Publication(slots, hashes=b"".join(names)))
        self.saves += 1

    def _load(self) -> None:
        chain = self._choose_chain()
        found = self._client.acquire(Ask(chain))
        if found.lease is not None:
            self._held.append((found, split(chain), self._client.memory(found.lease.memory_id)))
            if len(self._held) > 8:
                self._finish()

    def _finish(self) -> None:
        """A lease holds to its end: its bytes are looked at as late as possible."""
        if not self._held:
            return
        found, names, segments = self._held.pop(self._random.randrange(len(self._held)))
        assert found.lease is not None
        for name, address in zip(names, found.groups[0].addresses.tolist(), strict=False):
            if not np.array_equal(segments.view(address, RECORD_BYTES), make_record(name)):
                sys.exit(f"wrong bytes at {address} under lease {found.lease}")
            self.loads += 1
        self._client.release(found.lease)

    def _choose_chain(self) -> bytes:
        # Few are asked for often, many now and then.
        conversation = int(CONVERSATIONS * self._random.random() ** 3)
        return make_chain(conversation, self._random.randint(1, BLOCKS))


def make_record(name: bytes) -> npt.NDArray[np.uint8]:
    return np.resize(np.frombuffer(name, np.uint8), RECORD_BYTES)


def main() -> None:
    path, name, seed = sys.argv[1:]
    member = Member(engine=name, role=Role.SCHEDULER, pid=os.getpid())
    settings = ClientSettings(
        socket=Path(path), member=member, register=register_of(PLAIN), link=LINK, step_budget_s=0.05
    )
    with Client(settings) as client:
        engine = RealEngine(client, int(seed))
        is_working = True
        say({"is_up": True})
        while True:
            if is_working:
                engine.step()
                time.sleep(0.0005)
            if select.select([sys.stdin], [], [], 0 if is_working else None)[0]:
                order = sys.stdin.readline().strip()
                if not order:
                    return
                if order == "settle":
                    is_working = False
                    engine.settle()
                say({"is_served": client.wait_until_served(60), "loads": engine.loads, "saves": engine.saves})


def say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
