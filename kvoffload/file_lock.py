"""A lock on a file that is there for nothing else: the kernel gives it back however its owner ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Self

_RETRY_S = 0.01


class FileLock:
    """Held until `close` or `remove`, or the end of the last process that has a copy of its descriptor."""

    def __init__(self, path: Path, file: int) -> None:
        """Takes the descriptor, which has the lock. `take` makes one."""
        self.path = path
        self._file = file

    @classmethod
    def take(cls, path: Path, *, wait_s: float = 0.0) -> Self | None:
        """Takes a lock. None: another process or descriptor has had it for all of `wait_s`. OSError: there can be no
        such file."""
        until = time.monotonic() + wait_s
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                if time.monotonic() >= until:
                    return None
                time.sleep(_RETRY_S)
                continue
            except BaseException:
                os.close(file)
                raise
            # Its last owner may have removed it between the two calls: then this is the lock of nothing.
            if os.fstat(file).st_nlink > 0:
                return cls(path, file)
            os.close(file)

    def fileno(self) -> int:
        return self._file

    def leave(self) -> None:
        """Closes this descriptor and leaves the lock to processes that have a copy of it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def close(self) -> None:
        """Releases the lock, even if others have a copy of the descriptor; the file stays."""
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self.leave()

    def remove(self) -> None:
        """Closes it, and no file stays."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self.close()
