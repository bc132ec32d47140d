"""A private server's own life: when it ends, so that nobody who looks for it is lost, and which files go with it."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass

from kvoffload.file_lock import FileLock
from kvoffload.private_files import PrivateFiles
from kvoffload.server.ending import Ending, EndingTerms

logger = logging.getLogger(__name__)

LOG_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PrivateTerms:
    """What makes a server a private one."""

    files: PrivateFiles
    ending: EndingTerms


class PrivateLife:
    """Belongs to the thread of the event loop.

    Whoever does not reach the server takes the start lock, tries again, and starts one. So a server that holds the lock
    and has served all that came before has nobody on the way to it, and may go.
    """

    def __init__(self, terms: PrivateTerms, now_ns: int) -> None:
        self._files = terms.files
        self._ending = Ending(terms.ending, now_ns)
        self._lock: FileLock | None = None

    def is_due(self, now_ns: int, *, is_used: bool) -> bool:
        """As `Ending` has it."""
        return self._ending.is_due(now_ns, is_used=is_used)

    def hold_start(self) -> bool:
        """From now on nobody starts a server of this name. False: somebody is about to; come again."""
        try:
            self._lock = FileLock.take(self._files.start_lock)
        except OSError as fault:
            # The folder is gone, and the server cannot be found any more.
            logger.warning("nobody finds this server: %s", fault)
            return True
        return self._lock is not None

    def free_start(self) -> None:
        """Somebody came after all."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def bound_log(self) -> None:
        """All that was written goes when it is too much: the file is open in append mode."""
        with contextlib.suppress(OSError):
            if self._files.log.stat().st_size > LOG_BYTES:
                os.truncate(self._files.log, 0)
                logger.warning("the log was longer than %d bytes and begins anew", LOG_BYTES)

    def close(self, *, is_clean: bool) -> None:
        """After everything else. Files that a starter is busy with are those of its server."""
        if self._lock is None and not self.hold_start():
            return
        if is_clean:
            with contextlib.suppress(OSError):
                self._files.log.unlink()
        if self._lock is not None:
            self._lock.remove()
        self._files.remove_folder()
