"""A Unix socket that one server listens on: made with its mode, told apart from one that a dead server left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from kvoffload.errors import ConfigError

BACKLOG = 128


class UnixListener:
    """Holds the path for as long as it is open, by a lock on a file beside it, which the kernel gives back however the
    process ends. So a socket that is there while the lock is free is a dead server's.
    """

    def __init__(self, path: Path, *, mode: int = 0o600, group: int | None = None) -> None:
        """ConfigError: the path cannot be used, or another server has it."""
        self.path = path
        self._lock = _open_lock(path)
        try:
            self._socket = _listen(path, mode, group)
        except BaseException:
            os.close(self._lock)
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """The next connection; None: there is none. OSError: this process has no descriptor left for it."""
        try:
            connected, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        return connected

    def close(self) -> None:
        """Nobody finds it any more. What was accepted stays."""
        if self._socket.fileno() == -1:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._socket.close()
        with contextlib.suppress(OSError):
            _lock_path(self.path).unlink()
        os.close(self._lock)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _open_lock(path: Path) -> int:
    while True:
        try:
            lock = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as fault:
            raise _refuse(
                path, f"cannot be used: {fault.strerror}", "name a folder that this user may write"
            ) from fault
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last owner may have unlinked it between the two calls: then this is the lock of nothing.
            if os.fstat(lock).st_nlink > 0:
                return lock
        except OSError as fault:
            os.close(lock)
            raise _refuse(path, "is another server's", "end that one, or choose another path") from fault
        os.close(lock)


def _listen(path: Path, mode: int, group: int | None) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    # The socket has its mode from the beginning, not from a moment later on.
    former = os.umask(0o777 & ~mode)
    try:
        if path.is_socket():
            path.unlink()
        made.bind(str(path))
        if group is not None:
            os.chown(path, -1, group)
        made.listen(BACKLOG)
    except OSError as fault:
        made.close()
        taken = fault.errno == errno.EADDRINUSE
        reason = "is no socket" if taken else f"cannot be used: {fault.strerror or fault}"
        raise _refuse(path, reason, "choose another path of at most 107 bytes") from fault
    finally:
        os.umask(former)
    return made


def _refuse(path: Path, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"socket {path} {reason}", remedy=remedy, path=str(path))
