"""Engines of a user are served, however many leases and unwritten slots another user holds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvoffload.cache import CacheGeometry, CacheGroup, GroupRule
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import Acquired, AcquireEntries, Credits, Publish, Release
from kvoffload.protocol.limits import MAX_BLOCKS
from kvoffload.types import AcquireOutcome
from kvoffload.units import MIB
from tests.kit.children import child
from tests.kit.server.blocks import MEMORY, acquire, hashes_of, save
from tests.kit.server.greedy_user import ACTS, SLOTS, TOGETHER, reserve_all
from tests.kit.server.harness import UID, Client, Server, core_settings
from tests.kit.server.raw_client import RawClient
from tests.kit.server.visits import joined

GREEDY = "tests.kit.server.greedy_user"
SERVER = """
import sys
from pathlib import Path
from kvoffload.server.loop import CacheServer, ServerPlan
from tests.kit.server.blocks import MEMORY
server = CacheServer(ServerPlan(socket=Path(sys.argv[1]), memory={"": MEMORY}, mode=int(sys.argv[2], 8)))
print("serves", flush=True)
server.run()
"""
GREEDY_USER = 64_002
of_other_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")


@contextmanager
def serving(mode: str) -> Iterator[Path]:
    """The socket of a server, in a folder that other users can read. It is alive at the end."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "s"
        with child(["-c", SERVER, str(path), mode], says="serves") as process:
            yield path
            assert process.poll() is None


def be_served(client: RawClient) -> None:
    """It may hold an eighth of the pool at once."""
    for seed in range(1000, 1000 + SLOTS // 8 // TOGETHER):
        save(client, hashes_of(TOGETHER, seed), 7)
        assert acquire(client, hashes_of(TOGETHER, seed)).outcome is AcquireOutcome.HIT


@of_other_users
@pytest.mark.parametrize("act", ACTS)
def test_whatever_one_user_holds_another_saves_and_leases(act: str) -> None:
    with (
        serving("0666") as path,
        child(["-m", GREEDY, str(path), str(GREEDY_USER), act], says="holds what it gets"),
        joined(path, "honest") as honest,
    ):
        be_served(honest)


def test_where_only_one_user_can_connect_it_may_have_everything() -> None:
    with serving("0600") as path, joined(path, "only") as only:
        assert reserve_all(only) == SLOTS


def test_a_block_that_a_request_names_often_is_leased_once() -> None:
    """Such requests would fill the lists of leases of all engines: a list has as many entries as the lease."""
    with serving("0600") as path, joined(path, "first") as first, joined(path, "second") as second:
        save(first, hashes_of(1), 7)
        leases = 2 * SLOTS // 1000
        for _ in range(leases):
            hashes = hashes_of(1) * MAX_BLOCKS
            answer = first.ask(AcquireEntries(name_space=first.name_space, group=0, hashes=hashes))
            assert isinstance(answer, Acquired)
            assert answer.outcome is AcquireOutcome.HIT
            addresses = np.frombuffer(answer.groups[0].addresses, "<u8")
            assert len(addresses) == MAX_BLOCKS
            assert len(set(addresses.tolist())) == 1
        be_served(second)


def test_one_lease_in_each_span_costs_engines_of_other_record_sizes_the_room_and_no_others() -> None:
    """A lease names places, so a record that is leased cannot be moved. What docs/security.md says of that."""
    with Server(memory=MEMORY, settings=core_settings()) as server:
        pinning, same, other = (
            server.process(name, uid=UID + at).join(geometry_of(record_bytes), name=name)
            for at, (name, record_bytes) in enumerate((("pinning", 4096), ("same", 4096), ("other", 300_000)))
        )
        first_of_span: dict[int, bytes] = {}
        for seed in range(SLOTS // TOGETHER):
            hashes = hashes_of(TOGETHER, seed)
            granted = pinning.ask(Credits(name_space=pinning.name_space, group=0, count=TOGETHER))
            addresses = np.frombuffer(granted.addresses, "<u8").tolist()
            names = [hashes[32 * at : 32 * at + 32] for at in range(TOGETHER)]
            for address, name in zip(addresses, names, strict=True):
                first_of_span.setdefault(address // MIB, name)
            pinning.tell(
                Publish(name_space=pinning.name_space, group=0, shard=0, tickets=granted.tickets, hashes=hashes)
            )
        assert len(first_of_span) == MEMORY.memory_bytes // MIB
        request = AcquireEntries(name_space=pinning.name_space, group=0, hashes=b"".join(first_of_span.values()))
        pins = pinning.ask(request)
        assert pins.outcome is AcquireOutcome.HIT
        assert count_granted(other, 8) == 0
        assert count_granted(same, TOGETHER) == TOGETHER
        pinning.tell(Release(leases=pins.lease.to_bytes(8, "little")))
        assert count_granted(other, 8) == 8


def geometry_of(record_bytes: int) -> CacheGeometry:
    group = CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=record_bytes)
    return CacheGeometry(hash_block_size=16, groups=(group,))


def count_granted(client: Client, count: int) -> int:
    return len(client.ask(Credits(name_space=client.name_space, group=0, count=count)).tickets) // 8
