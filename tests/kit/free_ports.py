"""Ports of loopback for servers that are told theirs before they listen."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Returns different ports below those that the kernel gives to connecting sockets: another process's connection
    could take one of these before the test listens there."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    first_given = int(text.split()[0])
    chance = random.SystemRandom()
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            probe = held.enter_context(socket.socket())
            port = chance.randrange(first_given // 2, first_given)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def free_port() -> int:
    return free_ports(1)[0]
