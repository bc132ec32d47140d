"""Plays a hostile user of a server, in a process of its own. `python -m tests.kit.hostile.user SOCKET UID`.

It reads commands from its input, a msgpack array each, and answers each by one: `say` messages that were forged, or do
some of everything else that it can (`act`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np
import zmq

from kvoffload.errors import KVOffloadError
from kvoffload.packets import MAX_DESCRIPTORS
from kvoffload.protocol import (
    CODEC,
    MESSAGES,
    Acquire,
    Acquired,
    Answer,
    Channel,
    ClientMessage,
    Credits,
    CreditsGranted,
    Done,
    Error,
    Greeting,
    Hello,
    Mark,
    Register,
    Role,
    Stats,
    Subscribe,
)
from kvoffload.protocol.limits import PACKET_BYTES
from kvoffload.protocol.survey import ListJoined
from tests.kit.hostile.forging import LIVE_LEASES, LIVE_TICKETS, Forged, Known, fill_in, forge_one
from tests.kit.server.blocks import hashes_of, register_of, save
from tests.kit.server.hostile_user import HELLO_GREETING
from tests.kit.server.raw_client import RawClient

SETTLE_S = 0.5
"""Seconds after which a user without an answer joins again: the connection was closed, or its last message was a
farewell."""
HASTE_S = 0.02
"""The same if the user does as much as it can, and the server need not read each message."""
JOIN_S = 60.0
TOGETHER = 10
"""Messages that it sends before it checks whether it is served: the server may end its session for any of them."""
HELD = 400
"""Descriptors that it keeps open at once."""
_F_ADD_SEALS, _F_OFD_SETLK = 1033, 37
_PUNCH_HOLE = 0x03
_LIBC = ctypes.CDLL(None, use_errno=True)


class HostileUser:
    """A user who has joined its own domain, as any user may."""

    def __init__(self, path: Path, known: Known, seed: int, register: Register | None = None) -> None:
        self._path = path
        self._known = known
        self._register = register or register_of(9)
        self._chance = Random(seed)
        self._held: deque[socket.socket] = deque()
        self._engines = 0
        self._numbers = self._one_way = 0
        """Of requests on both channels, and of one-way messages on the control channel."""
        self.joined = self.served = self.refused = 0
        """How often it has joined, and how many answers were none of an error, or of one."""
        self.client: RawClient | None = None
        self._express: socket.socket | None = None
        self._chain = hashes_of(4, seed=os.getuid())
        self._live: dict[int, int] = {}
        self.join()
        assert self.client is not None
        with contextlib.suppress(KVOffloadError):
            # Another process of this user may have taken all of its domain's room.
            save(self.client, self._chain, 7)
        self.live_on()

    def join(self) -> None:
        """Joins, again and again until the server takes it. What it held before it lets go."""
        end = time.monotonic() + JOIN_S
        while True:
            self.leave()
            try:
                client = self.client = RawClient(self._path, self._register, engine=f"hostile {os.getpid()}")
                # Its end goes with the peer.
                peer = client.express
                self._express = socket.socket(fileno=os.dup(peer.fileno()))
                self._express.setblocking(False)
            except (AssertionError, KVOffloadError, OSError) as fault:
                # Its leases and slots count until the server has seen that it is gone.
                if time.monotonic() > end:
                    raise AssertionError("the server admits no process any more") from fault
                continue
            self._numbers, self._one_way = 1000, 0
            self.joined += 1
            return

    def live_on(self) -> None:
        """Asks for tickets and leases, as any user may, and takes as many as it is given."""
        while True:
            try:
                self._ask_for_some()
            except AssertionError:
                # The last message on the lifeline was a farewell, or another greeting.
                self.join()
            else:
                return

    def _ask_for_some(self) -> None:
        assert self.client is not None
        name_space = self.client.name_space
        granted = self.client.ask(Credits(name_space=name_space, group=0, count=len(LIVE_TICKETS)))
        if isinstance(granted, CreditsGranted):
            self._live |= dict(zip(LIVE_TICKETS, np.frombuffer(granted.tickets, "<u8").tolist(), strict=False))
        for lease in LIVE_LEASES:
            acquired = self.client.ask(Acquire(name_space=name_space, chain=self._chain))
            if isinstance(acquired, Acquired):
                self._live[lease] = acquired.lease

    def leave(self) -> None:
        if self._express is not None:
            self._express.close()
            self._express = None
        if self.client is not None:
            self.client.close()
            self.client = None

    # ---- forged messages ----

    def say(self, channel: str, forged: Forged) -> None:
        assert self.client is not None
        self._numbers += 1
        number = self._numbers
        if forged.is_one_way:
            number = self.client.express.draw_one_way() if channel == "express" else self._draw_one_way()
        forged = replace(forged, fields=fill_in(forged.fields, self._live))
        frame = forged.pack(number=number, session=self.client.session)
        if channel == "lifeline":
            self._say_on_lifeline(frame)
        elif channel == "express":
            with contextlib.suppress(OSError):
                assert self._express is not None
                self._send_all(self._express, struct.pack("<I", len(frame)) + frame)
        else:
            assert self.client.control is not None
            with contextlib.suppress(zmq.Again):
                self.client.control.send(frame, zmq.NOBLOCK)

    def _draw_one_way(self) -> int:
        self._one_way += 1
        return self._one_way

    def settle(self, wait_s: float = SETTLE_S) -> None:
        """Returns when the server has read all messages. If it reads none any more, the user joins again first."""
        assert self.client is not None
        for channel in ("control", "express"):
            if not self._is_heard(channel, wait_s):
                self.join()
                return
        with contextlib.suppress(KVOffloadError, AssertionError):
            while self.client.lifeline.receive() is not None:
                pass
            return
        self.join()

    def _is_heard(self, channel: str, wait_s: float) -> bool:
        """Returns whether the server still answers on this channel."""
        assert self.client is not None
        assert self.client.control is not None
        self._numbers += 1
        frame = CODEC.encode_call(Mark(), number=self._numbers, session=self.client.session)
        end = time.monotonic() + wait_s
        if channel == "control":
            control = self.client.control
            control.send(frame)
            while control.poll(max(0, int((end - time.monotonic()) * 1000))):
                answer = CODEC.decode_answer(control.recv())
                assert isinstance(answer, Answer), answer
                if answer.number == self._numbers:
                    return isinstance(answer.message, Done)
                self._count(answer)
            return False
        assert self._express is not None
        heard = b""
        with contextlib.suppress(OSError):
            self._send_all(self._express, struct.pack("<I", len(frame)) + frame)
            self._express.settimeout(wait_s)
            while True:
                while len(heard) >= 4 and len(heard) >= 4 + (size := int.from_bytes(heard[:4], "little")):
                    answer = CODEC.decode_answer(heard[4 : 4 + size], channel=Channel.EXPRESS)
                    assert isinstance(answer, Answer), answer
                    heard = heard[4 + size :]
                    if answer.number == self._numbers:
                        self._express.setblocking(False)
                        return isinstance(answer.message, Done)
                    self._count(answer)
                more = self._express.recv(1 << 16)
                if not more:
                    return False
                heard += more
        return False

    def _count(self, answer: Answer) -> None:
        self.refused += isinstance(answer.message, Error)
        self.served += not isinstance(answer.message, Error)

    def _send_all(self, connected: socket.socket, data: bytes) -> None:
        """Sends as much as is taken: who does not read is read no further here, either."""
        left = memoryview(data)
        connected.settimeout(SETTLE_S)
        while left:
            left = left[connected.send(left) :]

    def _say_on_lifeline(self, frame: bytes) -> None:
        """Sends a frame on a new lifeline, or on the user's own, with descriptors of all kinds."""
        assert self.client is not None
        if len(frame) > PACKET_BYTES:
            return
        with contextlib.suppress(OSError, KVOffloadError), self._descriptors() as descriptors:
            if self._chance.random() < 0.1:
                self.client.lifeline.send(frame, descriptors)
                return
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connected:
                connected.settimeout(SETTLE_S)
                connected.connect(str(self._path))
                if self._chance.random() < 0.5:
                    self._greet(connected)
                socket.send_fds(connected, [frame], descriptors)

    @contextlib.contextmanager
    def _descriptors(self) -> Iterator[list[int]]:
        """Some that go with a packet."""
        assert self.client is not None
        assert self.client.held is not None
        held = self.client.held
        own = os.pidfd_open(os.getpid())
        made = os.memfd_create("kvoffload-index")
        os.ftruncate(made, 1 << 20)
        try:
            yield self._chance.choice(
                [
                    [],
                    [own],
                    [own, own],
                    [made],
                    [held.lock],
                    [held.lock, held.index, *held.segments],
                    [held.index] * 3,
                    [made] * 3,
                    [held.lock] * MAX_DESCRIPTORS,
                    [0],
                ]
            )
        finally:
            os.close(own)
            os.close(made)

    # ---- everything else ----

    def act(self, wanted: list[str]) -> dict[str, Any]:
        """Some of each of these; how much of it was done."""
        acts: dict[str, Callable[[], Any]] = {
            "forge": self._forge,
            "write": self._write_everywhere,
            "hold": self._hold,
            "read nothing": self._read_nothing,
            "greet": self._greet_again,
        }
        return {name: acts[name]() for name in wanted or acts}

    def compute(self) -> int:
        """Keeps a processor busy, as any user may."""
        return sum(range(100_000))

    def _forge(self) -> int:
        for _ in range(20):
            self.say(self._chance.choice(["control", "express", "lifeline"]), self._forge_one())
        self.settle(HASTE_S)
        return 20

    def _forge_one(self) -> Forged:
        return forge_one(MESSAGES, self._known, self._chance)

    def _write_everywhere(self) -> dict[str, int]:
        """Into all memory that this process was given, by every way that there is; how many ways went, by its name."""
        went: dict[str, int] = {}
        for number in os.listdir("/proc/self/fd"):
            try:
                file, name = int(number), os.readlink(f"/proc/self/fd/{number}")
                size = os.fstat(file).st_size
            except OSError:
                continue
            if not name.startswith("/memfd:"):
                continue
            name = name.removeprefix("/memfd:").split(" ")[0]
            went.setdefault(name, 0)
            for write in self._ways_to_write(file, size):
                with contextlib.suppress(OSError, ValueError):
                    write()
                    went[name] += 1
            for hold in self._ways_to_hold(file):
                with contextlib.suppress(OSError):
                    hold()
        return went

    def _ways_to_write(self, file: int, size: int) -> list[Callable[[], object]]:
        rubbish = self._chance.randbytes(1 << 16)

        def write_mapped(opened: int) -> None:
            with mmap.mmap(opened, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
                for at in range(0, size, 1 << 20):
                    mapped[at : at + len(rubbish)] = rubbish[: min(len(rubbish), size - at)]

        def write_reopened() -> None:
            again = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
            try:
                write_mapped(again)
            finally:
                os.close(again)

        def punch() -> None:
            if _LIBC.fallocate(file, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(1 << 20)):
                raise OSError(ctypes.get_errno(), "fallocate")

        return [
            lambda: write_mapped(file),
            write_reopened,
            lambda: os.pwrite(file, rubbish, 0),
            lambda: os.ftruncate(file, 0),
            lambda: os.ftruncate(file, size * 2 + 4096),
            punch,
            lambda: os.fchmod(file, 0o777),
            lambda: os.fchown(file, os.getuid(), os.getgid()),
        ]

    def _ways_to_hold(self, file: int) -> list[Callable[[], object]]:
        """Returns calls that hold or spoil something that the server needs."""
        wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return [
            lambda: fcntl.fcntl(file, _F_OFD_SETLK, wanted),
            lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
            lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK),
            *(
                lambda seal=seal: fcntl.fcntl(file, _F_ADD_SEALS, seal)  # type: ignore[misc]
                for seal in (1, 2, 4, 8, 16)
            ),
        ]

    def _hold(self) -> int:
        """Connections that are never used, with descriptors that are never taken."""
        held = 0
        for at in range(20):
            kind = socket.SOCK_STREAM if at % 2 else socket.SOCK_SEQPACKET
            path = self._path.with_name("s.control") if at % 2 else self._path
            connected = self._connect(kind, path)
            if connected is None:
                continue
            with contextlib.suppress(OSError), self._descriptors() as descriptors:
                socket.send_fds(connected, [b"\xff"], descriptors)
                held += 1
            self._keep(connected)
        return held

    def _read_nothing(self) -> int:
        """Asks for as much as it may, on connections from which it reads nothing."""
        assert self.client is not None
        connected = self._connect(socket.SOCK_STREAM, self._path.with_name("s.control"))
        if connected is None:
            return 0
        hello = Hello(protocol_min=1, protocol_max=1, capabilities=("events",))
        asked: list[ClientMessage] = [Subscribe(), ListJoined(), Stats()]
        asked += [Stats()] * 100
        said = HELLO_GREETING
        for number, message in enumerate((hello, *asked), 1):
            frame = CODEC.encode_call(message, number=number, session=self.client.session)
            said += b"\x02" + len(frame).to_bytes(8, "big") + frame
        with contextlib.suppress(OSError):
            self._send_all(connected, said)
        self._keep(connected)
        return len(asked)

    def _greet_again(self) -> int:
        """Greets again as ever new engines, in one process."""
        greeted = 0
        for _ in range(20):
            connected = self._connect(socket.SOCK_SEQPACKET, self._path)
            if connected is None:
                continue
            with contextlib.suppress(OSError):
                self._greet(connected)
                greeted += 1
            self._keep(connected)
        return greeted

    def _greet(self, connected: socket.socket) -> None:
        self._engines += 1
        greeting = Greeting(
            protocol_min=1,
            protocol_max=1,
            engine=f"another {self._engines}",
            role=self._chance.choice(list(Role)),
            former_session=self._chance.choice([0, *self._known.numbers]),
            former_boot_id=self._chance.choice([0, *self._known.numbers]),
            wants_express=True,
        )
        pidfd = os.pidfd_open(os.getpid())
        try:
            frame = CODEC.encode_call(greeting, number=1, channel=Channel.LIFELINE)
            socket.send_fds(connected, [frame], [pidfd])
        finally:
            os.close(pidfd)

    def _connect(self, kind: int, path: Path) -> socket.socket | None:
        """Connects. None: the server takes no more of them now."""
        connected = socket.socket(socket.AF_UNIX, kind)
        connected.settimeout(SETTLE_S)
        try:
            connected.connect(str(path))
        except OSError as fault:
            connected.close()
            if fault.errno in (errno.ENOENT, errno.ECONNREFUSED):
                raise
            return None
        return connected

    def _keep(self, connected: socket.socket) -> None:
        self._held.append(connected)
        while len(self._held) > HELD:
            self._held.popleft().close()


def main() -> None:
    path, uid = Path(sys.argv[1]), int(sys.argv[2])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    commands = iter(_read_commands())
    numbers, hashes, names, fields = next(commands)
    user = HostileUser(path, Known(numbers=numbers, hashes=hashes, names=names, fields=fields), seed=uid)
    assert user.client is not None
    assert user.client.joining.welcome is not None
    welcome = user.client.joining.welcome
    answer({"session": welcome.session, "domain": welcome.domain, "name_space": user.client.name_space}, user.joined)
    for verb, given in commands:
        if verb == "say":
            user.served = user.refused = 0
            for at, (channel, *parts) in enumerate(given, 1):
                what, op, is_one_way, fields, head = parts
                user.say(channel, Forged(what=what, op=op, is_one_way=is_one_way, fields=fields, head=head))
                if at % TOGETHER == 0 or at == len(given):
                    user.settle()
                    user.live_on()
            found: dict[str, Any] = {"served": user.served, "refused": user.refused}
        elif verb == "compute":
            found = {"compute": user.compute()}
        else:
            found = user.act(list(given))
        answer(found, user.joined)


def _read_commands() -> Iterator[Any]:
    unpacker = msgpack.Unpacker(use_list=False, strict_map_key=False, max_buffer_size=1 << 30)
    while data := os.read(0, 1 << 20):
        unpacker.feed(data)
        yield from unpacker


def answer(found: dict[str, Any], joined: int) -> None:
    sys.stdout.buffer.write(msgpack.packb((found, joined)))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
