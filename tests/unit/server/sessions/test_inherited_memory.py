"""Whose memory a successor takes over, and who counts as alive in it: real servers, users and PID namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from kvoffload.client.joining import HeldMemory
from kvoffload.protocol import Counts, Credits, CreditsGranted, Stats
from kvoffload.server import DomainSettings
from kvoffload.server.loop import CacheServer, ServerPlan
from tests.kit.children import child
from tests.kit.server.blocks import MEMORY, hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient

RED = 61_001
SERVER = """
import sys
from pathlib import Path
from kvoffload.cache import CacheSettings
from kvoffload.server import DomainSettings
from kvoffload.server.loop import CacheServer, ServerPlan
_, path, domain, wait_s, *users = sys.argv
memory = CacheSettings(memory_bytes=64 << 20, segment_bytes=64 << 20)
domains = (DomainSettings(name=domain, uids=frozenset(map(int, users)) or None),)
plan = ServerPlan(
    socket=Path(path), memory={domain: memory}, domains=domains, mode=0o666, adopt_wait_s=float(wait_s)
)
server = CacheServer(plan)
print("serves", flush=True)
server.run()
"""
# The process joins, and holds as many slots as it is told.
ENGINE = """
import os, sys
from tests.kit.server.blocks import register_of
from kvoffload.protocol import Credits
from tests.kit.server.raw_client import RawClient
_, path, name, count, uid = sys.argv
if int(uid):
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
client = RawClient(path, register_of(), engine=name)
client.ask(Credits(name_space=client.name_space, group=0, count=int(count)))
print("holds", flush=True)
sys.stdin.read()
"""
# Another user, who says that he has the memory of the server that has ended.
DECEIVER = """
import os, sys
from kvoffload.cache import LocalCache
from kvoffload.client.joining import HeldMemory, OnLifeline, Step
from kvoffload.protocol import Offer
from tests.kit.lingering import Lingering
from tests.kit.server.blocks import MEMORY, register_of
from tests.kit.server.raw_client import RawClient
_, path, boot_id, sends = sys.argv


class Held(Lingering):
    def _give_up(self):
        print("held up", flush=True)
        super()._give_up()


if sends == "a_socket":
    socket = Held()
os.setgroups([])
os.setgid(61001)
os.setuid(61001)
with LocalCache.create(MEMORY) as forged:
    lock, index, *segments = map(os.dup, (forged.files.lock, forged.files.index, *forged.files.segments))
    index_bytes = os.fstat(index).st_size


if sends == "a_socket":
    os.close(lock)
    lock = os.dup(socket.fileno())


class Deceiver(RawClient):
    def _send_all(self, messages):
        is_offer = any(isinstance(one.message, Offer) for one in messages)
        super()._send_all(messages if sends != "nothing" or not is_offer else [])
        if is_offer:
            if sends == "a_socket":
                os.close(lock)
                socket.part()
            print("wanted", flush=True)


held = HeldMemory(
    boot_id=int(boot_id), session=1, lock=lock, index=index, index_bytes=index_bytes,
    segments=tuple(segments), segment_sizes=(MEMORY.segment_bytes,),
)
Deceiver(path, register_of(), engine="deceiver", former=held)
sys.stdin.read()
if sends == "a_socket":
    socket.let_go()
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")


def can_have_namespaces() -> bool:
    tool = shutil.which("unshare")
    return (
        tool is not None
        and not subprocess.run(
            [tool, "--pid", "--fork", "--mount-proc", "true"], check=False, capture_output=True
        ).returncode
    )


needs_namespaces = pytest.mark.skipif(not can_have_namespaces(), reason="no PID namespace can be made here (unshare)")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user can reach."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@contextmanager
def serving(path: Path, domain: str, *users: int) -> Iterator[subprocess.Popen[str]]:
    with child(["-c", SERVER, str(path), domain, "0", *map(str, users)], says="serves") as server:
        yield server


@contextmanager
def serving_apart(path: Path, *, wait_s: float) -> Iterator[subprocess.Popen[str]]:
    """Serves as in a container of its own: it sees no process but itself."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", SERVER]
    with subprocess.Popen([*command, str(path), "", str(wait_s)], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "serves\n"
            yield server
        finally:
            server.kill()


@contextmanager
def engine(path: Path, name: str, *, count: int = 0, uid: int = 0) -> Iterator[subprocess.Popen[str]]:
    with child(["-c", ENGINE, str(path), name, str(count), str(uid)], says="holds") as started:
        yield started


def await_reserved(client: RawClient, count: int) -> None:
    until = time.monotonic() + 60
    found = -1
    while found != count:
        assert time.monotonic() < until, f"{found} slots are reserved, not {count}"
        counts = client.ask(Stats())
        assert isinstance(counts, Counts)
        found = counts.reserved


def come_back(server: CacheServer, path: Path, held: HeldMemory | None) -> RawClient:
    return RawClient(path, register_of(), former=held, turn=lambda: server.turn(0.001))


def find_wait(*, is_adopted: bool) -> float:
    """How long a successor waits for memory. What is not adopted is waited for to the end."""
    return 600.0 if is_adopted else 0.3


@needs_root
@pytest.mark.parametrize(
    ("domain", "users", "is_adopted"),
    [
        ("red", {0, RED}, True),
        ("red", None, True),
        # He may have it mapped still.
        ("red", {0}, False),
        ("blue", {0, RED}, False),
    ],
)
def test_memory_goes_to_a_domain_of_the_same_name_that_admits_all_who_had_it(
    folder: Path, domain: str, users: set[int] | None, is_adopted: bool
) -> None:
    hashes = hashes_of(4)
    with serving(folder / "old", "red", 0, RED), engine(folder / "old", "his", uid=RED):
        mine = RawClient(folder / "old", register_of())
        save(mine, hashes, 7)
    settings = DomainSettings(name=domain, uids=None if users is None else frozenset(users))
    wait_s = find_wait(is_adopted=is_adopted)
    plan = ServerPlan(socket=folder / "new", memory={domain: MEMORY}, domains=(settings,), adopt_wait_s=wait_s)
    with (
        closing(mine),
        closing(CacheServer(plan)) as successor,
        closing(come_back(successor, folder / "new", mine.held)) as again,
    ):
        assert again.joining.keeps_former == is_adopted
        assert again.index.lookup(again.name_space, 0, hashes).tolist() == [is_adopted] * 4


@pytest.mark.parametrize("whose", ["here", "there"])
@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_successor_takes_memory_of_its_own_path_alone(tmp_path: Path, whose: str, how: str) -> None:
    """Another server of the same user has memory of a domain of the same name, and an engine uses both."""
    hashes = hashes_of(4)
    clients: dict[str, RawClient] = {}
    with ExitStack() as stack:
        for name in ("here", "there"):
            if how == "killed":
                stack.enter_context(serving(tmp_path / name, ""))
                clients[name] = RawClient(tmp_path / name, register_of())
            else:
                server = stack.enter_context(
                    closing(CacheServer(ServerPlan(socket=tmp_path / name, memory={"": MEMORY})))
                )
                clients[name] = come_back(server, tmp_path / name, None)
            save(clients[name], hashes, 7)
    plan = ServerPlan(socket=tmp_path / "here", memory={"": MEMORY}, adopt_wait_s=find_wait(is_adopted=whose == "here"))
    with (
        closing(CacheServer(plan)) as successor,
        closing(come_back(successor, tmp_path / "here", clients[whose].held)) as again,
    ):
        assert again.joining.keeps_former == (whose == "here")
        assert again.index.lookup(again.name_space, 0, hashes).tolist() == [whose == "here"] * 4
    for client in clients.values():
        client.close()


@needs_root
@pytest.mark.parametrize("sends", ["forged", "nothing", "a_socket"])
def test_who_says_that_he_has_the_memory_keeps_it_from_nobody(folder: Path, sends: str) -> None:
    hashes = hashes_of(4)
    with serving(folder / "old", ""):
        mine = RawClient(folder / "old", register_of())
        save(mine, hashes, 7)
    assert mine.held is not None
    plan = ServerPlan(socket=folder / "new", memory={"": MEMORY}, mode=0o666, adopt_wait_s=600)
    script = [DECEIVER, str(folder / "new"), str(mine.held.boot_id), sends]
    with closing(mine), closing(CacheServer(plan)) as successor, child(["-c", *script]) as deceiver:
        assert deceiver.stdout is not None
        os.set_blocking(deceiver.stdout.fileno(), False)
        while deceiver.stdout.readline() != "wanted\n":
            successor.turn(0.005)
            assert deceiver.poll() is None
        for _ in range(100):
            successor.turn(0.001)
        assert not deceiver.stdout.readline(), "a socket held up the loop"
        with closing(come_back(successor, folder / "new", mine.held)) as again:
            assert again.joining.keeps_former
            assert again.index.lookup(again.name_space, 0, hashes).all()


@needs_namespaces
def test_a_successor_that_sees_no_engine_takes_back_what_the_dead_held_and_no_more(tmp_path: Path) -> None:
    hashes = hashes_of(4)
    with engine_pair(tmp_path / "old") as (old, dead, living):
        mine = RawClient(tmp_path / "old", register_of())
        save(mine, hashes, 7)
        assert isinstance(mine.ask(Credits(name_space=mine.name_space, group=0, count=3)), CreditsGranted)
        await_reserved(mine, 9 + 5 + 3)
        old.kill()
        old.wait()
        dead.kill()
        dead.wait()
        with serving_apart(tmp_path / "new", wait_s=600):
            again = RawClient(tmp_path / "new", register_of(), former=mine.held)
            assert again.joining.keeps_former
            assert again.index.lookup(again.name_space, 0, hashes).all()
            await_reserved(again, 5 + 3)
            # A process that lives and does not come back may still be writing; a few more looks change nothing.
            for _ in range(50):
                await_reserved(again, 5 + 3)
            living.kill()
            await_reserved(again, 3)
            again.close()
        mine.close()


@contextmanager
def engine_pair(path: Path) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str], subprocess.Popen[str]]]:
    with (
        serving_apart(path, wait_s=0) as old,
        engine(path, "dead", count=9) as dead,
        engine(path, "living", count=5) as living,
    ):
        yield old, dead, living


@needs_namespaces
def test_a_process_that_the_server_cannot_see_greets_as_often_as_it_likes(tmp_path: Path) -> None:
    """A session has at most 63 processes, and this is one."""
    with serving_apart(tmp_path / "s", wait_s=0):
        stays = RawClient(tmp_path / "s", register_of())
        for _ in range(70):
            RawClient(tmp_path / "s", register_of()).close()
        assert isinstance(stays.ask(Stats()), Counts)
        stays.close()
