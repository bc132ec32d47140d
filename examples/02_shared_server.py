"""One server, and two clients: what one saves through mapped memory, the other finds and reads.

Starts `kvoffload serve` on a socket of its own. Exit code 0: every byte came back.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from serving import serve

from kvoffload.cache import Ask, CacheGeometry, CacheGroup, GroupRule, Publication
from kvoffload.client import Client, ClientSettings, LinkSettings, Member, describe_blocks
from kvoffload.keys.block_hash import BlockHasher
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import Role
from kvoffload.types import Fingerprint

BLOCK_TOKENS, RECORD_BYTES = 16, 1 << 20
GEOMETRY = CacheGeometry(
    hash_block_size=BLOCK_TOKENS,
    groups=[CacheGroup(rule=GroupRule(block_size=BLOCK_TOKENS, reuse=ReuseRule.PREFIX), record_bytes=RECORD_BYTES)],
)
PATIENT = LinkSettings(acquire_deadline_s=5.0)
"""An example may wait; an engine that serves people has 50 ms."""
PROMPT = [(17 * i + 5) % 1000 for i in range(20 * BLOCK_TOKENS)]


def settings_of(socket: Path, engine: str) -> ClientSettings:
    hasher = BlockHasher(BLOCK_TOKENS)
    # The fingerprint stands for everything that an engine's bytes depend on; here it is just a number.
    blocks = describe_blocks(Fingerprint(bytes(31) + b"\x01"), GEOMETRY, hash_algorithm=hasher.algorithm)
    member = Member(engine=engine, role=Role.SCHEDULER, pid=os.getpid())
    return ClientSettings(socket=socket, member=member, register=blocks, link=PATIENT)


def save(socket: Path, chain: bytes) -> None:
    """As an engine does: slots that are held ready, a copy, one message."""
    with Client(settings_of(socket, "saves")) as client:
        assert client.wait_until_served(30), client.fault
        count = len(chain) // 32
        slots = client.reserve(0, count=count)
        memory = client.memory(slots.memory_id)
        for block, address in enumerate(slots.addresses.tolist()):
            memory.view(address, RECORD_BYTES)[:] = block
        client.publish(Publication(slots, hashes=chain, parents=bytes(32) + chain[:-32]))
        print(f"saved {count} blocks of {RECORD_BYTES >> 10} KiB; {client.stats().readable} are readable")


def load(socket: Path, chain: bytes) -> bool:
    """A hit is leased, so its bytes stay until they are released, whatever the server does meanwhile."""
    with Client(settings_of(socket, "loads")) as client:
        assert client.wait_until_served(30), client.fault
        found = client.acquire(Ask(chain))
        if found.lease is None:
            return False
        memory = client.memory(found.lease.memory_id)
        addresses = found.groups[0].addresses.tolist()
        is_right = all(np.all(memory.view(address, RECORD_BYTES) == block) for block, address in enumerate(addresses))
        client.release(found.lease)
        print(f"found {found.boundary} tokens of {len(PROMPT)}, {len(addresses)} records: every byte is right")
        return is_right


def main() -> int:
    hasher = BlockHasher(BLOCK_TOKENS)
    chain = b"".join(hasher.hash_blocks(PROMPT, parent=hasher.root()))
    with serve(memory="256MiB") as socket:
        save(socket, chain)
        return 0 if load(socket, chain) else 1


if __name__ == "__main__":
    sys.exit(main())
