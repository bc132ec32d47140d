"""A server in a process of its own, and attacks by a user who may open its socket."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zmq

from kvoffload.packets import PacketSocket
from kvoffload.protocol import (
    CAPABILITIES,
    CODEC,
    Adopt,
    AdoptAnswer,
    AdoptVerdict,
    Answer,
    Channel,
    ClientMessage,
    Counts,
    Greeting,
    Hello,
    Offer,
    Role,
    ServerMessage,
    Stats,
    Welcome,
)
from kvoffload.zmtp import GREETING, pack_command
from tests.kit.children import child
from tests.kit.server.blocks import hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient

TIMEOUT_S = 60.0
READY = pack_command(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
SERVER = """
import resource, sys
from pathlib import Path
from kvoffload.cache import CacheSettings
from kvoffload.server.channels.control import ControlLimits
from kvoffload.server.loop import CacheServer, ServerPlan
files = int(sys.argv[2])
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
memory = CacheSettings(memory_bytes=64 << 20, segment_bytes=64 << 20)
connections = ControlLimits(hello_s=float(sys.argv[3]))
server = CacheServer(ServerPlan(socket=Path(sys.argv[1]), memory={"": memory}, connections=connections))
print("serves", flush=True)
server.run()
"""


class Beset:
    """The server, and a client of it that must not notice."""

    def __init__(self, path: Path, process: subprocess.Popen[str]) -> None:
        self.path, self.process = path, process
        self.honest = RawClient(path, register_of(), engine="honest")
        save(self.honest, hashes_of(3), 1)
        self._opened: list[socket.socket] = []

    def connect_control(self, said: bytes = b"") -> socket.socket:
        """A connection to the control channel, as it is. Nothing waits at it."""
        return self._connect(socket.SOCK_STREAM, self.path.with_name("s.control"), said)

    def connect_lifeline(self) -> socket.socket:
        return self._connect(socket.SOCK_SEQPACKET, self.path)

    def say_on_lifeline(self, message: ClientMessage, descriptors: list[int]) -> None:
        """On the honest client's, or a greeting on one of its own."""
        data = CODEC.encode_call(message, number=1, session=0, channel=Channel.LIFELINE)
        is_greeting = isinstance(message, Greeting)
        end = PacketSocket(self.connect_lifeline()) if is_greeting else self.honest.lifeline
        self.wait(lambda: end.send(data, descriptors))
        if is_greeting:
            self.wait(lambda: end.receive() is not None)

    def close(self) -> None:
        for one in self._opened:
            one.close()
        self.honest.close()

    def check(self) -> None:
        """It lives, and the honest client is served."""
        assert self.process.poll() is None
        answer = self.honest.ask(Stats())
        assert isinstance(answer, Counts), answer
        assert answer.readable == 3

    def wait(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not is_done():
            assert time.monotonic() < end
            self.check()

    def count_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def measure_rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        # Without memory that is shared: the pool's pages come when the pool grows.
        return (int(pages[1]) - int(pages[2])) * resource.getpagesize()

    def _connect(self, kind: int, path: Path, said: bytes = b"") -> socket.socket:
        connected = socket.socket(socket.AF_UNIX, kind)
        self._opened.append(connected)
        connected.setblocking(False)

        def connect() -> bool:
            try:
                connected.connect(str(path))
            except BlockingIOError:
                # The backlog is full: the server has its turn.
                return False
            return True

        self.wait(connect)
        if said:
            connected.sendall(said)
        return connected


class Claimant:
    """A process that says it has an old server's memory. Its descriptors are of no such thing."""

    def __init__(self, path: Path, *, turn: Callable[[], object]) -> None:
        self._turn = turn
        self._numbers = 0
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connected.connect(str(path))
        self._lifeline = PacketSocket(connected)
        welcome = self.greet()
        self._session = welcome.session
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.DEALER)
        self._control.connect(welcome.control)
        self._ask(Hello(protocol_min=1, protocol_max=1, capabilities=tuple(sorted(CAPABILITIES))))

    def greet(self) -> Welcome:
        """Greets on the lifeline, and so waits until everything sent there before has been read."""
        greeting = Greeting(protocol_min=1, protocol_max=1, engine="claimant", role=Role.WORKER)
        pidfd = os.pidfd_open(os.getpid())
        self._tell(greeting, [pidfd])
        os.close(pidfd)
        return self._await_welcome()

    def adopt(self, segments: int, *, boot_id: int = 5) -> AdoptVerdict:
        sizes = np.full(segments, 64 << 20, "<u8").tobytes()
        answer = self._ask(Adopt(former_boot_id=boot_id, index_bytes=4096, segment_sizes=sizes))
        assert isinstance(answer, AdoptAnswer), answer
        return answer.verdict

    def offer(self, first: int, count: int, *, is_last: bool, boot_id: int = 5, file: int | None = None) -> None:
        """Copies of one file."""
        sizes = np.full(count, 64 << 20, "<u8").tobytes()
        made = os.memfd_create("claimed")
        beside = 0 if first else 2
        offer = Offer(former_boot_id=boot_id, first=first, segment_sizes=sizes, is_last=is_last)
        self._tell(offer, [made if file is None else file] * (count + beside))
        os.close(made)

    def close(self) -> None:
        self._lifeline.close()
        self._control.close(0)
        self._context.term()

    def _tell(self, message: ClientMessage, descriptors: list[int]) -> None:
        data = CODEC.encode_call(message, number=1, session=0, channel=Channel.LIFELINE)
        while not self._lifeline.send(data, descriptors):
            self._turn()

    def _await_welcome(self) -> Welcome:
        end = time.monotonic() + TIMEOUT_S
        while (packet := self._lifeline.receive()) is None:
            assert time.monotonic() < end
            self._turn()
        answer = CODEC.decode_answer(packet.data, channel=Channel.LIFELINE)
        assert isinstance(answer, Answer)
        assert isinstance(answer.message, Welcome)
        return answer.message

    def _ask(self, message: ClientMessage) -> ServerMessage:
        self._numbers += 1
        self._control.send(CODEC.encode_call(message, number=self._numbers, session=self._session))
        end = time.monotonic() + TIMEOUT_S
        while not self._control.poll(0):
            assert time.monotonic() < end
            self._turn()
        answer = CODEC.decode_answer(self._control.recv())
        assert isinstance(answer, Answer)
        return answer.message


@contextmanager
def beset(*, files: int = 0, hello_s: float = 10.0) -> Iterator[Beset]:
    """Besets a server. `files`: how many descriptors it may have; 0: as many as we. `hello_s`: how long it waits for a
    hello."""
    with (
        tempfile.TemporaryDirectory() as folder,
        child(["-c", SERVER, f"{folder}/s", str(files), str(hello_s)], says="serves") as process,
    ):
        made = Beset(Path(folder) / "s", process)
        try:
            yield made
        finally:
            made.close()


def is_let_go(connected: socket.socket) -> bool:
    """Reads what has come, too."""
    try:
        while connected.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def say(connected: socket.socket, data: bytes) -> int:
    """Sends as many bytes as are taken. Returns their number; -1: the connection was closed."""
    sent = 0
    try:
        while sent < len(data):
            sent += connected.send(data[sent : sent + (1 << 16)])
    except BlockingIOError:
        pass
    except ConnectionError:
        return -1
    return sent


HELLO_GREETING = GREETING + READY
