"""The two channels as sockets. Used by whoever holds the link's lock; nothing waits."""

from __future__ import annotations

import select
import socket
from collections import deque
from pathlib import Path

import zmq

from kvoffload.client.link import Link
from kvoffload.errors import PacketError
from kvoffload.packets import PacketSocket
from kvoffload.protocol import Answer, Call, Channel, ProtocolFault
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.wire_codec import CODEC

QUEUED_FRAMES = 4096
"""That the server has not taken. Beyond it the connection is given up."""
FRAMES_AT_ONCE = 64
_READABLE = int(zmq.POLLIN)


class SocketWire:
    """One at a time of each channel."""

    def __init__(self, path: Path | None) -> None:
        """None: it is to be found before every `dial`, and set."""
        self._is_found = path is None
        self.path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._lifeline: PacketSocket | None = None
        self._control: zmq.Socket[bytes] | None = None
        self._control_file = -1
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()

    @property
    def lifeline_file(self) -> int:
        """To be watched for input; -1: there is none."""
        return -1 if self._lifeline is None else self._lifeline.fileno()

    @property
    def control_file(self) -> int:
        """Readable once when something came, after all that came before was read; -1: there is none."""
        return self._control_file

    @property
    def wants_to_write(self) -> bool:
        """To the lifeline."""
        return bool(self._outbox)

    @property
    def needs_path(self) -> bool:
        return self.path is None

    def dial(self) -> bool:
        if self.path is None:
            return False
        kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        connecting = socket.socket(socket.AF_UNIX, kind)
        try:
            connecting.connect(str(self.path))
        except OSError:
            # Also where connect would wait: a server that hangs has a full backlog.
            connecting.close()
            self._forget_path()
            return False
        self._lifeline = PacketSocket(connecting)
        return True

    def open_control(self, endpoint: str) -> None:
        control: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        control.setsockopt(zmq.LINGER, 0)
        control.setsockopt(zmq.SNDHWM, QUEUED_FRAMES)
        control.setsockopt(zmq.RCVHWM, QUEUED_FRAMES)
        control.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
        # What was meant for a server is not delivered to the next one.
        control.setsockopt(zmq.RECONNECT_IVL, -1)
        control.connect(endpoint)
        self._control = control
        self._control_file = control.fileno()

    def send_lifeline(self, call: Call, descriptors: tuple[int, ...]) -> bool:
        data = CODEC.encode_call(
            call.message,
            number=call.number,
            session=call.session,
            expires_ns=call.expires_ns,
            channel=Channel.LIFELINE,
        )
        self._outbox.append((data, descriptors))
        return self._flush()

    def send_control(self, call: Call) -> bool:
        if self._control is None:
            return False
        message, number, session, expires_ns = call
        frame = CODEC.encode_call(message, number=number, session=session, expires_ns=expires_ns)
        try:
            self._control.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def hang_up(self) -> None:
        self._forget_path()
        self._outbox.clear()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if self._control is not None:
            self._control.close(0)
            self._control = None
            self._control_file = -1

    def close(self) -> None:
        self.hang_up()
        self._context.term()

    def await_control(self, timeout_s: float) -> None:
        """Until something may have come on the control channel."""
        poller = select.poll()
        if self._control is not None:
            poller.register(self._control_file, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def receive_all(self, link: Link, now_ns: int) -> None:
        """Hands over what has come on both channels."""
        self.receive_lifeline(link, now_ns)
        self.receive_control(link, now_ns)

    def receive_lifeline(self, link: Link, now_ns: int) -> None:
        lifeline = self._lifeline
        try:
            while lifeline is not None and lifeline is self._lifeline:
                self._flush()
                packet = lifeline.receive()
                if packet is None:
                    return
                answer = CODEC.decode_answer(packet.data, channel=Channel.LIFELINE)
                if isinstance(answer, ProtocolFault):
                    packet.close()
                    link.on_hang_up(now_ns, f"lifeline: {answer.message}")
                    return
                link.on_lifeline(answer, packet.take(), now_ns)
        except PacketError as fault:
            link.on_hang_up(now_ns, str(fault))

    def receive_control(self, link: Link, now_ns: int) -> None:
        control = self._control
        for _ in range(FRAMES_AT_ONCE):
            # To ask is cheaper than the exception of a `recv` that finds nothing.
            if control is None or control is not self._control or not _is_readable(control):
                return
            try:
                frame = control.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            answer = CODEC.decode_answer(frame)
            if isinstance(answer, Answer):
                link.on_control(answer, now_ns)
            else:
                link.on_hang_up(now_ns, f"control: {answer.message}")

    def _forget_path(self) -> None:
        """A server that was found may end between that and the next attempt."""
        if self._is_found:
            self.path = None

    def _flush(self) -> bool:
        try:
            while self._outbox and self._lifeline is not None and self._lifeline.send(*self._outbox[0]):
                self._outbox.popleft()
        except PacketError:
            return False
        return True


def _is_readable(control: zmq.Socket[bytes]) -> bool:
    events = control.get(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & _READABLE)
