"""The lifeline and the two channels as sockets. The caller holds the link's lock; nothing waits."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvoffload import native
from kvoffload.client.control_end import ControlEnd
from kvoffload.client.link import Link
from kvoffload.errors import PacketError
from kvoffload.packets import PacketSocket
from kvoffload.protocol import Answer, Call, Channel, ProtocolFault, Release
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.wire_codec import CODEC

FRAMES_AT_ONCE = 64
_REASONS = {
    errno.ENOENT: "is not there",
    errno.ECONNREFUSED: "is a socket that a server has left: no process listens on it",
    errno.EAGAIN: "takes no connection now: its server hangs, or very many are before us",
    errno.EPROTOTYPE: "is a socket of another program",
}


class SocketWire:
    """Holds at most one connection of each channel at a time."""

    def __init__(self, path: Path | None) -> None:
        """Takes the server's path. None: the caller finds the path before every `dial`, and sets it."""
        self._is_found = path is None
        self.path = path
        self._lifeline: PacketSocket | None = None
        self._control: ControlEnd | None = None
        self._express: native.ExpressEnd | None = None
        self.on_unsent: Callable[[], None] = lambda: None
        """Called when a send leaves data that waits for a socket: see `files_to_write`."""
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()

    @property
    def lifeline_file(self) -> int:
        """The lifeline's descriptor, for the caller to watch for input; -1: there is none."""
        return -1 if self._lifeline is None else self._lifeline.fileno()

    @property
    def control_file(self) -> int:
        """The control channel's descriptor, for the caller to watch for input; -1: there is none."""
        control = self._control
        return -1 if control is None else control.fileno()

    @property
    def express_file(self) -> int:
        """The express channel's descriptor, for the caller to watch for input; -1: there is none."""
        return -1 if self._express is None else self._express.file()

    @property
    def has_unsent(self) -> bool:
        """Whether the express channel has unsent data."""
        return self._express is not None and self._express.has_unsent()

    @property
    def files_to_write(self) -> list[int]:
        """The descriptors of channels with unsent data. The caller watches them for output, and receives then."""
        control = self._control
        waiting = (
            (self.lifeline_file, self.wants_to_write),
            (self.control_file, control is not None and control.has_unsent),
            (self.express_file, self.has_unsent),
        )
        return [file for file, has_unsent in waiting if has_unsent and file >= 0]

    @property
    def wants_to_write(self) -> bool:
        """Whether a message waits to be written to the lifeline."""
        return bool(self._outbox)

    def dial(self) -> str:
        assert self.path is not None, "a server that has to be found is found before"
        kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        try:
            connecting = socket.socket(socket.AF_UNIX, kind)
        except OSError as fault:
            return f"a connection to the server cannot be opened: {fault.strerror}"
        try:
            connecting.connect(str(self.path))
        except OSError as fault:
            # Also where connect would wait: a server that hangs has a full backlog.
            connecting.close()
            line = explain_unreached(self.path, fault)
            self._forget_path()
            return line
        self._lifeline = PacketSocket(connecting)
        return ""

    def open_control(self, endpoint: str) -> None:
        # If that fails, nothing can be sent, so the link hangs up, and tries again later.
        with contextlib.suppress(OSError):
            self._control = ControlEnd(endpoint)

    def open_express(self, descriptor: int) -> None:
        if self._express is not None:
            self._express.shut()
        self._express = native.open_express_end(end=descriptor, frame_bytes=FRAME_BYTES)

    def send_express(self, call: Call) -> bool:
        if self._express is None:
            return False
        message, number, session, expires_ns = call
        frame = CODEC.encode_call(
            message, number=number, session=session, expires_ns=expires_ns, channel=Channel.EXPRESS
        )
        # A release has no answer: it goes with the next message, or with `receive_all`.
        is_urgent = not isinstance(message, Release)
        is_sent = self._express.send(frame) if is_urgent else self._express.send_later(frame)
        if self._express.has_unsent():
            self.on_unsent()
        return is_sent

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
        is_sent = self._control.send(frame)
        if self._control.has_unsent:
            self.on_unsent()
        return is_sent

    def hang_up(self) -> None:
        self._forget_path()
        self._outbox.clear()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._express is not None:
            # Another thread may be waiting at it; the descriptor is closed with the last reference.
            self._express.shut()
            self._express = None

    def await_answers(self, timeout_s: float, *, with_control: bool = True) -> None:
        """Waits until something may have come on the express channel, or on the control channel if there is no other or
        `with_control` says so; `timeout_s` at most. Needs no lock."""
        # Another thread may have hung up by now, which ends this wait.
        express, control = self._express, self.control_file
        if express is not None and not with_control:
            control = -1
        if express is not None:
            express.wait(control, int(timeout_s * 1e9))
            return
        poller = select.poll()
        if control >= 0:
            poller.register(control, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def receive_all(self, link: Link, now_ns: int) -> None:
        """Hands over what has come on all channels."""
        self.receive_lifeline(link, now_ns)
        self.receive_control(link, now_ns)
        if self._express is not None:
            self._express.flush()
        if not self.receive_answers(link, now_ns):
            link.hang_up(now_ns, "the server has closed the express channel")

    def receive_answers(self, link: Link, now_ns: int) -> bool:
        """Hands over what has come on the control and the express channel. False: the latter has ended."""
        express = self._express
        if express is None or link.lanes.awaits_control:
            self.receive_control(link, now_ns)
        if express is None:
            return True
        frames, goes_on = express.receive()
        for frame in frames:
            if express is not self._express:
                # An earlier frame has ended this channel.
                return True
            answer = CODEC.decode_answer(frame, channel=Channel.EXPRESS)
            if isinstance(answer, Answer):
                link.on_express(answer, now_ns)
            else:
                link.hang_up(now_ns, f"express: {answer.message}")
        return goes_on or express is not self._express

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
                    link.hang_up(now_ns, f"lifeline: {answer.message}")
                    return
                link.on_lifeline(answer, packet.take(), now_ns)
        except PacketError as fault:
            link.hang_up(now_ns, str(fault))

    def receive_control(self, link: Link, now_ns: int) -> None:
        control = self._control
        try:
            for _ in range(FRAMES_AT_ONCE):
                if control is None or control is not self._control:
                    return
                frame = control.receive()
                if frame is None:
                    control.flush()
                    return
                answer = CODEC.decode_answer(frame)
                if isinstance(answer, Answer):
                    link.on_control(answer, now_ns)
                else:
                    link.hang_up(now_ns, f"control: {answer.message}")
        except PacketError as fault:
            # The lifeline may say why.
            self.receive_lifeline(link, now_ns)
            if control is self._control:
                link.hang_up(now_ns, f"control: {fault}")

    def _forget_path(self) -> None:
        """Forgets the path of a server that was found: it may have ended before the next attempt."""
        if self._is_found:
            self.path = None

    def _flush(self) -> bool:
        try:
            while self._outbox and self._lifeline is not None and self._lifeline.send(*self._outbox[0]):
                self._outbox.popleft()
        except PacketError:
            return False
        return True


def explain_unreached(path: Path, fault: OSError) -> str:
    """Returns the reason why a server's socket cannot be reached, as a line for the operator.

    `fault`: the error of the attempt to connect to `path`. Looks at the file system, so the line says what is true now.
    """
    if isinstance(fault, PermissionError):
        with contextlib.suppress(OSError):  # it may be gone by now
            return _explain_refused(path)
    why = _REASONS.get(fault.errno or 0, "cannot be reached: " + (fault.strerror or str(fault)))
    if isinstance(fault, ConnectionRefusedError) and path.exists() and not path.is_socket():
        why = "is no socket"
    return f"{path} {why}"


def _may_pass(folder: Path) -> bool:
    return os.access(folder, os.X_OK, effective_ids=True)


def _explain_refused(path: Path) -> str:
    """Returns the line for a path that this process may not use: names it, or the folder that bars the way."""
    folder = next((one for one in reversed(path.parents) if not _may_pass(one)), None)
    found = (folder or path).stat()
    groups = sorted({os.getegid(), *os.getgroups()})
    own = f"group {groups[0]}" if len(groups) == 1 else f"groups {', '.join(map(str, groups))}"
    return (
        f"{path} may not be used by this process, which is of user {os.geteuid()} and {own}: "
        f"{'it' if folder is None else folder} has mode {stat.S_IMODE(found.st_mode):04o}, user {found.st_uid} and "
        f"group {found.st_gid}"
    )
