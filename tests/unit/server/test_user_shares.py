"""Engines of a user are served, however many leases and unwritten slots another user holds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvoffload.protocol import Acquired, AcquireEntries
from kvoffload.protocol.limits import MAX_BLOCKS
from kvoffload.types import AcquireOutcome
from tests.kit.children import child
from tests.kit.server.blocks import acquire, hashes_of, save
from tests.kit.server.greedy_user import ACTS, SLOTS, TOGETHER, reserve_all
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
