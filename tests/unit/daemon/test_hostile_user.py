"""Whoever may open the socket takes neither the server's memory nor its descriptors, and ends nothing."""

from __future__ import annotations

from contextlib import suppress

from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.units import MIB
from tests.unit.daemon.hostile_user import HELLO_GREETING, beset, is_let_go, say

WITHOUT_HELLO = 40


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
    with beset() as server:
        silent = [server.connect_control(said) for said in (b"", HELLO_GREETING[:9], HELLO_GREETING)]
        server.wait(lambda: all(map(is_let_go, silent)))
        server.check()


def test_who_opens_all_the_connections_there_can_be_ends_nothing() -> None:
    with beset(files=256) as server:
        for connect in (server.connect_control, server.connect_lifeline):
            for _ in range(300):
                # The backlog is full for as long as nobody is let in.
                with suppress(OSError):
                    connect()
            server.check()
        assert server.count_files() <= 256 - 16


def test_what_is_measured_is_memory() -> None:
    with beset() as server:
        assert MIB < server.measure_rss_bytes() < 1024 * MIB
