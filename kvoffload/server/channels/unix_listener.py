"""A Unix socket that one server listens on: made with its mode, told apart from one that a dead server left."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvoffload.errors import ConfigError
from kvoffload.file_lock import FileLock
from kvoffload.packets import accept_open, shut

BACKLOG = 1024


class UnixListener:
    """Holds the path for as long as it is open, by a lock on a neighbouring file. The kernel frees the lock however the
    process ends, so a socket whose lock is free was left by a dead server."""

    def __init__(self, path: Path, *, mode: int = 0o600, group: int | None = None, wait_s: float = 0.0) -> None:
        """Listens at a path. ConfigError: the path cannot be used, or another server has it, and had it for all the
        time waited."""
        self.path = path
        self._lock = _take_lock(path, wait_s)
        try:
            self._socket = _listen(path, mode, group)
        except BaseException:
            self._lock.remove()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def lock_file(self) -> int:
        """Descriptor of the lock file. What this server writes into the file is there for the next one, unless `close`
        removes it."""
        return self._lock.fileno()

    def accept(self) -> socket.socket | None:
        """Returns the next connection that is still open; None: there is none for now. OSError: this process has no
        descriptor left for it."""
        return accept_open(self._socket)

    def stop(self, close: Callable[[int], object] = os.close) -> None:
        """Stops listening and removes the path, so that clients no longer find it. Accepted connections stay open, and
        the lock on the path stays held. `close` gets the socket's descriptor. To close it may take as long as those
        like who wait to be let in, because what they have sent is let go of."""
        if self._socket.fileno() != -1:
            with contextlib.suppress(OSError):
                self.path.unlink()
            shut(self._socket)
            close(self._socket.detach())

    def close(self, *, keeps_lock_file: bool = False) -> None:
        """Frees the path for another server."""
        self.stop()
        if keeps_lock_file:
            self._lock.close()
        else:
            self._lock.remove()


def _take_lock(path: Path, wait_s: float) -> FileLock:
    try:
        lock = FileLock.take(path.with_name(path.name + ".lock"), wait_s=wait_s)
    except OSError as fault:
        raise _refuse(path, f"cannot be used: {fault.strerror}", "name a folder that this user may write") from fault
    if lock is None:
        raise _refuse(path, "is another server's", "end that one, or choose another path")
    return lock


def _listen(path: Path, mode: int, group: int | None) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    # The socket has its mode from the beginning, not from a moment later on.
    former = os.umask(0o777 & ~mode)
    try:
        if path.is_socket():
            path.unlink()
        made.bind(str(path))
        if group is not None:
            _give_to_group(path, group)
        made.listen(BACKLOG)
    except ConfigError:
        made.close()
        raise
    except OSError as fault:
        made.close()
        taken = fault.errno == errno.EADDRINUSE
        reason = "is no socket" if taken else f"cannot be used: {fault.strerror or fault}"
        raise _refuse(path, reason, "choose another path of at most 107 bytes") from fault
    finally:
        os.umask(former)
    return made


def _give_to_group(path: Path, group: int) -> None:
    try:
        os.chown(path, -1, group)
    except OSError as fault:
        path.unlink()
        reason = f"cannot be given to group {group}: {fault.strerror}"
        raise _refuse(path, reason, "name a group that the server's user is in") from fault


def _refuse(path: Path, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"socket {path} {reason}", remedy=remedy, path=str(path))
