"""An event loop with the lifelines of a server, and processes at their other ends."""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path

from kvoffload.packets import Credentials, PacketSocket, close_all
from kvoffload.protocol import (
    CODEC,
    Answer,
    Call,
    Channel,
    ClientMessage,
    Farewell,
    Greeting,
    Holding,
    Offer,
    Role,
    Welcome,
)
from kvoffload.server.channels.foreign_files import ForeignFiles
from kvoffload.server.channels.lifelines import Lifelines
from kvoffload.server.channels.unix_listener import UnixListener

BOOT_ID = 77
TIMEOUT_S = 30.0
GREETING = Greeting(protocol_min=1, protocol_max=1, engine="engine", role=Role.WORKER, rank=3)
WELCOME = Welcome(protocol=1, session=5, domain="", control="ipc:///x")


class Loop:
    """The smallest event loop there is; it is also the handler, and notes what it is told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: list[tuple[object, ...]] = []
        self.wants = True
        self.uid = os.getuid()
        self.waits: dict[int, bool] = {}
        self.listener = UnixListener(path)
        self.files = ForeignFiles()
        self.takes_s = 0.0
        """How long each look at the clock takes."""
        self._now_s = 0.0
        self.lines = Lifelines(self.listener, self, self, boot_id=BOOT_ID, files=self.files, clock_s=self._read_clock)

    def _read_clock(self) -> float:
        self._now_s += self.takes_s
        return self._now_s

    def watch(self, file: int, *, writes: bool) -> None:
        self.waits[file] = writes

    def unwatch(self, file: int) -> None:
        del self.waits[file]

    def on_greeting(self, lifeline: int, call: Call, credentials: Credentials, pidfd: int | None) -> None:
        assert credentials == Credentials(os.getpid(), self.uid, os.getgid())
        assert pidfd is not None
        assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        os.close(pidfd)
        self.told.append(("greeting", lifeline, call.message))
        self.lines.send_reply(lifeline, WELCOME, call.number)

    def wants_offer(self, lifeline: int, offer: Offer) -> bool:
        return self.wants

    def on_offer(self, lifeline: int, offer: Offer, descriptors: list[int]) -> None:
        self.told.append(("offer", lifeline, offer, len(descriptors)))
        close_all(descriptors)

    def on_holding(self, lifeline: int, holding: Holding) -> None:
        self.told.append(("holding", lifeline, holding))

    def on_farewell(self, lifeline: int, farewell: Farewell) -> None:
        self.told.append(("farewell", lifeline, farewell))

    def on_end(self, lifeline: int) -> None:
        self.told.append(("end", lifeline))

    def turn(self) -> None:
        reads, writes, _ = select.select(list(self.waits), [f for f, writes in self.waits.items() if writes], [], 0.01)
        for file in {*reads, *writes}:
            if file in self.waits:
                assert self.lines.on_ready(file, reads=file in reads, writes=file in writes)

    def end_files(self) -> None:
        """Waits until all descriptors of processes are closed."""
        while not self.files.is_idle:
            time.sleep(0.001)
        self.files.close()

    def turn_until(self, count: int) -> None:
        end = time.monotonic() + TIMEOUT_S
        while len(self.told) < count:
            assert time.monotonic() < end, self.told
            self.turn()


class Process:
    """A client's end of a lifeline."""

    def __init__(self, loop: Loop) -> None:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connected.connect(str(loop.path))
        self.end = PacketSocket(connected)
        self._loop = loop
        self._number = 0

    def send(self, message: ClientMessage, descriptors: tuple[int, ...] = ()) -> None:
        self._number += 1
        data = CODEC.encode_call(message, number=self._number, channel=Channel.LIFELINE)
        assert self.end.send(data, descriptors)

    def receive(self) -> tuple[Answer, list[int]]:
        end = time.monotonic() + TIMEOUT_S
        while True:
            packet = self.end.receive()
            if packet is not None:
                answer = CODEC.decode_answer(packet.data, channel=Channel.LIFELINE)
                assert isinstance(answer, Answer)
                assert answer.boot_id == BOOT_ID
                return answer, packet.take()
            assert time.monotonic() < end
            self._loop.turn()

    def greet(self) -> None:
        pidfd = os.pidfd_open(os.getpid())
        self.send(GREETING, (pidfd,))
        os.close(pidfd)
        answer, _ = self.receive()
        assert answer.message == WELCOME

    def is_ended(self) -> bool:
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            self._loop.turn()
            try:
                if self.end.receive() is not None:
                    continue
            except Exception:  # noqa: BLE001  (of whatever kind: it is over)
                return True
        return False
