"""A user who may open the socket takes neither the server's memory nor its descriptors, and ends nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cache import CacheSettings
from kvoffload.protocol import AdoptVerdict, Greeting, Holding, Offer, Role
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.units import MIB
from tests.kit.open_files import count_open_files
from tests.kit.server.hostile_user import HELLO_GREETING, Claimant, beset, is_let_go, say
from tests.kit.silent_file import silent_file

WITHOUT_HELLO = 40
OBSERVER = Greeting(protocol_min=1, protocol_max=1, engine="hostile", role=Role.OBSERVER)
UNWANTED = Offer(former_boot_id=1, first=0, segment_sizes=b"", is_last=True)


def test_connections_without_hello_hold_next_to_nothing() -> None:
    frame = b"\x02" + (FRAME_BYTES - 1).to_bytes(8, "big") + bytes(FRAME_BYTES - 2)
    with beset() as server:
        before = server.measure_rss_bytes()
        talking = [(server.connect_control(HELLO_GREETING), 0) for _ in range(WITHOUT_HELLO)]
        most = before

        def talk() -> bool:
            nonlocal talking, most
            talked = [(one, sent, say(one, frame[sent:])) for one, sent in talking]
            talking = [(one, sent + more) for one, sent, more in talked if more >= 0 and sent + more < len(frame)]
            most = max(most, server.measure_rss_bytes())
            return not talking

        server.wait(talk)
        server.check()
        assert max(most, server.measure_rss_bytes()) - before < WITHOUT_HELLO * FRAME_BYTES // 8


def test_who_says_no_hello_is_let_go() -> None:
    with beset(hello_s=3.0) as server:
        silent = [server.connect_control(said) for said in (b"", HELLO_GREETING[:9], HELLO_GREETING)]
        server.wait(lambda: all(map(is_let_go, silent)))
        server.check()


def test_who_opens_all_the_connections_there_can_be_ends_nothing() -> None:
    with beset(files=256) as server:
        for connect in (server.connect_control, server.connect_lifeline):
            for _ in range(300):
                connect()
            server.check()
        assert server.count_files() <= 256 - 16


def test_what_is_measured_is_memory() -> None:
    with beset() as server:
        assert MIB < server.measure_rss_bytes() < 1024 * MIB


@pytest.mark.parametrize("message", [OBSERVER, Holding(memories=()), UNWANTED])
def test_copies_of_the_lock_cost_no_descriptors(message: Any) -> None:
    """To close one would drop the lock, so none is taken."""
    with beset() as server:
        assert server.honest.held is not None
        before = server.count_files()
        for _ in range(3):
            server.say_on_lifeline(message, [server.honest.held.lock] * 200)
        server.check()
        # An observer that greets has a lifeline and a pidfd.
        assert server.count_files() <= before + 6


def test_an_offer_that_does_not_end_is_let_go_when_there_is_memory(tmp_path: Path) -> None:
    now_s = 0.0
    settings = CacheSettings(memory_bytes=64 * MIB, segment_bytes=64 * MIB)
    plan = ServerPlan(socket=tmp_path / "s", memory={"": settings}, adopt_wait_s=5)
    server = CacheServer(plan, clock_ns=lambda: int(now_s * 1e9))
    claimant = Claimant(tmp_path / "s", turn=lambda: server.turn(0.001))
    try:
        assert claimant.adopt(100) is AdoptVerdict.WANTED
        before = count_open_files()
        claimant.offer(0, 50, is_last=False)
        while count_open_files() < before + 52:
            server.turn(0.001)
        now_s = 6.0
        while not server.has_memory:
            server.turn(0.001)
        # Memory brings descriptors of its own: lock, index, and what is mapped.
        assert count_open_files() < before + 20
    finally:
        claimant.close()
        server.close()


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="only root can mount, with /dev/fuse")
def test_a_file_whose_file_system_never_answers_is_offered_in_vain(tmp_path: Path) -> None:
    settings = CacheSettings(memory_bytes=64 * MIB, segment_bytes=64 * MIB)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": settings}, adopt_wait_s=600))
    claimant = Claimant(tmp_path / "s", turn=lambda: server.turn(0.001))
    try:
        with silent_file(tmp_path / "silent") as silent:
            file = silent.open()
            assert claimant.adopt(1) is AdoptVerdict.WANTED
            claimant.offer(0, 1, is_last=True, file=file)
            while claimant.adopt(1) is not AdoptVerdict.NOT_USABLE:
                pass
            assert not silent.has_ended, "the server has waited for it"
        with suppress(OSError):  # its file system has ended
            os.close(file)
    finally:
        claimant.close()
        server.close()


@pytest.mark.parametrize("count", [200, 101])
def test_an_offer_of_more_than_was_told_is_of_no_use(tmp_path: Path, count: int) -> None:
    settings = CacheSettings(memory_bytes=64 * MIB, segment_bytes=64 * MIB)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": settings}, adopt_wait_s=600))
    claimant = Claimant(tmp_path / "s", turn=lambda: server.turn(0.001))
    try:
        assert claimant.adopt(100) is AdoptVerdict.WANTED
        before = count_open_files()
        claimant.offer(0, count, is_last=False)
        while claimant.adopt(100) is not AdoptVerdict.NOT_USABLE:
            pass
        while count_open_files() > before:  # another thread than the loop closes them
            server.turn(0.001)
    finally:
        claimant.close()
        server.close()
