"""The end of a process's connection that is not the process's end."""

from __future__ import annotations

import time

from kvoffload.client.link import SECOND_NS, Link
from kvoffload.client.terms import LinkState
from kvoffload.client.wire import SocketWire
from kvoffload.protocol import Bye

WAIT_S = 0.2


def part(link: Link, wire: SocketWire) -> None:
    """Sees to it that everything sent arrives: the last messages are told apart from lost ones. Bounded."""
    if link.state is not LinkState.SERVING:
        return
    wait_ns = int(WAIT_S * SECOND_NS)
    pending = link.ask(Bye(one_way_count=link.one_way_count), time.monotonic_ns(), wait_ns)
    while not pending.is_over:
        wire.await_control(0.001)
        now_ns = time.monotonic_ns()
        wire.receive_control(link, now_ns)
        link.on_time(now_ns)
