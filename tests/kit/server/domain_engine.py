"""A process of some user that joins a server, and then tries what it may not. `python domain_engine.py SOCKET UID`.

It prints one JSON line of what it was given, reads one of what another domain has, and prints what it got of that.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
from typing import Any

import numpy as np
import zmq

from kvoffload.packets import PacketSocket
from kvoffload.protocol import (
    CODEC,
    Acquire,
    Acquired,
    Answer,
    Channel,
    Error,
    Greeting,
    Hello,
    Role,
    ServerMessage,
    Stats,
    Welcome,
)
from tests.kit.server.blocks import hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient


def open_inodes() -> list[int]:
    """Lists the inode of every descriptor that this process has of any memory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(os.stat(f"/proc/self/fd/{name}").st_ino)
        except OSError:
            continue
    return sorted(set(found))


def count_writable_indexes() -> int:
    """Counts descriptors of an index through which this process can write to it, or may open it for writing."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        with contextlib.suppress(OSError):
            if "memfd:kvoffload-index" not in os.readlink(path):
                continue
            with contextlib.suppress(OSError):
                mmap.mmap(int(name), 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()
                found += 1
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDWR))
                found += 1
            assert mmap.mmap(int(name), 4096, mmap.MAP_SHARED, mmap.PROT_READ)[:6] == b"KVOIND"
    return found


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def describe(answer: ServerMessage) -> str:
    return f"{answer.code.name}: {answer.message}" if isinstance(answer, Error) else type(answer).__name__


def greet(path: str, **settings: Any) -> ServerMessage:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connected.connect(path)
    end = PacketSocket(connected)
    greeting = Greeting(protocol_min=1, protocol_max=1, engine="engine", role=Role.WORKER, **settings)
    pidfd = os.pidfd_open(os.getpid())
    assert end.send(CODEC.encode_call(greeting, number=1, channel=Channel.LIFELINE), [pidfd])
    packet = None
    while packet is None:
        packet = end.receive()
    answer = CODEC.decode_answer(packet.data, channel=Channel.LIFELINE)
    assert isinstance(answer, Answer)
    end.close()
    return answer.message


def hello(endpoint: str, session: int) -> ServerMessage:
    with zmq.Context() as context, context.socket(zmq.DEALER) as control:
        control.setsockopt(zmq.LINGER, 0)
        control.connect(endpoint)
        control.send(CODEC.encode_call(Hello(protocol_min=1, protocol_max=1), number=1, session=session))
        answer = CODEC.decode_answer(control.recv())
    assert isinstance(answer, Answer)
    return answer.message


def main() -> None:
    path, uid = sys.argv[1], int(sys.argv[2])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    refused = greet(path)
    if isinstance(refused, Error):
        say({"refused": describe(refused), "inodes": open_inodes()})
        return
    client = RawClient(path, register_of(), engine="joined")
    assert client.joining.welcome is not None
    save(client, hashes_of(4, seed=uid), uid % 251)
    say({"domain": client.joining.welcome.domain, "session": client.session, "inodes": open_inodes()})
    other = json.loads(sys.stdin.readline())
    reopened = greet(path, former_session=other["session"], former_boot_id=other["boot_id"])
    assert isinstance(reopened, Welcome)
    found = client.ask(Acquire(name_space=client.name_space, chain=hashes_of(4, seed=other["uid"])))
    own = client.ask(Acquire(name_space=client.name_space, chain=hashes_of(4, seed=uid)))
    assert isinstance(found, Acquired)
    assert isinstance(own, Acquired)
    (address, *_) = np.frombuffer(own.groups[0].addresses, "<u8").tolist()
    say(
        {
            "its domain": describe(greet(path, domain=other["domain"])),
            "its session": describe(hello(client.joining.welcome.control, other["session"])),
            "its session, on my connection": describe(ask_as(client, other["session"])),
            "its session, reopened": reopened.is_reopened or reopened.session == other["session"],
            "its blocks": found.outcome.name,
            "its blocks in my index": bool(client.index.lookup(client.name_space, 0, hashes_of(4, other["uid"])).any()),
            "my blocks": own.outcome.name,
            "my bytes": sorted(set(client.segments.view(address, 4096).tolist())),
            "inodes": open_inodes(),
            "indexes to write to": count_writable_indexes(),
        }
    )
    sys.stdin.read()


def ask_as(client: RawClient, session: int) -> ServerMessage:
    assert client.control is not None
    client.control.send(CODEC.encode_call(Stats(), number=99, session=session))
    return client.receive(99)


if __name__ == "__main__":
    main()
