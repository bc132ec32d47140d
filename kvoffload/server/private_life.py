"""A private server's own life: when it ends, so that nobody who looks for it is lost, and which files go with it."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass

from kvoffload.file_lock import FileLock
from kvoffload.private_files import PrivateFiles

logger = logging.getLogger(__name__)

LOG_BYTES = 1 << 20
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class EndingTerms:
    """Says how long a private server is there for nobody."""

    linger_s: float
    """When its last engine has ended: a new one finds the cache again."""
    first_engine_s: float
    """From its start on."""


class Ending:
    """Says when a private server is due: its last engine has ended, or none has come, and nobody came since.

    Belongs to the thread of the event loop.
    """

    def __init__(self, terms: EndingTerms, now_ns: int) -> None:
        self._terms = terms
        self._until_ns: int | None = now_ns + int(terms.first_engine_s * _NS_PER_S)
        """None: it is used."""

    def is_due(self, now_ns: int, *, is_used: bool) -> bool:
        """To be asked again and again, and whenever an engine has come: one that was not seen here was none."""
        if is_used:
            self._until_ns = None
        elif self._until_ns is None:
            self._until_ns = now_ns + int(self._terms.linger_s * _NS_PER_S)
        return self._until_ns is not None and now_ns >= self._until_ns


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
        """Says whether the server is to end, as `Ending` has it."""
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
        """Removes the server's files, after everything else. Files that a starter is busy with are those of its
        server."""
        if self._lock is None and not self.hold_start():
            return
        if is_clean:
            with contextlib.suppress(OSError):
                self._files.log.unlink()
        if self._lock is not None:
            self._lock.remove()
        self._files.remove_folder()
